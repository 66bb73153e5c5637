"""The tensors of EAGLE drafters: which a folder must hold, for each generation and option, with names and shapes.

EAGLE-1 and EAGLE-2 share a layout, and EAGLE-3 has another one with options of its own. What differs between them is
declared in `EagleForm`, which `models/eagle.py` reads from a folder, and `models/eagle_layer.py` computes. Training and
conversion read the same table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.models.config import ModelConfig
from forerun.models.projections import LayerTable

PLACES = ("midlayer", "layers.0")  # what the layer's tensors are called
FEATURE = (-1,)  # the state that EAGLE-1 reads: the one behind the target's final norm
EMBEDDING, HEAD, NORM, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "norm.weight", "d2t", "t2d"
MASK_STATE = "mask_hidden"  # what stands for the target's states in masked places
INPUT_NORM, STATE_NORM = "input_layernorm.weight", "hidden_norm.weight"


@dataclass(frozen=True, slots=True)
class EagleForm:
    """What differs between EAGLE layers, as the folder says. `taps` are the target's states that it reads.

    `joined` is EAGLE-1: embedding and state are mapped to the layer's input together, there is neither a norm before
    attention nor one behind the layer, and the head is the target's. The other fields are options of EAGLE-3.
    `norm_before_residual`: the residual stream is the normed state. `norm_before_fc` and `fc_norm`: the states are
    normed before they are mapped, all of them together or each by itself. `norm_output`: guesses read the layer's
    output behind the last norm (EAGLE 3.1). `fc_bias` is of the map. `mask_token` is P-EAGLE, which guesses in masked
    places, all in one pass: their embedding.
    """

    taps: tuple[int, ...]
    joined: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None


@dataclass(frozen=True, slots=True)
class EagleTensors:
    """Names and shapes of all tensors of a folder."""

    config: ModelConfig
    form: EagleForm
    place: str
    target_hidden: int
    draft_vocab: int
    own_embedding: bool
    own_head: bool = True

    @property
    def table(self) -> LayerTable:
        """The first layer's. In EAGLE-3 the projections of queries, keys and values read twice the width."""
        table = LayerTable.of(self.config, 0)
        if self.form.joined:
            return replace(table, vectors={name: size for name, size in table.vectors.items() if name != INPUT_NORM})
        vectors = {**table.vectors, STATE_NORM: self.config.hidden}
        return replace(table, vectors=vectors, qkv=replace(table.qkv, inputs=2 * self.config.hidden))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All of them but the table of ids."""
        outside = self.of_joined() if self.form.joined else self.of_fused()
        if self.form.fc_bias:
            outside["fc.bias"] = (self.config.hidden,)
        if self.own_embedding:
            outside[EMBEDDING] = (self.config.vocab_size, self.config.hidden)
        for index in range(1, self.config.layers):
            table = LayerTable.of(self.config, index)
            outside |= {f"layers.{index}.{name}": shape for name, shape in table.tensors().items()}
        return outside | {f"{self.place}.{name}": shape for name, shape in self.table.tensors().items()}

    def of_joined(self) -> dict[str, tuple[int, ...]]:
        """Those outside of EAGLE-1's layer."""
        return {"fc.weight": (self.config.hidden, self.config.hidden + self.target_hidden)}

    def of_fused(self) -> dict[str, tuple[int, ...]]:
        """Those outside of EAGLE-3's layer."""
        hidden, num_taps = self.config.hidden, len(self.form.taps)
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, num_taps * self.target_hidden),
            NORM: (hidden,),
        }
        if self.own_head:
            found[HEAD] = (self.draft_vocab, hidden)
        if self.form.norm_before_fc:
            found["input_norm.weight"] = (num_taps * self.target_hidden,)
        if self.form.mask_token is not None:
            found[MASK_STATE] = (1, 1, num_taps * self.target_hidden)
        if self.form.fc_norm:
            found |= {f"fc_norm.{tap}.weight": (self.target_hidden,) for tap in range(num_taps)}
        return found

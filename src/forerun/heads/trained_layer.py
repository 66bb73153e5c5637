"""Decoder layers with gradients: the arithmetic of `models/backends/torch_cpu/` over whole texts at once.

This file decides how layers are computed while they are trained: attention is one function of what is read, of keys and
values that are there already, and of a mask that says which of them each place sees. Norms and rotations are the
decoder's own functions. A student that is a stack of layers reads a text once. One of a single layer goes through
drafts of all roots of a text at once, step by step, as when it serves, so that it learns at every depth from what it
will see there (the training-time test of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Bool, Float, Int
from forerun.errors import UnsupportedModel
from forerun.heads.student import Predictions, Student, TableStudent, TextBatch
from forerun.models.config import ModelConfig
from forerun.models.projections import FINAL_NORM
from forerun.models.rope import RopeTables, rope_tables
from forerun.models.rows import rms_norm, rotate

KeysAndValues = tuple[Tensor, Tensor]  # by batch, head of the queries and place


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """A dense layer of Llama's or Qwen3's kind over `weights`, whose names begin with `place`."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    place: str
    rope: RopeTables

    def __call__(
        self,
        x: Float[Tensor, "batch places hidden"],
        positions: Int[Tensor, "batch places"],
        mask: Bool[Tensor, "batch 1 places keys"] | None,
        seen: list[KeysAndValues],
        read: Float[Tensor, "batch places inputs"] | None = None,
    ) -> Float[Tensor, "batch places hidden"]:
        """The stream behind the layer, of `x`. Its attention reads `x`, normed, or `read` as it is.

        The layer's keys and values join those `seen` already, of which each place sees what the mask says; without one
        there were none, and each place sees all before it.
        """
        read = self.normed(x, "input_layernorm") if read is None else read
        seen.append(self.keys_and_values(read, positions))
        q = self.rotated(read, "q", positions).transpose(1, 2)
        k, v = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.linear(mixed.transpose(1, 2).flatten(2), "self_attn.o_proj")
        inner = self.normed(x, "post_attention_layernorm")
        gate, up = self.linear(inner, "mlp.gate_proj"), self.linear(inner, "mlp.up_proj")
        return x + self.linear(functional.silu(gate) * up, "mlp.down_proj")

    def keys_and_values(
        self, read: Float[Tensor, "batch places inputs"], positions: Int[Tensor, "batch places"]
    ) -> KeysAndValues:
        """What is seen at these positions, for every head of the queries."""
        k, v = (
            heads.repeat_interleave(self.config.group, dim=2).transpose(1, 2)
            for heads in (self.rotated(read, "k", positions), self.projected(read, "v"))
        )
        return k, v

    def rotated(
        self, x: Float[Tensor, "batch places inputs"], name: str, positions: Int[Tensor, "batch places"]
    ) -> Float[Tensor, "batch places heads head_dim"]:
        """Queries ("q") or keys ("k") at these positions, normed where the family does that."""
        heads = self.projected(x, name)
        if self.config.qk_norm:
            heads = self.normed(heads, f"self_attn.{name}_norm")
        cos, sin = (table[positions.flatten()][:, None] for table in (self.rope.cos, self.rope.sin))
        return rotate(heads.flatten(0, 1), cos, sin).view(heads.shape)

    def projected(
        self, x: Float[Tensor, "batch places inputs"], name: str
    ) -> Float[Tensor, "batch places heads head_dim"]:
        """Queries, keys or values ("v"), head by head."""
        heads: Tensor = self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, self.config.head_dim))
        return heads

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{self.place}.{name}.weight"], self.config.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Through the layer's projection of this name, with its bias if it has one."""
        name = f"{self.place}.{name}"
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The dense layers of a configuration over `weights`, whose names are those of a checkpoint."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    rope: RopeTables

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> LayerStack:
        """The layers, with tables of angles on the weights' device. Raises UnsupportedModel for other kinds."""
        if config.experts or config.sinks or not config.is_plain:
            kinds = "experts or attention sinks" if config.is_plain else "layers of its kind"
            raise UnsupportedModel(
                f"a {config.family} with {kinds} cannot be trained: choose a dense checkpoint of Llama's or Qwen's form"
            )
        device = next(iter(weights.values())).device
        return cls(config, weights, rope_tables(config).to(device))

    def __call__(self, x: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length hidden"]:
        """The residual stream behind the last layer; the first place of a text is position 0."""
        positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        masks = {window: mask_of(window, positions) for window in set(self.config.windows)}
        for index in range(self.config.layers):
            layer = TrainedLayer(self.config, self.weights, f"model.layers.{index}", self.rope)
            x = layer(x, positions, masks[self.config.windows[index]], [])
        return x

    def normed(self, x: Float[Tensor, "batch length hidden"], name: str) -> Float[Tensor, "batch length hidden"]:
        return rms_norm(x, self.weights[name], self.config.norm_eps)


def mask_of(window: int | None, places: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch 1 length length"] | None:
    """Which places of texts see which; None where each sees all before it."""
    if window is None or window >= places.shape[1]:
        return None
    behind = places[:, None, :, None] - places[:, None, None, :]
    return (behind >= 0) & (behind < window)


@dataclass(frozen=True, kw_only=True)
class StackStudent(Student):
    """A student that is a stack of layers under an output matrix, and guesses one token behind every place.

    What it reads there does not depend on who wrote the text, so a guess at any depth reads what its first guess would
    read there.
    """

    config: ModelConfig
    stack: LayerStack = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", LayerStack.of(self.config, self.weights))

    @abstractmethod
    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """What its first layer reads."""

    @abstractmethod
    def logits(self, states: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places vocab"]:
        """Those of its output layer, of normed states."""

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        x = self.stack(self.inputs(batch))
        return Predictions([self.logits(self.stack.normed(x[:, batch.first_root :], FINAL_NORM))], batch.roots)


@dataclass(frozen=True, kw_only=True)
class DraftedStudent(TableStudent):
    """A layer in training whose weights begin with `place`. Drafts are of as many steps as `depth_weights`. The
    target's `target_norm` stays as it is.

    At step 0 each place reads what belongs to the text. At step s every place is a root whose draft is s tokens long:
    what it reads stands s positions further on, and sees the text up to its root, and of the later steps its own tokens
    alone. That is what a drafter's cache holds while it serves.
    """

    place: ClassVar[str]
    config: ModelConfig
    target_norm: Float[Tensor, " hidden"] | None = None  # before the head; None where it does more than scale
    layer: TrainedLayer = field(init=False)

    def __post_init__(self) -> None:
        rope = rope_tables(self.config).to(self.embedding.device)
        object.__setattr__(self, "layer", TrainedLayer(self.config, self.weights, self.place, rope))

    @abstractmethod
    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The states that are read beside the tokens behind them, at the first step."""

    @abstractmethod
    def entry(
        self, embedded: Float[Tensor, "batch places hidden"], states: Float[Tensor, "batch places hidden"]
    ) -> tuple[Float[Tensor, "batch places hidden"], Float[Tensor, "batch places inputs"] | None]:
        """The layer's stream, and what its attention reads, of tokens beside states; None: the stream, normed."""

    def output(self, x: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places hidden"]:
        """What is read at the next step, of the stream behind the layer."""
        return x

    def logits(self, states: Float[Tensor, "batch roots hidden"]) -> Float[Tensor, "batch roots vocab"]:
        """What a step says of the token behind it."""
        return self.head(states)

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """The law of every step of the drafts from these roots: with dice so many that each token is guessed about
        once. Nothing is before a text's first token: where that is the root, what is read is 0."""
        num_steps = len(self.depth_weights)
        roots = batch.roots if dice is None else batch.some_roots(num_steps, dice)
        tokens, states = functional.pad(batch.tokens, (0, num_steps)), self.inputs(batch)
        places, rows = (roots - 1).clamp(min=0), torch.arange(len(states), device=states.device)[:, None]
        logits, past = [], list[KeysAndValues]()
        for step in range(num_steps):
            at = places if step else batch.places[:, : states.shape[1]]
            states = self.step(self.embedding[tokens[rows, at + 1 + step]], states, at, past)
            states = states if step else states[rows, places]
            logits.append(self.logits(states.masked_fill((roots == 0)[..., None], 0.0)))
        return Predictions(logits, roots)

    def target_logits(self, last: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places ids"] | None:
        """By the rows of the target's head that the draft has."""
        if self.vocabulary is None or self.target_norm is None:
            return None
        return self.head(rms_norm(last, self.target_norm, self.config.norm_eps))

    def of_first_guesses(self) -> DraftedStudent:
        """Every place is a root then: that takes as long as all steps from one root in so many."""
        return replace(self, depth_weights=self.depth_weights[:1])

    def step(
        self,
        embedded: Float[Tensor, "batch places hidden"],
        states: Float[Tensor, "batch places hidden"],
        places: Int[Tensor, "batch places"],
        past: list[KeysAndValues],
    ) -> Float[Tensor, "batch places hidden"]:
        """What is read at the step behind the one that follows `past`, which this step's keys and values join.

        At the first step `places` are those of all texts from 0 on, later those whose drafts are gone on with: the same
        ones at every step. Each sees the text up to its root, and of the later steps its own tokens alone.
        """
        mask, (x, read) = None, self.entry(embedded, states)
        if past:
            text = torch.arange(past[0][0].shape[2], device=x.device) <= places[:, :, None]
            alone = torch.eye(places.shape[1], dtype=torch.bool, device=x.device).expand(len(x), -1, -1)
            mask = torch.cat([text, *[alone] * len(past)], dim=2)[:, None]
        return self.output(self.layer(x, places + len(past), mask, past, read))

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Behind the norm whose gain has this name."""
        return rms_norm(x, self.weights[name], self.config.norm_eps)

"""Decoder layers with gradients: the arithmetic of `models/backends/torch_cpu/` over entire texts.

Attention takes the layer's input, earlier keys and values, and a mask of which of these each position sees. Norms and
rotations are the decoder's functions. A student that is a stack of layers reads a text once. A single-layer student
unrolls the drafts from all roots of a text together, step by step as while drafting, so that it is trained at every
depth on the inputs that it gets there when drafting (the training-time test of EAGLE-3, 2503.01840).
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

KeysAndValues = tuple[Tensor, Tensor]  # [batch, query heads, positions, head_dim]


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """A dense layer as in Llama or Qwen3, with the `weights` whose names start with `place`."""

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
        """The residual stream after the layer, from the stream `x`. Attention reads `read`, or else `x` normed.

        The layer's keys and values are appended to `seen`. `mask` selects the keys that each position sees; without it
        attention is causal, and `seen` must be empty.
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
        """The keys and values at these positions, repeated for every query head."""
        k, v = (
            heads.repeat_interleave(self.config.group, dim=2).transpose(1, 2)
            for heads in (self.rotated(read, "k", positions), self.projected(read, "v"))
        )
        return k, v

    def rotated(
        self, x: Float[Tensor, "batch places inputs"], name: str, positions: Int[Tensor, "batch places"]
    ) -> Float[Tensor, "batch places heads head_dim"]:
        """Queries ("q") or keys ("k") at these positions, normed if the family norms them."""
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
        """Apply the layer's projection of this name, with its bias if it has one."""
        name = f"{self.place}.{name}"
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The dense layers of a configuration with `weights`, which have the names of a checkpoint."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    rope: RopeTables

    @classmethod
    def of(cls, config: ModelConfig, weights: Mapping[str, Tensor]) -> LayerStack:
        """The layers, with rotary tables on the weights' device. Raises UnsupportedModel for layers of other kinds."""
        if config.experts or config.sinks or not config.is_plain:
            kinds = "experts or attention sinks" if config.is_plain else "layers of its kind"
            raise UnsupportedModel(
                f"a {config.family} with {kinds} cannot be trained: choose a dense checkpoint such as a Llama or Qwen"
            )
        device = next(iter(weights.values())).device
        return cls(config, weights, rope_tables(config).to(device))

    def __call__(self, x: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length hidden"]:
        """The residual stream after the last layer; texts start at position 0."""
        positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        masks = {window: mask_of(window, positions) for window in set(self.config.windows)}
        for index in range(self.config.layers):
            layer = TrainedLayer(self.config, self.weights, f"model.layers.{index}", self.rope)
            x = layer(x, positions, masks[self.config.windows[index]], [])
        return x

    def normed(self, x: Float[Tensor, "batch length hidden"], name: str) -> Float[Tensor, "batch length hidden"]:
        return rms_norm(x, self.weights[name], self.config.norm_eps)


def mask_of(window: int | None, places: Int[Tensor, "batch length"]) -> Bool[Tensor, "batch 1 length length"] | None:
    """The attention mask of a sliding window; None if the window is at least as long as the text."""
    if window is None or window >= places.shape[1]:
        return None
    behind = places[:, None, :, None] - places[:, None, None, :]
    return (behind >= 0) & (behind < window)


@dataclass(frozen=True, kw_only=True)
class StackStudent(Student):
    """A student that is a stack of layers with an output matrix and predicts the token after every position.

    Its inputs are the same for text and for draft tokens, so one pass over a text trains all depths of a draft.
    """

    config: ModelConfig
    stack: LayerStack = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", LayerStack.of(self.config, self.weights))

    @abstractmethod
    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The inputs of the first layer."""

    @abstractmethod
    def logits(self, states: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places vocab"]:
        """The logits of the output layer, from normed states."""

    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        x = self.stack(self.inputs(batch))
        return Predictions([self.logits(self.stack.normed(x[:, batch.first_root :], FINAL_NORM))], batch.roots)


@dataclass(frozen=True, kw_only=True)
class DraftedStudent(TableStudent):
    """A single layer in training, whose weights' names start with `place`; drafts have a step per depth weight.

    At step 0 each position reads the text. At step s every position is a root with a draft of s tokens: it reads the
    token s positions later, and sees the text up to its root and the tokens of its own draft. A drafter sees the same
    in its cache.
    """

    place: ClassVar[str]
    config: ModelConfig
    layer: TrainedLayer = field(init=False)

    def __post_init__(self) -> None:
        rope = rope_tables(self.config).to(self.tables.embedding.device)
        object.__setattr__(self, "layer", TrainedLayer(self.config, self.weights, self.place, rope))

    @abstractmethod
    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The states of the first step; each is read with the token after its position."""

    @abstractmethod
    def entry(
        self, embedded: Float[Tensor, "batch places hidden"], states: Float[Tensor, "batch places hidden"]
    ) -> tuple[Float[Tensor, "batch places hidden"], Float[Tensor, "batch places inputs"] | None]:
        """The layer's stream, and the input of its attention or None for the normed stream, from tokens and states."""

    def output(self, x: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places hidden"]:
        """The states of the next step, from the stream after the layer."""
        return x

    def logits(self, states: Float[Tensor, "batch roots hidden"]) -> Float[Tensor, "batch roots vocab"]:
        """The logits of the next token, from the states of a step."""
        return self.tables.head(states)

    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        """The logits of all steps. With `generator`, roots are sampled so that each token is predicted about once.

        A text's first token has no state before it: if it is the root, the state is 0.
        """
        num_steps = len(self.depth_weights)
        roots = batch.roots if generator is None else batch.some_roots(num_steps, generator)
        tokens, states = functional.pad(batch.tokens, (0, num_steps)), self.inputs(batch)
        places, rows = (roots - 1).clamp(min=0), torch.arange(len(states), device=states.device)[:, None]
        logits, past = [], list[KeysAndValues]()
        for step in range(num_steps):
            at = places if step else batch.places[:, : states.shape[1]]
            states = self.step(self.tables.embedding[tokens[rows, at + 1 + step]], states, at, past)
            states = states if step else states[rows, places]
            logits.append(self.logits(states.masked_fill((roots == 0)[..., None], 0.0)))
        return Predictions(logits, roots)

    def target_logits(self, last: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places ids"] | None:
        """As in Student, by the rows of the target's head for the drafter's tokens."""
        if self.vocabulary is None or self.tables.scale is None:
            return None
        return self.tables.head(rms_norm(last, self.tables.scale, self.config.norm_eps))

    def at_depth_1(self) -> DraftedStudent:
        """As in Student; all positions are roots then, which costs as much as all steps from sampled roots."""
        return replace(self, depth_weights=self.depth_weights[:1])

    def step(
        self,
        embedded: Float[Tensor, "batch places hidden"],
        states: Float[Tensor, "batch places hidden"],
        places: Int[Tensor, "batch places"],
        past: list[KeysAndValues],
    ) -> Float[Tensor, "batch places hidden"]:
        """Run one step: append its keys and values to `past`, and return the states for the next step.

        At the first step `places` are all positions of the texts; at every later step they are the positions before the
        roots. Each position sees the text up to its root and the tokens of its own draft.
        """
        mask, (x, read) = None, self.entry(embedded, states)
        if past:
            text = torch.arange(past[0][0].shape[2], device=x.device) <= places[:, :, None]
            alone = torch.eye(places.shape[1], dtype=torch.bool, device=x.device).expand(len(x), -1, -1)
            mask = torch.cat([text, *[alone] * len(past)], dim=2)[:, None]
        return self.output(self.layer(x, places + len(past), mask, past, read))

    def normed(self, x: Tensor, name: str) -> Tensor:
        """`x` normed with the gain of this name."""
        return rms_norm(x, self.weights[name], self.config.norm_eps)

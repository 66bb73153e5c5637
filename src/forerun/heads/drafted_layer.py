"""A decoder layer with gradients that reads drafts of every root of a text at once, step by step.

At step 0 each place reads what belongs to the text. At step s every place is a root whose draft is s tokens long: what
it reads stands s positions further on, and sees the text up to its root, and of the later steps its own tokens alone.
That is what a drafter's cache holds while it serves, so layers learn at every depth from what they will see there
(the training-time test of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.heads.student import TextBatch
from forerun.models.config import ModelConfig
from forerun.models.decoder import rms_norm, rotate
from forerun.models.rope import RopeTables

KeysAndValues = tuple[Tensor, Tensor]  # of a step, by batch, head and place


@dataclass(frozen=True, slots=True)
class DraftedLayer:
    """A dense layer of Llama's or Qwen3's kind over `weights`, whose names begin with `place`."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    place: str
    rope: RopeTables

    def mix(
        self,
        x: Float[Tensor, "batch places inputs"],
        places: Int[Tensor, "batch places"],
        past: list[KeysAndValues],
    ) -> Float[Tensor, "batch places hidden"]:
        """What attention adds at the step that follows `past`, which this step's keys and values join; `x` is normed.

        At the first step `places` are those of all texts from 0 on, later those whose drafts are gone on with: the same
        ones at every step.
        """
        c, step = self.config, len(past)
        q, k, v = (self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, c.head_dim)) for name in "qkv")
        if c.qk_norm:
            q, k = self.normed(q, "self_attn.q_norm"), self.normed(k, "self_attn.k_norm")
        cos, sin = (table[(places + step).flatten()][:, None] for table in (self.rope.cos, self.rope.sin))
        q, k = (rotate(t.flatten(0, 1), cos, sin).view(t.shape) for t in (q, k))
        past.append(tuple(t.repeat_interleave(c.group, dim=2).transpose(1, 2) for t in (k, v)))  # type: ignore[arg-type]
        mixed = attended(q.transpose(1, 2), places, past).transpose(1, 2).flatten(2)
        return self.linear(mixed, "self_attn.o_proj")

    def mlp(self, x: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places hidden"]:
        """What the MLP adds to `x`."""
        inner = self.normed(x, "post_attention_layernorm")
        gate, up = self.linear(inner, "mlp.gate_proj"), self.linear(inner, "mlp.up_proj")
        return self.linear(functional.silu(gate) * up, "mlp.down_proj")

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Behind the layer's norm of this name."""
        return rms_norm(x, self.weights[f"{self.place}.{name}.weight"], self.config.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Through the layer's projection of this name, with its bias if it has one."""
        name = f"{self.place}.{name}"
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Drafts of `num_steps` guesses that follow a text from these roots.

    In training roots are as many that each token is guessed about once.
    """

    tokens: Int[Tensor, "batch padded"]
    roots: Int[Tensor, "batch roots"]
    num_steps: int

    @classmethod
    def of(cls, batch: TextBatch, num_steps: int, dice: torch.Generator | None) -> DraftSteps:
        """Those from some roots of these texts, or from all of them without dice."""
        roots = batch.roots if dice is None else batch.some_roots(num_steps, dice)
        return cls(functional.pad(batch.tokens, (0, num_steps)), roots, num_steps)

    def run(
        self,
        states: Float[Tensor, "batch length hidden"],
        embedding: Float[Tensor, "vocab hidden"],
        layer: Callable[[Tensor, Tensor, Tensor, list[KeysAndValues]], Tensor],
    ) -> Iterator[Float[Tensor, "batch roots hidden"]]:
        """The layer's outputs behind the roots, step by step.

        `states` are what it reads at first, each beside the token that follows; later it reads its own outputs. Nothing
        is before a text's first token: where that is the root, the output is 0.
        """
        past: list[KeysAndValues] = []
        places, rows = (self.roots - 1).clamp(min=0), torch.arange(len(states), device=states.device)[:, None]
        every = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
        for step in range(self.num_steps):
            at = places if step else every
            states = layer(embedding[self.tokens[rows, at + 1 + step]], states, at, past)
            states = states if step else states[rows, places]
            yield states.masked_fill((self.roots == 0)[..., None], 0.0)


def attended(
    q: Float[Tensor, "batch heads places head_dim"], places: Int[Tensor, "batch places"], past: list[KeysAndValues]
) -> Float[Tensor, "batch heads places head_dim"]:
    """What each place's draft sees: the text up to its root, and of the later steps its own tokens alone."""
    (keys, values), *own = past
    length = keys.shape[2]
    hidden = torch.arange(length, device=q.device) > places[:, None, :, None]
    scores = [(q @ keys.mT).masked_fill(hidden, -math.inf), *((q * k).sum(-1, keepdim=True) for k, _ in own)]
    weights = (torch.cat(scores, dim=-1) / math.sqrt(q.shape[-1])).softmax(-1)
    mixed = weights[..., :length] @ values
    for i, (_, v) in enumerate(own):
        mixed = mixed + weights[..., length + i, None] * v
    return mixed

"""A decoder layer with gradients that reads drafts of every root of a text at once, step by step.

At step 0 each place reads what belongs to the text. At step s every place is a root whose draft is s tokens long: what
it reads stands s positions further on, and sees the text up to its root, and of the later steps its own tokens alone.
That is what a drafter's cache holds while it serves, so layers learn at every depth from what they will see there
(the training-time test of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.models.config import ModelConfig
from forerun.models.decoder import rms_norm, rotate
from forerun.models.rope import RopeTables

KeysAndValues = tuple[Tensor, Tensor]  # of a step, by batch, head and place


@dataclass(frozen=True, slots=True)
class DraftedLayer:
    """A dense layer of Llama's kind over `weights`, whose names begin with `place`."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    place: str
    rope: RopeTables

    def mix(
        self, x: Float[Tensor, "batch places inputs"], step: int, past: list[KeysAndValues]
    ) -> Float[Tensor, "batch places hidden"]:
        """What attention adds at this step; `x` is normed. Its keys and values join those of the steps before."""
        c, places = self.config, x.shape[1]
        q, k, v = (self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, c.head_dim)) for name in "qkv")
        position = slice(step, step + places)
        cos, sin = (t[position].repeat(len(x), 1)[:, None] for t in (self.rope.cos, self.rope.sin))
        q, k = (rotate(t.flatten(0, 1), cos, sin).view(t.shape) for t in (q, k))
        past.append(tuple(t.repeat_interleave(c.group, dim=2).transpose(1, 2) for t in (k, v)))  # type: ignore[arg-type]
        mixed = attended(q.transpose(1, 2), past).transpose(1, 2).flatten(2)
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


def attended(
    q: Float[Tensor, "batch heads places head_dim"], past: list[KeysAndValues]
) -> Float[Tensor, "batch heads places head_dim"]:
    """What each place's draft sees: the text up to its root, and of the later steps its own tokens alone."""
    (keys, values), *own = past
    places = q.shape[2]
    hidden = torch.ones(places, places, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ keys.mT).masked_fill(hidden, -math.inf), *((q * k).sum(-1, keepdim=True) for k, _ in own)]
    weights = (torch.cat(scores, dim=-1) / math.sqrt(q.shape[-1])).softmax(-1)
    mixed = weights[..., :places] @ values
    for i, (_, v) in enumerate(own):
        mixed = mixed + weights[..., places + i, None] * v
    return mixed

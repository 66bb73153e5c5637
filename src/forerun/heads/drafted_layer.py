"""A decoder layer with gradients that reads drafts of every root of a text at once, step by step.

At step 0 each place reads what belongs to the text. At step s every place is a root whose draft is s tokens long: what
it reads stands s positions further on, and sees the text up to its root, and of the later steps its own tokens alone.
That is what a drafter's cache holds while it serves, so layers learn at every depth from what they will see there
(the training-time test of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.heads.student import TextBatch
from forerun.heads.trained_layer import TrainedLayer

KeysAndValues = tuple[Tensor, Tensor]  # of a step, by batch, head and place


@dataclass(frozen=True, slots=True)
class DraftedLayer(TrainedLayer):
    """A layer that is read step by step."""

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
        positions = places + len(past)
        q, k, v = self.rotated(x, "q", positions), self.rotated(x, "k", positions), self.projected(x, "v")
        past.append(tuple(t.repeat_interleave(self.config.group, dim=2).transpose(1, 2) for t in (k, v)))  # type: ignore[arg-type]
        mixed = attended(q.transpose(1, 2), places, past).transpose(1, 2).flatten(2)
        return self.linear(mixed, "self_attn.o_proj")


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

"""Students of one layer that go through drafts of all roots of a text at once, step by step, as when they serve.

At step 0 each place reads what belongs to the text. At step s every place is a root whose draft is s tokens long: what
it reads stands s positions further on, and sees the text up to its root, and of the later steps its own tokens alone.
That is what a drafter's cache holds while it serves, so layers learn at every depth from what they will see there
(the training-time test of EAGLE-3, 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.heads.fresh import TargetHead
from forerun.heads.student import Predictions, Student, TextBatch
from forerun.heads.trained_layer import KeysAndValues, TrainedLayer
from forerun.models.config import ModelConfig
from forerun.models.rope import rope_tables
from forerun.models.rows import rms_norm


@dataclass(frozen=True, kw_only=True)
class DraftedStudent(Student):
    """A layer in training whose weights begin with `place`. `embedding` and `head` are the target's, the latter of the
    ids in `vocabulary`, and stay as they are. Drafts are of as many steps as `depth_weights`."""

    may_lack_tokens: ClassVar[bool] = True
    place: ClassVar[str]
    config: ModelConfig
    embedding: Float[Tensor, "vocab hidden"]
    head: TargetHead
    layer: TrainedLayer = field(init=False)

    def __post_init__(self) -> None:
        rope = rope_tables(self.config).to(self.embedding.device)
        object.__setattr__(self, "layer", TrainedLayer(self.config, self.weights, self.place, rope))

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> DraftedStudent:
        """With these tokens' rows of the target's head."""
        ids = ids.to(self.embedding.device)
        return replace(self, vocabulary=ids, head=self.head[ids])

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The states that are read beside the tokens behind them, at the first step."""
        raise NotImplementedError

    def entry(
        self, embedded: Float[Tensor, "batch places hidden"], states: Float[Tensor, "batch places hidden"]
    ) -> tuple[Float[Tensor, "batch places hidden"], Float[Tensor, "batch places inputs"] | None]:
        """The layer's stream, and what its attention reads, of tokens beside states; None: the stream, normed."""
        raise NotImplementedError

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

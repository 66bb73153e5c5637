"""What a training is asked for, beside its data and its student.

This file decides which values are allowed, how long the loss is KL, and how the learning rate rises and falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config import require_whole
from forerun.did_you_mean import nearest
from forerun.errors import InvalidRequest
from forerun.heads.student import MOST_DEPTH
from forerun.limits import real
from forerun.sampling.params import SamplingParams
from forerun.train.losses import LOSSES

PLACE_WEIGHTS = ("decay", "d-pace")
USUAL_STEPS = 2000
RISE = 100  # steps at most in which the learning rate rises
RISE_SHARE = 10  # of all steps: one in so many at most
MOST_SEQUENCES = 32  # answers that are written at a time, unless a step learns from more
POOL = 256  # answers that are kept where they are learnt from several times
COUNTS = ("batch", "max_tokens", "prompt_tokens", "held_out", "look_every", "patience", "checkpoint_every", "passes")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How long to train, on how much, by what, and when to look.

    A step learns from `batch` answers of at most `max_tokens` tokens, and each answer is learnt from `passes` times.
    `steps` or `hours` end the training; both None stand for USUAL_STEPS. `kl_share` of it the loss is KL, then `loss`.
    Depths weigh as the kind says, times `decay` to the depth, or by D-PACE, by how far drafts get; drafts are taken to
    be `draft_depth` deep. Every `look_every` steps the `held_out` prompts judge; after `patience` looks without a rise
    training stops. The state is kept at every look and every `checkpoint_every` steps. A text is cut into prompts of
    `prompt_tokens`. `rate` is AdamW's. With `bfloat16` a step multiplies in that format; weights, losses and looks
    stay in float32. Raises InvalidRequest.
    """

    steps: int | None = None
    hours: float | None = None
    batch: int = 8
    max_tokens: int = 128
    prompt_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    loss: str = "lk-lambda"
    kl_share: float = 0.1
    place_weights: str = "decay"
    decay: float = 1.0
    draft_depth: int = 8
    rate: float = 3e-3
    held_out: int = 16
    look_every: int = 100
    patience: int = 8
    checkpoint_every: int = 25
    seed: int = 0
    bfloat16: bool = False
    passes: int = 1

    def __post_init__(self) -> None:
        if self.steps is not None and self.hours is not None:
            raise InvalidRequest("hours", "--steps says how long to train, and so does --hours: give one of them.")
        if self.steps is None and self.hours is None:
            object.__setattr__(self, "steps", USUAL_STEPS)
        counts = (*COUNTS, "draft_depth")
        for name in counts if self.steps is None else ("steps", *counts):
            require_whole(name, getattr(self, name), 1)
        require_whole("seed", self.seed, 0)
        if self.draft_depth > MOST_DEPTH:
            raise InvalidRequest("draft_depth", f"{self.draft_depth} must be at most {MOST_DEPTH}.")
        for name, least, most in (("kl_share", 0.0, 1.0), ("decay", 1e-3, 1.0), ("rate", 1e-9, 10.0)):
            real(name, getattr(self, name), f"use a number from {least:g} to {most:g}", least, most)
        if self.hours is not None:
            real("hours", self.hours, "use a number of hours above 0", 1e-9)
        for name, known in (("loss", tuple(LOSSES)), ("place_weights", PLACE_WEIGHTS)):
            check_choice(name, getattr(self, name), known)
        self.sampling(0)

    def sampling(self, seed: int) -> SamplingParams:
        """The parameters of an answer."""
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, max_tokens=self.max_tokens, seed=seed
        )

    @property
    def num_answers(self) -> int:
        """Different answers that a training learns from. Raises InvalidRequest where only its time is known."""
        if self.steps is None:
            raise InvalidRequest("cache", "its size cannot be told for --hours: give --steps, or leave --cache out.")
        return -(-self.steps * self.batch // self.passes)

    @property
    def group_steps(self) -> int:
        """Steps that learn once from all answers of a group, which are written together and kept for `passes`."""
        if self.passes == 1:
            return max(1, MOST_SEQUENCES // self.batch)
        return -(-(POOL if self.steps is None else min(POOL, self.num_answers)) // self.batch)

    @property
    def law_temperature(self) -> float:
        """That of the laws that losses compare; at temperature 0, where a law is a single token, that of the model."""
        return 1.0 if self.sampling(0).greedy else self.temperature

    @property
    def length(self) -> float:
        """The steps or hours that it is asked for."""
        length = self.hours if self.steps is None else self.steps
        assert length is not None, "something ends a training"
        return float(length)

    def share_done(self, step: int, seconds: float) -> float:
        """How much of the training is over before this step, after so many seconds of training."""
        return min(1.0, (seconds / 3600 if self.steps is None else step) / self.length)

    def loss_at(self, share_done: float) -> str:
        """The loss of this part of the training."""
        return "kl" if share_done < self.kl_share else self.loss

    def rate_at(self, step: int, share_done: float) -> float:
        """The share of the full learning rate: a linear rise, and a linear fall over the whole training."""
        rise = RISE if self.steps is None else min(RISE, -(-self.steps // RISE_SHARE))
        return min((step + 1) / rise, 1 - share_done)


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise InvalidRequest for a word that is none of these, with the likely one."""
    if value not in known:
        near = nearest(str(value), known)
        meant = f"did you mean {near}? Otherwise " if near else ""
        raise InvalidRequest(name, f"{value!r} is not known: {meant}choose one of {', '.join(known)}.")

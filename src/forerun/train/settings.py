"""TrainSettings: the options of a training apart from its data and its student.

This file validates them, and defines the schedules of the loss and the learning rate. It does not import torch, because
the command line's help reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from forerun.config import require_whole
from forerun.did_you_mean import complete_from, nearest
from forerun.errors import InvalidRequest
from forerun.heads.sizes import MOST_DEPTH
from forerun.limits import INT64, real

if TYPE_CHECKING:
    from forerun.sampling.params import SamplingParams

LOSS_NAMES = ("lk-lambda", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "ce", "dspark")
SERVED = ("temperature", "top_k", "top_p")  # sampling parameters that the drafter will be used with
PLACE_WEIGHTS = ("decay", "d-pace")
USUAL_STEPS = 2000
MOST_WARM_UP = 100  # steps
WARM_UP_SHARE = 10  # warm-up takes at most one in so many steps
MOST_SEQUENCES = 32  # batch size of generation, unless a step needs more
POOL = 256  # answers kept in memory if they are used several times
COUNTS = ("batch", "max_tokens", "prompt_tokens", "held_out", "look_every", "patience", "checkpoint_every", "passes")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The learning options of `forerun train`.

    `steps` or `hours` limit the training; the default is USUAL_STEPS. Sampling parameters that are None are those of
    plain sampling (temperature 1). The loss is KL in the first `kl_share` of the training, and `loss` afterwards.
    Weights by depth are those of the student's kind times `decay`**depth, or D-PACE. With `bfloat16` matrix products
    use this format; weights, losses and evaluations stay in float32. Raises InvalidRequest for invalid values.
    """

    TITLE: ClassVar[str] = "Learning"

    steps: Annotated[int | None, Option(help="Training steps; default: 2000.")] = None
    hours: Annotated[float | None, Option(help="Hours to train, in place of --steps.")] = None
    batch: Annotated[int, Option(help="Answers per step.")] = 8
    max_tokens: Annotated[int, Option("--max-tokens", "-n", help="Maximum tokens of an answer.")] = 128
    prompt_tokens: Annotated[int, Option(help="Tokens of a prompt that is cut out of a text.")] = 64
    temperature: Annotated[
        float | None, Option("--temperature", "-t", help="As used later for generation; default: the model's or 1.")
    ] = None
    top_k: Annotated[int | None, Option(help="As used later for generation.")] = None
    top_p: Annotated[float | None, Option(help="As used later for generation.")] = None
    loss: Annotated[
        str,
        Option(help=f"Loss after the KL part: {', '.join(LOSS_NAMES)}.", autocompletion=complete_from(*LOSS_NAMES)),
    ] = "lk-lambda"
    kl_share: Annotated[float, Option(help="Fraction of the training, at its start, with the KL loss.")] = 0.1
    place_weights: Annotated[
        str, Option(help="Loss weights by depth: decay or d-pace.", autocompletion=complete_from("decay", "d-pace"))
    ] = "decay"
    decay: Annotated[float, Option(help="With decay: factor from each depth to the next.")] = 1.0
    draft_depth: Annotated[int, Option(help="Depth of drafts in evaluations.")] = 8
    rate: Annotated[float, Option(help="Learning rate after the warm-up; it falls to 0.")] = 3e-3
    held_out: Annotated[int, Option(help="Prompts for evaluation; at most a quarter of all.")] = 16
    look_every: Annotated[int, Option(help="Steps from one evaluation to the next.")] = 100
    patience: Annotated[int, Option(help="Evaluations without improvement after which training stops.")] = 8
    checkpoint_every: Annotated[int, Option(help="Steps from one checkpoint to the next.")] = 25
    seed: Annotated[int, Option(min=0, help="The same seed gives the same weights.")] = 0
    bfloat16: Annotated[
        bool, Option("--bfloat16", help="Matrix products in bfloat16: faster if the processor supports them.")
    ] = False
    passes: Annotated[int, Option(help="How often each answer is used.")] = 1
    first_share: Annotated[
        float, Option(help="eagle, mtp: fraction of the training, at its start, at depth 1 only.")
    ] = 0.0
    whole: Annotated[bool, Option("--whole", help="Train on the prompts too, not on answers alone.")] = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.hours is not None:
            raise InvalidRequest("hours", "it excludes --steps, which is given too: leave out one of them.")
        if self.steps is None and self.hours is None:
            object.__setattr__(self, "steps", USUAL_STEPS)
        counts = (*COUNTS, "draft_depth")
        for name in counts if self.steps is None else ("steps", *counts):
            require_whole(name, getattr(self, name), 1)
        require_whole("seed", self.seed, 0, INT64)
        if self.draft_depth > MOST_DEPTH:
            raise InvalidRequest("draft_depth", f"{self.draft_depth} must be at most {MOST_DEPTH}.")
        for name, least, most in (
            ("kl_share", 0.0, 1.0),
            ("first_share", 0.0, 1.0),
            ("decay", 1e-3, 1.0),
            ("rate", 1e-9, 10.0),
        ):
            real(name, getattr(self, name), f"use a number from {least:g} to {most:g}", least, most)
        if self.hours is not None:
            real("hours", self.hours, "use a number of hours above 0", 1e-9)
        for name, known in (("loss", LOSS_NAMES), ("place_weights", PLACE_WEIGHTS)):
            check_choice(name, getattr(self, name), known)
        if self.decay != 1.0 and self.place_weights != "decay":
            raise InvalidRequest(
                "decay", f"{self.decay:g} has no effect with {self.place_weights}: leave out one of them."
            )
        if any(getattr(self, name) is not None for name in SERVED):
            self.sampling(0)

    def sampling(self, seed: int) -> SamplingParams:
        """The sampling parameters of an answer with this seed."""
        from forerun.sampling.params import SamplingParams

        values = {name: getattr(self, name) for name in SERVED if getattr(self, name) is not None}
        return SamplingParams(**{"temperature": 1.0, **values}, max_tokens=self.max_tokens, seed=seed)

    @property
    def values(self) -> dict[str, Any]:
        """All settings by name, with defaults filled in."""
        params = self.sampling(0)
        return asdict(self) | {name: getattr(params, name) for name in SERVED}

    @property
    def num_answers(self) -> int:
        """The number of different answers of a training. Raises InvalidRequest if only its time is limited."""
        if self.steps is None:
            raise InvalidRequest("cache", "its size is unknown with --hours: use --steps, or leave --cache out.")
        return -(-self.steps * self.batch // self.passes)

    @property
    def group_steps(self) -> int:
        """The number of steps whose answers are generated together and kept in memory for `passes` passes."""
        if self.passes == 1:
            return max(1, MOST_SEQUENCES // self.batch)
        return -(-(POOL if self.steps is None else min(POOL, self.num_answers)) // self.batch)

    @property
    def law_temperature(self) -> float:
        """The temperature of the distributions in the loss: that of sampling, or 1 for greedy sampling."""
        params = self.sampling(0)
        return 1.0 if params.greedy else params.temperature

    @property
    def length(self) -> float:
        """The number of steps or hours."""
        length = self.hours if self.steps is None else self.steps
        assert length is not None, "one of both is set"
        return float(length)

    def share_done(self, step: int, seconds: float) -> float:
        """The completed share of the training before this step, after `seconds` of training."""
        return min(1.0, (seconds / 3600 if self.steps is None else step) / self.length)

    def loss_at(self, share_done: float) -> str:
        """The name of the loss at this share of the training."""
        return "kl" if share_done < self.kl_share else self.loss

    def rate_at(self, step: int, share_done: float) -> float:
        """The share of the full learning rate: linear warm-up, and linear decay over the entire training."""
        warm_up = MOST_WARM_UP if self.steps is None else min(MOST_WARM_UP, -(-self.steps // WARM_UP_SHARE))
        return min((step + 1) / warm_up, 1 - share_done)


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise InvalidRequest, with the most similar choice, if a value is not among the `known` ones."""
    if value not in known:
        near = nearest(str(value), known)
        meant = f"did you mean {near}? Otherwise " if near else ""
        raise InvalidRequest(name, f"{value!r} is not known: {meant}choose one of {', '.join(known)}.")

"""What a tuning is asked for: candidates, batch sizes, temperatures, how much text.

This file decides which values are allowed, and which candidates `early-exit:auto` stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.plan import Selection
from forerun.config import AUTO, AUTO_DEPTH
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import UnknownDrafter
from forerun.limits import real

EXITS = (8, 4, 2)  # parts of the layers behind which `early-exit:auto` tries to exit
PILOT_DEPTH = AUTO_DEPTH  # guesses of a round where acceptance is measured: no depth beyond it is predicted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to try, as it is spelled for the engine; `family` is how the user spelled it."""

    draft: str
    family: str


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The cells, `batches` x `temperatures` for every candidate, and what each is measured on, as of a Selection.

    Behind `time_limit_s` seconds no measurement is begun. Raises InvalidRequest.
    """

    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    num_tokens: int = 64
    num_prompts: int = 16
    repeats: int = 3
    seed: int = 0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        self.selection(0)  # checks the values
        if self.time_limit_s is not None:
            real("time_limit", self.time_limit_s, "use a number of seconds above 0", 1e-3)

    def selection(self, *depths: int) -> Selection:
        """What is run to measure these depths."""
        return Selection(
            self.batches, depths, self.temperatures, self.num_tokens, self.num_prompts, self.repeats, self.seed
        )


def candidates_of(drafts: Sequence[str], num_layers: int) -> list[Candidate]:
    """The drafters to try, each once. Raises UnknownDrafter for what does not parse, or where there is none."""
    if not drafts:
        raise UnknownDrafter("drafts: there is no drafter to try: name some, as in --drafts ngram suffix model:DIR")
    candidates: dict[str, Candidate] = {}
    for text in drafts:
        spec = parse_spec(text)
        family = str(spec)
        for draft in exits_of(num_layers) if spec == DraftSpec("early-exit", AUTO) else (family,):
            candidates.setdefault(draft, Candidate(draft, family))
    return list(candidates.values())


def exits_of(num_layers: int) -> list[str]:
    """The exits that `early-exit:auto` tries."""
    if num_layers < 2:
        raise UnknownDrafter("early-exit:auto: the target has a single layer, which leaves nothing to exit from")
    return [f"early-exit:{layer}" for layer in sorted({max(1, num_layers // part) for part in EXITS})]

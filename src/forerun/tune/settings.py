"""The candidates of a tuning.

This file decides how far each is drafted where acceptance is measured, and which ones `early-exit:auto` stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.config import AUTO, AUTO_DEPTH
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import UnknownDrafter

EXITS = (8, 4, 2)  # parts of the layers behind which `early-exit:auto` tries to exit
PILOT_DEPTH = AUTO_DEPTH  # guesses of a round where acceptance is measured: no depth beyond it is predicted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter to try, as it is spelled for the engine; `family` is how the user spelled it."""

    draft: str
    family: str


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

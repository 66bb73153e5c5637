"""The report of a tuning: all results, the best choices, and JSON.

The best choice at a batch size and temperature is the candidate with the highest measured speed-up, or plain decoding
if none is faster. Candidates whose figures are no evidence are undecided: they are never chosen, and plain decoding is
not chosen before them. The first batch size and temperature decide the overall choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.bench.plan import Selection
from forerun.config import AUTO
from forerun.report import json_object
from forerun.tune.study import Studied, TuneCell
from forerun.tune.translate import Translation, translations

QUIET = "Run the same command again when other programs rest: it repeats only what was disturbed."
AFRESH = "Measure again with --fresh, and with more --max-tokens or --repeats, since short runs scatter."


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The fastest choice at a batch size and a temperature; `draft` is None for plain decoding.

    With `auto` the controller chose the depth in each round, and `depth` is the best fixed depth. The speed-up on other
    prompts of the same kind is expected within `interval`.
    """

    batch: int
    temperature: float
    draft: str | None
    depth: int
    speed_up: float
    interval: tuple[float, float] | None = None
    auto: bool = False

    @property
    def shown_depth(self) -> int | str:
        """The depth as an option value."""
        return AUTO if self.auto else self.depth


@dataclass(frozen=True, slots=True)
class UndecidedSetting:
    """A candidate at a batch size and temperature whose figures are no evidence, why, and what to do about it."""

    batch: int
    temperature: float
    draft: str
    reason: str
    advice: str


@dataclass(frozen=True, slots=True)
class TuneReport:
    """All results. `about` describes the run; `model_options` are the model's options that differ from the defaults."""

    about: Mapping[str, Any]
    model_options: Mapping[str, Any]
    selection: Selection
    temperatures: tuple[float, ...]
    studied: tuple[Studied, ...]

    def choice(self, batch: int, temperature: float) -> TunedChoice | None:
        """The fastest measured choice at a batch size and temperature.

        None if nothing was measured, or if no decided candidate is faster than plain decoding and another is undecided.
        """
        choices = []
        for each in self.studied:
            cell = each.cell(batch, temperature)
            for auto, figures in ((False, cell and cell.drafted), (True, cell and cell.chosen)):
                if cell and not cell.undecided and figures and figures.speed_up:
                    speed_up = figures.speed_up.median
                    named = each.candidate.draft, cell.prediction.depth, speed_up, cell.interval_around(speed_up)
                    choices.append(TunedChoice(batch, temperature, *named, auto))
        best = max(choices, key=lambda choice: choice.speed_up, default=None)
        if best is None or best.speed_up > 1:
            return best
        open_settings = [each for each in self.undecided if (each.batch, each.temperature) == (batch, temperature)]
        return None if open_settings else TunedChoice(batch, temperature, None, 0, 1.0)

    @property
    def undecided(self) -> list[UndecidedSetting]:
        """The measured candidates whose figures are no evidence, those of the first batch size first."""
        return [
            UndecidedSetting(
                batch, temperature, each.candidate.draft, cell.undecided, QUIET if cell.disturbed else AFRESH
            )
            for temperature in self.temperatures
            for batch in self.selection.batches
            for each in self.studied
            if (cell := each.cell(batch, temperature)) and cell.undecided
        ]

    @property
    def template(self) -> Any:
        """The chat template's hash and options; None for plain text."""
        return self.about["prompts"]["template"]

    @property
    def pick(self) -> TunedChoice | None:
        """The fastest choice at the first batch size and temperature."""
        return self.choice(self.selection.batches[0], self.temperatures[0])

    def plain_from(self, temperature: float) -> int | None:
        """The smallest measured batch size from which plain decoding is fastest; None if there is none."""
        smallest = None
        for batch in sorted(self.selection.batches, reverse=True):
            choice = self.choice(batch, temperature)
            if choice is None or choice.draft is not None:
                break
            smallest = batch
        return smallest

    def best_exits(self) -> dict[str, str]:
        """The fastest exit of each family of several candidates, such as early-exit:auto."""
        best: dict[str, tuple[float, str]] = {}
        for each in self.studied:
            cell = each.cell(self.selection.batches[0], self.temperatures[0])
            if each.candidate.family != each.candidate.draft and cell and cell.speed_up and not cell.undecided:
                candidate = cell.speed_up, each.candidate.draft
                best[each.candidate.family] = max(candidate, best.get(each.candidate.family, candidate))
        return {family: draft for family, (_, draft) in best.items()}

    @property
    def same_tokens(self) -> bool:
        """Whether every drafted run gave the same tokens as plain decoding."""
        return all(c.figures.same_tokens for each in self.studied for c in each.cells if c.figures)

    @property
    def complete(self) -> bool:
        """Whether every candidate was measured in every cell."""
        return all(each.problem or (each.cells and all(c.speed_up for c in each.cells)) for each in self.studied)

    def translated(self) -> Sequence[Translation]:
        """The pick as options of other engines."""
        pick = self.pick
        return translations(pick.draft, pick.depth) if pick and pick.draft else ()

    def as_object(self) -> dict[str, Any]:
        """The report as JSON: seconds, bytes, shares between 0 and 1, and null for unknown values."""
        choices = [self.choice(b, t) for t in self.temperatures for b in self.selection.batches]
        return json_object(
            **self.about,
            complete=self.complete,
            same_tokens=self.same_tokens,
            pick=self.pick,
            choices=[choice for choice in choices if choice],
            undecided=self.undecided,
            plain_from_batch=[{"temperature": t, "batch": self.plain_from(t)} for t in self.temperatures],
            best_exits=self.best_exits(),
            candidates=[self.candidate_object(each) for each in self.studied],
            translations=self.translated(),
        )

    def candidate_object(self, each: Studied) -> dict[str, Any]:
        """A candidate as JSON, with all its figures."""
        return {
            "draft": each.candidate.draft,
            "asked_as": each.candidate.family,
            "problem": each.problem or None,
            "memory": each.memory,
            "costs": [
                {**asdict(group), "drafter": drafter, "rows": rows, **asdict(costs)}
                for group, table in each.costs.items()
                for drafter, by_rows in table.items()
                for rows, costs in by_rows.items()
            ],
            "acceptance_at_depth": [
                {"temperature": temperature, "category": kind or None, "rates": rates, "template": self.template}
                for temperature, kinds in each.acceptance.items()
                for kind, rates in kinds.items()
            ],
            "cells": [self.cell_object(cell) for cell in each.cells],
        }

    def cell_object(self, cell: TuneCell) -> dict[str, Any]:
        """A cell as JSON: the prediction and the measurements."""
        return {
            "batch": cell.group.batch,
            "temperature": cell.group.temperature,
            "template": self.template,
            "arm": cell.prediction.drafter,
            "depth": cell.prediction.depth,
            "predicted_speed_up": cell.prediction.speed_up,
            "predicted_speed_up_by_depth": cell.prediction.by_depth,
            "measured_speed_up": cell.drafted and cell.drafted.speed_up,
            "prediction_error": cell.error,
            "undecided": cell.undecided or None,
            "likely_on_other_prompts": None if cell.undecided else cell.interval_around(cell.speed_up),
            "measured_speed_up_of_auto": cell.chosen and cell.chosen.speed_up,
            "plain": cell.plain,
            "drafted": cell.drafted,
            "auto": cell.chosen,
            "same_tokens": cell.figures and cell.figures.same_tokens,
        }

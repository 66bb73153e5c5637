"""A study: all candidates, one after the other, each first predicted and then measured.

This file decides the order of measurements and what the time limit means. Every candidate has an equal share of the
time that is left when its turn comes; repetitions alternate between plain and drafted decoding of the same prompts, and
all cells have their first repetition before any has its second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.figures import CellFigures, GroupFigures, group_figures
from forerun.bench.plan import Group, Selection, Turn
from forerun.bench.run import BenchRun, hash_of
from forerun.errors import DraftError, NotEnoughMemory
from forerun.tune.costs import MeasuredCosts, cost_table
from forerun.tune.predict import DecodingJob, Prediction, TextRounds, acceptance_at_depth, predict
from forerun.tune.settings import PILOT_DEPTH, Candidate, TuneSettings
from forerun.tune.trial import DrafterMemory, Trial


@dataclass(frozen=True, slots=True)
class TuneCell:
    """A candidate at a batch size and a temperature: what was expected, and what was measured, if it was."""

    group: Group
    prediction: Prediction
    figures: GroupFigures | None

    @property
    def plain(self) -> CellFigures | None:
        """Plain decoding of the same prompts, by turns."""
        return self.figures.cells[0] if self.figures else None

    @property
    def drafted(self) -> CellFigures | None:
        """Drafted decoding."""
        return self.figures.cells[-1] if self.figures else None

    @property
    def speed_up(self) -> float | None:
        """Measured: times as fast as plain decoding."""
        drafted = self.drafted
        return drafted.speed_up.median if drafted and drafted.speed_up else None

    @property
    def error(self) -> float | None:
        """By how much the prediction was too high, as a share of what was measured."""
        return self.prediction.speed_up / self.speed_up - 1 if self.speed_up else None


@dataclass(frozen=True, slots=True)
class Studied:
    """What was found about a candidate; `problem` says why there is nothing more.

    `acceptance` is by temperature and then by category, "" being all of them.
    """

    candidate: Candidate
    memory: DrafterMemory | None = None
    costs: Sequence[Mapping[str, Any]] = ()
    acceptance: Mapping[float, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    cells: tuple[TuneCell, ...] = ()
    problem: str = ""

    def cell(self, batch: int, temperature: float) -> TuneCell | None:
        """Its cell at this place."""
        return next((c for c in self.cells if (c.group.batch, c.group.temperature) == (batch, temperature)), None)


@dataclass(slots=True)
class TimeLimit:
    """Until when measurements may begin; `deadline_s` is None where there is no limit."""

    deadline_s: float | None

    @property
    def over(self) -> bool:
        """Whether no measurement may begin any more."""
        return self.deadline_s is not None and time.perf_counter() >= self.deadline_s

    def share(self, num_left: int) -> TimeLimit:
        """An equal share of the time that is left, for one of so many."""
        now_s = time.perf_counter()
        return self if self.deadline_s is None else TimeLimit(now_s + max(0.0, self.deadline_s - now_s) / num_left)


def study(trial: Trial, clock: TimeLimit) -> Studied:
    """Everything about one candidate that there is time for. Its models are freed afterwards."""
    of, settings = trial.candidate, trial.settings
    if clock.over and f"{trial.name} costs" not in trial.notes.values:
        return Studied(of, problem="not reached within --time-limit")
    try:
        memory = trial.memory()
        pilots = {
            temperature: {arm: trial.pilot(temperature, arm) for arm in trial.arms()}
            for temperature in temperatures(trial)
        }
        known = MeasuredCosts(trial.controller(), trial.outside())
        return Studied(
            candidate=of,
            memory=memory,
            costs=cost_table(known, settings.batches),
            acceptance={temperature: acceptance_of(found) for temperature, found in pilots.items()},
            cells=tuple(measured(trial, predictions(trial, pilots), clock)),
        )
    except (NotEnoughMemory, DraftError) as error:
        return Studied(of, problem=str(error))
    finally:
        trial.close()


def temperatures(trial: Trial) -> tuple[float, ...]:
    """Those that are asked for; recorded answers are drawn at none."""
    return (0.0,) if trial.texts.rest.replayed else trial.settings.temperatures


def acceptance_of(pilots: Mapping[str, Sequence[TextRounds]]) -> dict[str, tuple[float, ...]]:
    """Acceptance by depth of all texts ("") and of each category, of the arm that had most guesses accepted."""
    found = max(pilots.values(), key=lambda texts: sum(text.tokens(PILOT_DEPTH) for text in texts))
    kinds = {"": found} | {kind: [text for text in found if text.category == kind] for kind in kinds_of(found)}
    return {kind: acceptance_at_depth(texts) for kind, texts in kinds.items()}


def kinds_of(texts: Sequence[Any]) -> list[str]:
    """The categories of texts that have one."""
    return list(dict.fromkeys(text.category for text in texts if text.category))


def predictions(trial: Trial, pilots: Mapping[float, Mapping[str, Sequence[TextRounds]]]) -> dict[Group, Prediction]:
    """What is expected of each cell."""
    found = {}
    for temperature, by_arm in pilots.items():
        costs = MeasuredCosts(trial.controller(), trial.outside())
        for batch in trial.settings.batches:
            job = job_of(trial, batch)
            found[Group(trial.texts.rest.name, batch, temperature)] = predict(by_arm, costs, job, PILOT_DEPTH)
    return found


def job_of(trial: Trial, batch: int) -> DecodingJob:
    """What a run decodes. The first token of an answer comes from reading the prompt."""
    items, num_tokens = trial.texts.rest.items, trial.settings.num_tokens
    lengths = [num_tokens if item.answer is None else len(item.answer) for item in items]
    mean_prompt = sum(len(item.prompt) for item in items) / len(items)
    return DecodingJob(-(-len(items) // batch) * batch, sum(lengths) / len(lengths) - 1, batch, mean_prompt)


def measured(trial: Trial, expected: Mapping[Group, Prediction], clock: TimeLimit) -> list[TuneCell]:
    """All cells, with as many repetitions as there is time for."""
    settings, runs = trial.settings, dict[Group, list[BenchRun]]()
    order = [(repetition, group) for repetition in range(settings.repeats) for group in expected]
    for number, (repetition, group) in enumerate(order):
        pair = turns_of(settings, expected[group].depth, repetition)
        if not all(trial.has_run(group, turn) for turn in pair):
            if clock.over:
                continue
            trial.report(f"measuring {group.name}", number / len(order))
            if repetition == 0 or group not in runs or trial.llm is None:
                trial.warm_up(group, (0, expected[group].depth))
        runs.setdefault(group, []).extend(trial.run(group, turn) for turn in pair)
    answers = [hash_of(item.answer) for item in trial.texts.rest.items if item.answer is not None]
    return [
        TuneCell(group, prediction, group_figures(group, runs[group], answers) if group in runs else None)
        for group, prediction in expected.items()
    ]


def turns_of(settings: TuneSettings, depth: int, repetition: int) -> list[Turn]:
    """Plain and drafted decoding, in the order of this repetition."""
    plan = Selection(depths=(0, depth), repeats=settings.repeats, num_tokens=settings.num_tokens)
    return [turn for turn in plan.turns() if turn.repetition == repetition]


def study_all(trials: Sequence[Trial], clock: TimeLimit, report: ProgressCallback) -> list[Studied]:
    """All candidates, in order."""
    found = []
    for number, trial in enumerate(trials):
        report(f"tuning {trial.candidate.draft}", number / len(trials))
        found.append(study(trial, clock.share(len(trials) - number)))
    return found

"""A study: all candidates, one after the other, each first predicted and then measured.

This file decides the order of measurements and what the time limit means. Every candidate has an equal share of the
time that is left when its turn comes; repetitions alternate between plain and drafted decoding of the same prompts, and
all cells have their first repetition before any has its second. Before each repetition of a cell the passes that it
needs are measured again, by turns with the runs: how much more a larger pass takes changes with what neighbours do to
the memory, from one minute to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.figures import CellFigures, GroupFigures, group_figures
from forerun.bench.plan import CHOSEN, Group, Selection, Turn
from forerun.bench.run import BenchRun, hash_of
from forerun.errors import DraftError, NotEnoughMemory
from forerun.tune.costs import cost_table
from forerun.tune.passes import COARSE_DEPTHS, PassTable, RowCosts, rows_of, sizes_at
from forerun.tune.predict import (
    DecodingJob,
    Expected,
    acceptance_at_depth,
    expect,
    interval,
    played,
    speed_up,
)
from forerun.tune.settings import PILOT_DEPTH, Candidate, TuneSettings
from forerun.tune.trial import DrafterMemory, OutOfTime, TimeLimit, Trial

NOT_REACHED = "not reached within --time-limit"
COARSE_REPEATS, FINE_REPEATS, BESIDE_REPEATS = 3, 2, 2  # of each size: of a few, of all that look good, of the chosen
CLOSE = 0.92  # of the best prediction by a few sizes: of such depths all sizes are measured
MOST_SIZES, LEAST_SHARE = 32, 0.004  # of sizes that are measured: their number, and their rounds' share


@dataclass(frozen=True, slots=True)
class TuneCell:
    """A candidate at a batch size and a temperature: what was expected, and what was measured, if it was."""

    group: Group
    prediction: Expected
    figures: GroupFigures | None

    @property
    def plain(self) -> CellFigures | None:
        """Plain decoding of the same prompts, by turns."""
        return self.figures.cells[0] if self.figures else None

    @property
    def drafted(self) -> CellFigures | None:
        """Drafted decoding at the depth that is expected to be best."""
        return self.at(self.prediction.depth)

    @property
    def chosen(self) -> CellFigures | None:
        """Drafted decoding at depths that the controller chooses, round by round."""
        return self.at(CHOSEN)

    def at(self, depth: int) -> CellFigures | None:
        """Decoding at a depth, if it was measured."""
        return next((own for own in self.figures.cells if own.depth == depth), None) if self.figures else None

    @property
    def speed_up(self) -> float | None:
        """Measured: times as fast as plain decoding."""
        drafted = self.drafted
        return drafted.speed_up.median if drafted and drafted.speed_up else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the speed-up on other prompts like these is expected, around what was measured on these."""
        return self.interval_around(self.speed_up) if self.speed_up else None

    def interval_around(self, speed_up: float) -> tuple[float, float] | None:
        """As far from this speed-up as the prediction's interval is from the prediction."""
        if self.prediction.interval is None:
            return None
        low, high = (end / self.prediction.speed_up * speed_up for end in self.prediction.interval)
        return low, high

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


def study(trial: Trial, clock: TimeLimit) -> Studied:
    """Everything about one candidate that there is time for. Its models are freed afterwards."""
    of, settings = trial.candidate, trial.settings
    trial.clock = clock
    try:
        memory = trial.memory()
        jobs = jobs_of(trial)
        tables = {group: table_of(trial, group, own) for group, own in jobs.items()}
        first = {group.batch: table for group, table in reversed(tables.items())}
        return Studied(
            candidate=of,
            memory=memory,
            costs=cost_table({batch: first[batch] for batch in settings.batches}),
            acceptance={
                heat: acceptance_of(next(own for group, own in jobs.items() if group.temperature == heat))
                for heat in temperatures(trial)
            },
            cells=tuple(measured(trial, jobs, tables, clock)),
        )
    except OutOfTime:
        return Studied(of, problem=NOT_REACHED)
    except (NotEnoughMemory, DraftError) as error:
        return Studied(of, problem=str(error))
    finally:
        trial.close()


def temperatures(trial: Trial) -> tuple[float, ...]:
    """Those that are asked for; recorded answers are drawn at none."""
    return (0.0,) if trial.texts.workload.replayed else trial.settings.temperatures


def acceptance_of(jobs: Mapping[str, DecodingJob]) -> dict[str, tuple[float, ...]]:
    """Acceptance by depth of all texts ("") and of each category, of the arm that needs the fewest rounds."""
    best = min(jobs.values(), key=lambda job: sum(len(text.at_depth(PILOT_DEPTH)) for text in job.texts))
    kinds = {"": best.texts} | {
        kind: [text for text in best.texts if text.category == kind] for kind in kinds_of(best.texts)
    }
    return {kind: acceptance_at_depth(texts, PILOT_DEPTH) for kind, texts in kinds.items()}


def kinds_of(texts: Sequence[Any]) -> list[str]:
    """The categories of texts that have one."""
    return list(dict.fromkeys(text.category for text in texts if text.category))


def expectations(
    trial: Trial, tables: Mapping[Group, PassTable], jobs: Mapping[Group, Mapping[str, DecodingJob]]
) -> dict[Group, Expected]:
    """What is expected of each cell."""
    found = {}
    for group, by_arm in jobs.items():
        best = expect(by_arm, tables[group], PILOT_DEPTH)
        found[group] = replace(best, interval=interval(by_arm[best.arm], tables[group], best.arm, best.depth))
    return found


def jobs_of(trial: Trial) -> dict[Group, dict[str, DecodingJob]]:
    """What a run of each cell decodes, with the rounds of each arm."""
    groups = [
        Group(trial.texts.workload.name, batch, temperature)
        for temperature in temperatures(trial)
        for batch in trial.settings.batches
    ]
    return {group: {arm: DecodingJob(trial.pilot(group, arm), group.batch) for arm in trial.arms()} for group in groups}


def table_of(trial: Trial, group: Group, jobs: Mapping[str, DecodingJob]) -> PassTable:
    """What rounds of a cell take: first of a few sizes, then of those that the depths need which look best."""
    batch = group.batch
    sizes = {num_rows: sizes_at(num_rows, COARSE_DEPTHS) for num_rows in rows_of(batch)}
    coarse = {arm: trial.passes(group, arm, "a few sizes", sizes, COARSE_REPEATS) for arm in jobs}
    table = PassTable({arm: {rows: RowCosts.of([own]) for rows, own in found} for arm, found in coarse.items()})
    gains = {
        (arm, depth): speed_up(job, table, arm, depth)
        for arm, job in jobs.items()
        for depth in range(1, PILOT_DEPTH + 1)
    }
    joined = {arm: dict(known) for arm, known in table.by_arm.items()}
    for arm, job in jobs.items():
        depths = [depth for (own, depth), gain in gains.items() if own == arm and gain >= CLOSE * max(gains.values())]
        needed = needed_sizes(job, depths)
        if not needed:
            continue
        for rows, fine in trial.passes(group, arm, "all sizes", {batch: needed}, FINE_REPEATS):
            first = next(own for num_rows, own in coarse[arm] if num_rows == rows)
            joined[arm][rows] = RowCosts.of([first, fine])
    return PassTable(joined)


def needed_sizes(job: DecodingJob, depths: Sequence[int]) -> list[int]:
    """The sizes of full rounds that these depths have: the most frequent ones, as long as each is a real share."""
    counts = Counter[int]()
    for depth in depths:
        for shape, times in played(job, depth).rounds.items():
            if shape.num_rows == job.batch and shape.num_tokens > job.batch:
                counts[shape.num_tokens] += times
    total = counts.total()
    return sorted(size for size, times in counts.most_common(MOST_SIZES) if times >= LEAST_SHARE * total)


def measured(
    trial: Trial, jobs: Mapping[Group, Mapping[str, DecodingJob]], tables: Mapping[Group, PassTable], clock: TimeLimit
) -> list[TuneCell]:
    """All cells, with as many repetitions as there is time for."""
    settings, runs = trial.settings, dict[Group, list[BenchRun]]()
    expected, costs = expectations(trial, tables, jobs), dict[Group, list[RowCosts]]()
    order = [(repetition, group) for repetition in range(settings.repeats) for group in expected]
    for number, (repetition, group) in enumerate(order):
        best = expected[group]
        turns = turns_of(settings, best.depth, repetition)
        if not all(trial.has_run(group, turn) for turn in turns):
            if clock.over:
                continue
            trial.report(f"measuring {group.name}", number / len(order))
            if repetition == 0 or group not in runs or trial.llm is None:
                trial.warm_up(group, (0, best.depth, CHOSEN))
        if sizes := needed_sizes(jobs[group][best.arm], [best.depth]):
            beside = trial.passes(group, best.arm, f"repetition {repetition}", {group.batch: sizes}, BESIDE_REPEATS)
            costs.setdefault(group, []).append(RowCosts.of([own for _, own in beside]))
        runs.setdefault(group, []).extend(trial.run(group, turn) for turn in turns)
    answers = [hash_of(item.answer) for item in trial.texts.workload.items if item.answer is not None]
    return [
        TuneCell(
            group,
            again(prediction, jobs[group][prediction.arm], tables[group], costs.get(group, ())),
            group_figures(group, runs[group], answers) if group in runs else None,
        )
        for group, prediction in expected.items()
    ]


def again(prediction: Expected, job: DecodingJob, table: PassTable, beside: Sequence[RowCosts]) -> Expected:
    """The prediction for the chosen depth and arm, by what was measured beside the runs."""
    if not beside:
        return prediction
    arm, rows = prediction.arm, job.batch
    newer = table.by_arm[arm][rows].newer(beside)
    costs = PassTable({**table.by_arm, arm: {**table.by_arm[arm], rows: newer}})
    found = speed_up(job, costs, arm, prediction.depth)
    return replace(prediction, speed_up=found, interval=interval(job, costs, arm, prediction.depth))


def turns_of(settings: TuneSettings, depth: int, repetition: int) -> list[Turn]:
    """Plain decoding, this depth and chosen depths, in the order of this repetition."""
    plan = Selection(depths=(0, depth, CHOSEN), repeats=settings.repeats, num_tokens=settings.num_tokens)
    return [turn for turn in plan.turns() if turn.repetition == repetition]


def study_all(trials: Sequence[Trial], clock: TimeLimit, report: ProgressCallback) -> list[Studied]:
    """All candidates, in order."""
    found = []
    for number, trial in enumerate(trials):
        report(f"tuning {trial.candidate.draft}", number / len(trials))
        found.append(study(trial, clock.share(len(trials) - number)))
    return found

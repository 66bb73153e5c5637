"""A study: predicts and measures the speed-up of all candidates, one after the other.

This file orders the measurements and divides the time limit: each candidate gets an equal share of the remaining time.
Repetitions alternate between plain and drafted decoding of the same prompts, and all cells have their first repetition
before any has its second. The costs of passes are measured again before each repetition, since they depend on the
memory traffic of other processes, which changes within minutes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from forerun.bench.figures import CellFigures, GroupFigures, group_figures
from forerun.bench.plan import CHOSEN, Group
from forerun.bench.run import BenchRun, run_name
from forerun.errors import DraftError, NotEnoughMemory
from forerun.machine import disturbance
from forerun.progress import LoadingBar
from forerun.tune.passes import COARSE_DEPTHS, PassTable, RowCosts, rows_of, sizes_at
from forerun.tune.predict import DecodingJob, Expected, acceptance_at_depth, expect, interval, simulate, speed_up
from forerun.tune.trial import PILOT_DEPTH, Candidate, DrafterMemory, OutOfTime, Trial

NOT_REACHED = "not reached within --time-limit"
COARSE_REPEATS, FINE_REPEATS, NEWER_REPEATS = 3, 2, 2  # for coarse sizes, sizes of good depths, of the best depth
CLOSE = 0.92  # depths with at least this share of the best coarse prediction are measured at all their sizes
CONTRADICTION = 1.5  # between prediction and measurement; on quiet machines they differ by at most a quarter
MOST_SIZES, LEAST_SHARE = 32, 0.004  # measured sizes: maximum number, minimum share of rounds
Jobs = Mapping[str, DecodingJob]  # the job of a cell by drafter


@dataclass(frozen=True, slots=True)
class TuneCell:
    """A candidate at a batch size and a temperature: the prediction, and the measurement if there is one."""

    group: Group
    prediction: Expected
    figures: GroupFigures | None

    @property
    def plain(self) -> CellFigures | None:
        """Plain decoding of the same prompts, in alternation."""
        return self.at(0)

    @property
    def drafted(self) -> CellFigures | None:
        """Drafted decoding at the best predicted depth."""
        return self.at(self.prediction.depth)

    @property
    def chosen(self) -> CellFigures | None:
        """Drafted decoding with depths that the controller chose."""
        return self.at(CHOSEN)

    def at(self, depth: int) -> CellFigures | None:
        """The figures at a depth; None if not measured."""
        return next((cell for cell in self.figures.cells if cell.depth == depth), None) if self.figures else None

    @property
    def speed_up(self) -> float | None:
        """The measured speed-up at the best predicted depth; None if not measured."""
        drafted = self.drafted
        return drafted.speed_up.median if drafted and drafted.speed_up else None

    def interval_around(self, speed_up: float | None) -> tuple[float, float] | None:
        """The prediction's interval of the speed-up on other prompts, scaled to this measured speed-up."""
        if self.prediction.interval is None or not speed_up:
            return None
        low, high = (end / self.prediction.speed_up * speed_up for end in self.prediction.interval)
        return low, high

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; positive if it was too high."""
        return self.prediction.speed_up / self.speed_up - 1 if self.speed_up else None

    @property
    def disturbed(self) -> str:
        """The warning that other programs disturbed a run or the costs; "" if they did not."""
        runs = [cell.num_busy or 0.0 for cell in self.figures.cells] if self.figures else []
        return disturbance(max([self.prediction.num_busy or 0.0, *runs]))

    @property
    def undecided(self) -> str:
        """Why these figures are no evidence for or against a setting; "" if they are."""
        if self.disturbed:
            return self.disturbed
        if self.speed_up is None:
            return ""
        predicted = self.prediction.speed_up
        if 1 / CONTRADICTION <= predicted / self.speed_up <= CONTRADICTION:
            return ""
        return f"×{predicted:.2f} predicted and ×{self.speed_up:.2f} measured contradict each other"


@dataclass(frozen=True, slots=True)
class Studied:
    """The results of a candidate; `problem`: why they are missing or incomplete.

    `costs` are by group, drafter and rows; `acceptance` by temperature and category ("": all prompts).
    """

    candidate: Candidate
    memory: DrafterMemory | None = None
    costs: Mapping[Group, Mapping[str, Mapping[int, RowCosts]]] = field(default_factory=dict)
    acceptance: Mapping[float, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    cells: tuple[TuneCell, ...] = ()
    problem: str = ""

    def cell(self, batch: int, temperature: float) -> TuneCell | None:
        """The cell at a batch size and temperature."""
        return next((c for c in self.cells if (c.group.batch, c.group.temperature) == (batch, temperature)), None)


def study_all(trials: Sequence[Trial], deadline_s: float, bar: LoadingBar) -> list[Studied]:
    """Study all candidates in order, each with an equal share of the remaining time."""
    studied = []
    for number, trial in enumerate(trials):
        trial.report = partial(report_part, bar, number / len(trials), trial.candidate.label)
        now_s = time.perf_counter()
        trial.deadline_s = now_s + max(0.0, deadline_s - now_s) / (len(trials) - number)
        studied.append(study(trial))
    return studied


def report_part(bar: LoadingBar, share: float, name: str, what: str, done: float) -> None:
    """Report a part of a candidate's study; `share` of all studies is finished."""
    bar("tuning", share, f"{name}, {what} {done:.0%}")


def study(trial: Trial) -> Studied:
    """Study one candidate within its time; its models are freed afterwards."""
    workload = trial.workload
    groups = trial.selection.groups({workload.name: workload.replayed})
    try:
        memory = trial.memory()
        jobs = {
            group: {drafter: DecodingJob(trial.pilot(group, drafter), group.batch) for drafter in trial.drafter_names()}
            for group in groups
        }
        tables = {group: table_of(trial, group, jobs[group]) for group in groups}
        by_temperature = {group.temperature: jobs[group] for group in groups if group.batch == groups[0].batch}
        return Studied(
            candidate=trial.candidate,
            memory=memory,
            costs={group: table.by_drafter for group, table in tables.items()},
            acceptance={temperature: acceptance_of(texts) for temperature, texts in by_temperature.items()},
            cells=tuple(measured(trial, jobs, tables)),
        )
    except OutOfTime:
        return Studied(trial.candidate, problem=NOT_REACHED)
    except (NotEnoughMemory, DraftError) as error:
        return Studied(trial.candidate, problem=str(error))
    finally:
        trial.close()


def acceptance_of(jobs: Jobs) -> dict[str, tuple[float, ...]]:
    """Acceptance by depth of the drafter with the fewest rounds, for all texts ("") and each category."""
    best = min(jobs.values(), key=lambda job: sum(len(text.at_depth(PILOT_DEPTH)) for text in job.texts))
    kinds = dict.fromkeys(("", *(text.category for text in best.texts)))
    return {
        kind: acceptance_at_depth((text for text in best.texts if kind in ("", text.category)), PILOT_DEPTH)
        for kind in kinds
    }


def table_of(trial: Trial, group: Group, jobs: Jobs) -> PassTable:
    """Measure the costs of rounds of a cell: first of a few sizes, then of all sizes that the best depths need."""
    batch = group.batch
    sizes = {num_rows: sizes_at(num_rows, COARSE_DEPTHS) for num_rows in rows_of(batch)}
    table = PassTable({drafter: trial.passes(group, drafter, "a few sizes", sizes, COARSE_REPEATS) for drafter in jobs})
    depths = range(1, PILOT_DEPTH + 1)
    gains = {drafter: {d: speed_up(job, table.round_s, drafter, d) for d in depths} for drafter, job in jobs.items()}
    best = max(gain for by_depth in gains.values() for gain in by_depth.values())
    joined = {drafter: dict(known) for drafter, known in table.by_drafter.items()}
    for drafter, job in jobs.items():
        if needed := needed_sizes(job, [depth for depth, gain in gains[drafter].items() if gain >= CLOSE * best]):
            fine = trial.passes(group, drafter, "all sizes", {batch: needed}, FINE_REPEATS)
            joined[drafter][batch] = joined[drafter][batch].newer([fine[batch]])
    return PassTable(joined)


def needed_sizes(job: DecodingJob, depths: Sequence[int]) -> list[int]:
    """The most frequent sizes of full rounds at these depths, at most MOST_SIZES."""
    counts = Counter[int]()
    for depth in depths:
        for shape, times in simulate(job, depth).rounds.items():
            if shape.num_rows == job.batch and shape.num_tokens > job.batch:
                counts[shape.num_tokens] += times
    total = counts.total()
    return sorted(size for size, times in counts.most_common(MOST_SIZES) if times >= LEAST_SHARE * total)


def measured(trial: Trial, jobs: Mapping[Group, Jobs], tables: Mapping[Group, PassTable]) -> list[TuneCell]:
    """Measure all cells, with as many repetitions as time allows."""
    repeats, runs, costs = trial.selection.repeats, dict[Group, list[BenchRun]](), dict[Group, list[RowCosts]]()
    expected = {group: expect(jobs_of, tables[group].round_s, PILOT_DEPTH) for group, jobs_of in jobs.items()}
    order = [(repetition, group) for repetition in range(repeats) for group in expected]
    for number, (repetition, group) in enumerate(order):
        best = expected[group]
        depths = (0, best.depth, CHOSEN)
        turns = [turn for turn in replace(trial.selection, depths=depths).turns() if turn.repetition == repetition]
        if not all(trial.kept.holds(f"{trial.name} {run_name(group, turn)}") for turn in turns):
            if trial.late:
                continue
            trial.report(f"measuring speed, {group.name}", number / len(order))
            if repetition == 0 or group not in runs or trial.llm is None:
                trial.running().warm_up(group, depths)
        if sizes := needed_sizes(jobs[group][best.drafter], [best.depth]):
            newer = trial.passes(group, best.drafter, f"repetition {repetition}", {group.batch: sizes}, NEWER_REPEATS)
            costs.setdefault(group, []).extend(newer.values())
        runs.setdefault(group, []).extend(trial.run(group, turn) for turn in turns)
    answers = trial.workload.recorded()
    return [
        TuneCell(
            group,
            updated(prediction, jobs[group][prediction.drafter], tables[group], costs.get(group, ())),
            group_figures(group, runs[group], answers) if group in runs else None,
        )
        for group, prediction in expected.items()
    ]


def updated(prediction: Expected, job: DecodingJob, table: PassTable, newer: Sequence[RowCosts]) -> Expected:
    """The prediction for the same depth and drafter by the costs measured between the runs, with its interval."""
    drafter, depth, rows, gain = prediction.drafter, prediction.depth, job.batch, prediction.speed_up
    if newer:
        costs = table.by_drafter[drafter][rows].newer(newer)
        table = PassTable({**table.by_drafter, drafter: {**table.by_drafter[drafter], rows: costs}})
        gain = speed_up(job, table.round_s, drafter, depth)
    likely = interval(job, table.round_s, drafter, depth)
    num_busy = max(each.num_busy or 0.0 for each in table.by_drafter[drafter].values())
    return replace(prediction, speed_up=gain, interval=likely, num_busy=num_busy)

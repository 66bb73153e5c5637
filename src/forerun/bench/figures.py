"""Figures: medians with quartiles over the repetitions of a group, and the report of all groups.

This file has every formula of the benchmark. Absolute times drift, so ratios are computed within a repetition, whose
runs are close in time, and their median is reported. In JSON, times are in seconds, sizes in bytes, shares between 0
and 1, and unknown values null. `show.py` prints the report.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from operator import truediv
from typing import Any

from forerun.bench.plan import CHOSEN, Group, in_order
from forerun.bench.run import BenchRun
from forerun.config import AUTO
from forerun.device import CPU, Placement
from forerun.report import json_object


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Median and quartiles of the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return cls(known[0], known[0], known[0]) if known else None
        low, median, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class CellFigures:
    """The figures of one depth of a group.

    `guesses_per_round`: draft tokens per round. `experts`: experts that a layer of a sparse target reads in a full
    round; `expected_experts`: their number if tokens chose uniformly and independently. `num_rounds_by_arm`: how often
    each drafter of a mix drafted for a sequence. `tokens_per_s`: without prefill; `tokens_per_s_with_prompt`: with it.
    `speed_up`: the ratio of `tokens_per_s` to that of plain decoding. `pass_ratio` is v(k): the target's pass in a full
    round over a plain pass. `draft_step_ratio` is c: a full round's drafting time per depth over a plain pass.
    `predicted` is o G / (k c + v), with G tokens per round, and o the average batch occupancy over that of plain
    decoding. `engine_s`: time of a round outside the passes of target and drafter. `num_busy`: the maximum number of
    cores that other programs used during a run or the plain run of the same repetition.
    """

    depth: int
    first_token_s: Spread | None
    tokens_per_s: Spread | None
    tokens_per_s_with_prompt: Spread | None
    tokens_per_round: float | None
    guesses_per_round: float | None
    experts: Spread | None
    expected_experts: float | None
    num_rounds_by_arm: Mapping[str, int]
    acceptance_rate: float | None
    acceptance_at_depth: tuple[float, ...]
    speed_up: Spread | None
    pass_s: Spread | None
    pass_ratio: Spread | None
    draft_step_ratio: Spread | None
    predicted: Spread | None
    measured_over_predicted: Spread | None
    engine_s: Spread | None
    peak_bytes: int | None
    num_busy: float | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request whose answer differs from the first plain run, or from the recorded answer."""

    depth: int
    repetition: int
    request: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The figures of all depths of a group."""

    group: Group
    cells: tuple[CellFigures, ...]
    distinct_ngrams: float | None
    differences: tuple[Mismatch, ...]

    @property
    def same_tokens(self) -> bool:
        """Whether every depth gave the same tokens in every repetition."""
        return not self.differences

    @property
    def plain_pass_s(self) -> float | None:
        """Median seconds of a full plain pass."""
        spread = self.cells[0].pass_s
        return spread.median if spread else None


def group_figures(group: Group, runs: Sequence[BenchRun], recorded: Sequence[str] = ()) -> GroupFigures:
    """The figures of a group from its runs; `recorded`: hashes of replayed answers."""
    plain = {run.repetition: run for run in runs if run.depth == 0}
    first = plain[min(plain)]
    expected = [recorded[i % len(recorded)] for i in range(len(first.answers))] if recorded else first.answers
    return GroupFigures(
        group=group,
        cells=tuple(
            cell_figures([run for run in runs if run.depth == depth], plain)
            for depth in in_order({run.depth for run in runs})
        ),
        distinct_ngrams=over(first.num_distinct, first.num_ngrams),
        differences=tuple(
            Mismatch(run.depth, run.repetition, number)
            for run in runs
            for number, (answer, other) in enumerate(zip(run.answers, expected, strict=True))
            if answer != other
        ),
    )


def cell_figures(runs: Sequence[BenchRun], plain: Mapping[int, BenchRun]) -> CellFigures:
    """The figures of a depth from its repetitions, each compared with the plain run of the same repetition."""
    pairs = [(run, plain[run.repetition]) for run in runs if run.repetition in plain]
    rounds, drafted, accepted = (
        sum(getattr(run, name) for run in runs) for name in ("num_rounds", "num_drafted", "num_accepted")
    )
    offered_at_depth, accepted_at_depth = (
        map(sum, zip_longest(*(getattr(run, name) for run in runs), fillvalue=0))
        for name in ("offered_at_depth", "accepted_at_depth")
    )

    def of(figure: Callable[[BenchRun], float | None]) -> Spread | None:
        return Spread.of(figure(run) for run in runs)

    def against_plain(figure: Callable[[BenchRun, BenchRun], float | None]) -> Spread | None:
        return Spread.of(figure(run, other) for run, other in pairs)

    return CellFigures(
        depth=runs[0].depth,
        first_token_s=of(lambda run: run.first_s),
        tokens_per_s=of(lambda run: over(run.num_decoded, run.decode_s)),
        tokens_per_s_with_prompt=of(lambda run: over(run.num_tokens, run.total_s)),
        tokens_per_round=over(accepted + rounds, rounds),
        guesses_per_round=over(drafted, rounds),
        experts=of(lambda run: run.full_experts),
        expected_experts=next((run.expected_experts for run in runs if run.expected_experts is not None), None),
        num_rounds_by_arm=dict(sum((Counter(dict(run.num_rounds_by_arm)) for run in runs), Counter[str]())),
        acceptance_rate=over(accepted, drafted),
        acceptance_at_depth=tuple(map(truediv, accepted_at_depth, offered_at_depth)),
        speed_up=against_plain(speed_up),
        pass_s=of(lambda run: run.full_pass_s),
        pass_ratio=against_plain(lambda run, other: over(run.full_pass_s, other.full_pass_s)),
        draft_step_ratio=against_plain(draft_step_ratio),
        predicted=against_plain(predicted),
        measured_over_predicted=against_plain(lambda run, other: over(speed_up(run, other), predicted(run, other))),
        engine_s=of(lambda run: over(run.decode_s - run.pass_s - run.draft_pass_s, run.num_passes)),
        peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
        num_busy=max((run.num_busy for pair in pairs for run in pair if run.num_busy is not None), default=None),
    )


def over(part: int | float | None, total: int | float | None) -> float | None:
    """The ratio of two numbers; None if one is unknown or the denominator is 0."""
    return part / total if part is not None and total else None


def speed_up(run: BenchRun, plain: BenchRun) -> float | None:
    """The ratio of decoding speeds, drafted over plain."""
    return over(over(run.num_decoded, run.decode_s), over(plain.num_decoded, plain.decode_s))


def draft_step_ratio(run: BenchRun, plain: BenchRun) -> float | None:
    """c: the drafting time of a full round, per depth, over a plain pass; None for plain decoding."""
    if run.depth <= 0 or run.full_draft_s is None:
        return None
    return over(run.full_draft_s / run.depth, plain.full_pass_s)


def predicted(run: BenchRun, plain: BenchRun) -> float | None:
    """o G / (k c + v), from this repetition's o, G, c and v; None for plain decoding."""
    step, ratio = draft_step_ratio(run, plain), over(run.full_pass_s, plain.full_pass_s)
    tokens = over(run.num_accepted + run.num_rounds, run.num_rounds)
    occupancy = over(over(run.num_rounds, run.num_passes), over(plain.num_rounds, plain.num_passes))
    if step is None or ratio is None or tokens is None or occupancy is None:
        return None
    return occupancy * tokens / (run.depth * step + ratio)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth before and after the runs, in bytes per second."""

    start: float
    end: float

    @property
    def best(self) -> float:
        """The larger of the two, since disturbances only reduce it."""
        return max(self.start, self.end)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark.

    `about` describes the models, machine and settings; `pass_bytes`: weights that one pass of the target reads;
    `places[workload]`: the source of each of its prompts.
    """

    about: Mapping[str, Any]
    bandwidth: Bandwidth
    pass_bytes: int
    places: Mapping[str, Sequence[str]]
    groups: tuple[GroupFigures, ...]
    placement: Placement = CPU

    @property
    def same_tokens(self) -> bool:
        """Whether every depth gave the same tokens in every group."""
        return all(figures.same_tokens for figures in self.groups)

    @property
    def peak_bytes(self) -> int | None:
        """The maximum memory of all runs."""
        peaks = [c.peak_bytes for figures in self.groups for c in figures.cells if c.peak_bytes is not None]
        return max(peaks, default=None)

    def limit_share(self, figures: GroupFigures) -> float | None:
        """The time to read the weights at full bandwidth, as a share of this group's plain pass."""
        return over(self.pass_bytes / self.bandwidth.best, figures.plain_pass_s)

    def place(self, figures: GroupFigures, difference: Mismatch) -> str:
        """The source of the prompt of a differing request."""
        places = self.places[figures.group.workload]
        return places[difference.request % len(places)]

    def as_object(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return json_object(
            **self.about,
            bandwidth_bytes_per_s=self.bandwidth,
            weights_bytes_per_pass=self.pass_bytes,
            peak_rss_bytes=self.peak_bytes,
            same_tokens=self.same_tokens,
            groups=[self.group_object(figures) for figures in self.groups],
            cells=[cell_object(figures, cell) for figures in self.groups for cell in figures.cells],
        )

    def group_object(self, figures: GroupFigures) -> dict[str, Any]:
        """A group as JSON, without its cells."""
        differences = [asdict(d) | {"prompt": self.place(figures, d)} for d in figures.differences]
        return {
            **asdict(figures.group),
            "same_tokens": figures.same_tokens,
            "differences": differences,
            "distinct_8grams": figures.distinct_ngrams,
            "plain_pass_s": figures.plain_pass_s,
            "memory_limit_share": self.limit_share(figures),
        }


def cell_object(figures: GroupFigures, cell: CellFigures) -> dict[str, Any]:
    """A cell as JSON, with the fields of its group."""
    return {**asdict(figures.group), **asdict(cell), "depth": AUTO if cell.depth == CHOSEN else cell.depth}

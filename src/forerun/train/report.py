"""The report of a training: JSON, a card for the terminal, and learning curves as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from forerun.bench.chart import COLOURS, LinePanel, Series, svg
from forerun.draft.auto import DrafterRecord
from forerun.machine import disturbance
from forerun.models.loading import Blueprint
from forerun.report import fact_table
from forerun.train.data import TrainingData
from forerun.train.held_out import HeldOutFigures
from forerun.train.speed import best_depth
from forerun.train.state import TrainState
from forerun.tune.passes import RowCosts

SHOWN_DEPTHS = 8
WIDTH = 340  # of a panel, in pixels
SMOOTHED = 20  # steps that are averaged for a point of the loss curve
MOST_POINTS = 400
DRAWN_DEPTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class TunedTarget:
    """A tuned target: its folder, the relative increase of its held-out loss, and the drafter's figures with it."""

    folder: Path
    rise: float
    figures: HeldOutFigures


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of a training: the drafter `draft` in `folder`, and its figures before and after."""

    about: Mapping[str, Any]
    state: TrainState
    costs: RowCosts | None  # None if rounds could not be timed
    folder: Path
    draft: str
    data: TrainingData
    tuned: TunedTarget | None = None

    @property
    def first(self) -> HeldOutFigures:
        """The figures before the first step."""
        return HeldOutFigures(**self.state.first_figures or {})

    @property
    def best(self) -> HeldOutFigures:
        """The figures of the weights in the folder."""
        return self.tuned.figures if self.tuned is not None else HeldOutFigures(**self.state.best_figures or {})

    @property
    def predicted(self) -> tuple[int, float] | None:
        """(best depth, predicted speed-up); None if rounds were not timed."""
        return best_depth(self.costs, self.best.tokens_per_round)

    def record(self, target: Blueprint, temperature: float) -> DrafterRecord:
        """The record that is stored with the drafter."""
        best = self.best
        return DrafterRecord.of(
            self.draft,
            self.folder,
            target=target.weights_digest(),
            model=target.norms_digest(),
            temperature=temperature,
            acceptance_at_depth=best.acceptance_at_depth,
            tokens_per_round=best.tokens_per_round,
            speed_up=self.predicted and self.predicted[1],
        )

    def as_object(self) -> dict[str, Any]:
        """The report as a JSON object."""
        predicted = self.predicted
        return {
            **self.about,
            "folder": str(self.folder),
            "draft": self.draft,
            "steps": self.state.step,
            "seconds": self.state.seconds,
            "stopped": self.state.stopped,
            "best_step": self.state.best_step,
            "untrained": self.first.as_object(),
            "trained": self.best.as_object(),
            "predicted": predicted and {"batch": 1, "depth": predicted[0], "speed_up": predicted[1]},
            "round_costs": self.costs and asdict(self.costs),
            "bad_lines": list(self.data.bad),
            "tuned_target": self.tuned and {"folder": str(self.tuned.folder), "loss_rise": self.tuned.rise},
        }

    def card(self) -> Table:
        """The report as a table."""
        table = fact_table()
        table.add_row("drafter", Text(f"--draft {self.draft}"))
        if self.tuned is not None:
            tuned = f"{self.tuned.folder}, whose held-out loss is {self.tuned.rise:.2%} above the old one's"
            table.add_row("tuned target", Text(f"--model {tuned}"))
        table.add_row("trained", f"{self.state.step} steps in {self.state.seconds:.0f} s; {self.state.stopped}")
        table.add_row("best", f"step {self.state.best_step}, on {len(self.data.held_out)} held-out prompts")
        for name, figures in (("before", self.first), ("now", self.best)):
            rates = " ".join(f"{rate:.2f}" for rate in figures.acceptance_at_depth[:SHOWN_DEPTHS])
            table.add_row(f"accepted, {name}", f"{rates} by depth; overlap of distributions {figures.overlap:.3f}")
        if self.predicted is None:
            table.add_row("speed", "not predicted: the context is too short to time rounds")
        else:
            depth, speed_up = self.predicted
            tokens = self.best.tokens_per_round[depth - 1]
            what = f"×{speed_up:.2f} predicted at batch 1, depth {depth}, {tokens:.2f} tokens per round"
            table.add_row("speed", what if speed_up > 1 else f"{what}: not faster than plain decoding here")
            if note := disturbance(self.costs.num_busy if self.costs else None):
                table.add_row("", Text(f"That was {note}.", "red"))
        return table


def curves(log: Sequence[Mapping[str, Any]]) -> str:
    """The SVG of loss, acceptance by depth and tokens per round over the steps, from the lines of train.jsonl."""
    panels = [LinePanel([Series("", smoothed(series(log, "loss")), COLOURS[0], "-")], "step", "loss")]
    for name, title in (("acceptance_at_depth", "accepted, by depth"), ("tokens_per_round", "tokens per round")):
        looks = series(log, "held_out", name)
        by_depth = {
            depth: [(step, values[depth - 1]) for step, values in looks if len(values) >= depth]
            for depth in DRAWN_DEPTHS
        }
        drawn = [
            Series(f"depth {d}", points, COLOURS[i], "-") for i, (d, points) in enumerate(by_depth.items()) if points
        ]
        panels.append(LinePanel(drawn, "step", f"held out: {title}"))
    return svg([panels], WIDTH)


def series(log: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[int, Any]]:
    """(step, value) of every log line with a value under these nested keys."""
    points = []
    for line in log:
        value: Any = line
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            points.append((line["step"], value))
    return points


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Moving averages over SMOOTHED values, at most MOST_POINTS of them."""
    stride = max(1, len(points) // MOST_POINTS)
    means = []
    for end in range(len(points), 0, -stride):
        part = [value for _, value in points[max(0, end - SMOOTHED) : end]]
        means.append((points[end - 1][0], sum(part) / len(part)))
    return means[::-1]

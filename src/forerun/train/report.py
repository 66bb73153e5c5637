"""What came of a training, as one value: for JSON and for the card on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from forerun.accept.outcome import Stats
from forerun.draft.record import DrafterRecord
from forerun.train.data import TrainingData
from forerun.train.held_out import HeldOutFigures
from forerun.train.speed import RoundTimes
from forerun.train.state import TrainState

SHOWN_DEPTHS = 8


@dataclass(frozen=True, slots=True)
class TunedTarget:
    """A target that was tuned as well, in `folder`: by what share its held-out loss rose, and what the drafter is worth
    on its own answers."""

    folder: Path
    rise: float
    figures: HeldOutFigures


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result: the drafter `draft` in `folder`, what it is worth, and what it was before the first step."""

    about: Mapping[str, Any]
    state: TrainState
    times: RoundTimes | None
    folder: Path
    draft: str
    data: TrainingData
    stats: Stats
    tuned: TunedTarget | None = None

    @property
    def first(self) -> HeldOutFigures:
        """Before the first step."""
        return HeldOutFigures.read(self.state.first_figures or {})

    @property
    def best(self) -> HeldOutFigures:
        """Of the weights in the folder."""
        return self.tuned.figures if self.tuned is not None else HeldOutFigures.read(self.state.best_figures or {})

    def predicted(self, figures: HeldOutFigures) -> tuple[int, float] | None:
        """The depth that pays most and the speed-up there; None where rounds were not timed."""
        return None if self.times is None else self.times.best(figures.tokens_per_round)

    def record(self, target: str, temperature: float) -> DrafterRecord:
        """What the folder says of its drafter; `target` is the digest of the target's weights."""
        best, predicted = self.best, self.predicted(self.best)
        return DrafterRecord.of(
            self.draft,
            self.folder,
            target=target,
            temperature=temperature,
            acceptance_at_depth=best.acceptance_at_depth,
            tokens_per_round=best.tokens_per_round,
            speed_up=predicted and predicted[1],
        )

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        predicted = self.predicted(self.best)
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
            "round_times": self.times and self.times.as_object(),
            "bad_lines": list(self.data.bad),
            "tuned_target": self.tuned and {"folder": str(self.tuned.folder), "loss_rise": self.tuned.rise},
        }

    def card(self) -> Table:
        """For a reader."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("drafter", Text(f"--draft {self.draft}"))
        if self.tuned is not None:
            told = f"{self.tuned.folder}, whose held-out loss is {self.tuned.rise:.2%} above the old one's"
            table.add_row("tuned target", Text(f"--model {told}"))
        table.add_row("trained", f"{self.state.step} steps in {self.state.seconds:.0f} s; {self.state.stopped}")
        table.add_row("best", f"step {self.state.best_step}, on {len(self.data.held_out)} held-out prompts")
        for name, figures in (("before", self.first), ("now", self.best)):
            rates = " ".join(f"{rate:.2f}" for rate in figures.acceptance_at_depth[:SHOWN_DEPTHS])
            table.add_row(f"accepted, {name}", f"{rates} by depth; overlap of laws {figures.overlap:.3f}")
        predicted = self.predicted(self.best)
        if predicted is None:
            table.add_row("speed", "not predicted: the context is too short to time rounds")
        else:
            depth, speed_up = predicted
            tokens = self.best.tokens_per_round[depth - 1]
            what = f"×{speed_up:.2f} predicted at batch 1, depth {depth}, {tokens:.2f} tokens per round"
            table.add_row("speed", what if speed_up > 1 else f"{what}: plain decoding is faster here")
        return table

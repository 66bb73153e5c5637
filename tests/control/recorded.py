"""Rounds of the bundled models, timed on 2 cores of an AMD EPYC and replayed for a controller.

`recorded.json` has an entry for each drafter on a quiet and on a busy machine, and in it one for each batch size of 1,
4, 8 and 16. `draft_us` and `pass_us` are median microseconds of drafting, by depth, and of the target's pass, by number
of tokens. `off` are the times of single rounds in percent of these medians: those of drafting and of the pass
alternate, in the order of measurement. `texts` has a digit for each round of some texts: how many of 8 draft tokens
were accepted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from control.worlds import AMPLE, AUTO_SPECULATION
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.control.controller import Controller, Load
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Budget, Outlook
from forerun.engine.calibration import Script

RECORDINGS = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
CASES = {f"{name}, {rows} rows": (name, int(rows)) for name, by_rows in RECORDINGS.items() for rows in by_rows}
DEEPEST = 8
REPEATS = 3  # how often a sequence's text is played before a new sequence takes its place


@dataclass
class Recording:
    """The recorded rounds of one drafter on a quiet or busy machine, at a batch size of `rows`."""

    name: str
    rows: int

    def __post_init__(self) -> None:
        self.texts = [[int(digit) for digit in text] for text in RECORDINGS[self.name][str(self.rows)]["texts"]]
        self.num_rounds = 0
        self.acceptable: list[int] = []  # by round and row of the last `play`: accepted tokens of a draft of depth 8

    def median_s(self, rows: int, depth: int, num_tokens: int) -> tuple[float, float]:
        """Median seconds of drafting to this depth, and of a pass over this number of tokens."""
        times = RECORDINGS[self.name][str(rows)]

        def seconds(part: str, size: int) -> float:
            sizes, micros = zip(*times[part], strict=True)
            return 1e-6 * float(np.interp(size, sizes, micros))

        return seconds("draft_us", depth), seconds("pass_us", num_tokens)

    def next_noise(self, rows: int) -> tuple[float, float]:
        """The next recorded round's times of drafting and of its pass, relative to their medians."""
        percents = RECORDINGS[self.name][str(rows)]["off"]
        self.num_rounds += 1
        first = 2 * self.num_rounds % len(percents)
        return percents[first] / 100, percents[first + 1] / 100

    def fixed_speed(self, depth: int) -> float:
        """Tokens per second that this depth in every round of the last `play` would have given."""
        counts = [1 + min(depth, each) for each in self.acceptable]
        taken_s = sum(self.median_s(self.rows, depth, self.rows * (1 + depth)))
        return self.rows * sum(counts) / len(counts) / taken_s

    def play(
        self, controller: Controller, count: int, rows: int, seed: int = 0, rejects_all: bool = False
    ) -> tuple[list[float], list[float]]:
        """Replay `count` rounds of `rows` sequences under a controller; returns their tokens and median seconds.

        `rejects_all`: no draft token is accepted.
        """
        dice = random.Random(seed)
        ids, places, texts = list(range(rows)), [0] * rows, [dice.choice(self.texts) for _ in range(rows)]
        tokens, seconds, self.acceptable = [], [], []
        for _ in range(count):
            for row in range(rows):
                if places[row] == REPEATS * len(texts[row]):
                    ids[row], places[row], texts[row] = max(ids) + 1, 0, dice.choice(self.texts)
            load = Load(list(ids), [AUTO_SPECULATION] * rows, [AMPLE] * rows, 0)
            budgets: Sequence[Budget] = [Budget(0)] * rows
            if not controller.skips(load):
                outlook = Outlook([0] * rows, [DEEPEST] * rows)
                budgets = controller.budgets(load, outlook, Spare(dict.fromkeys(ids, AMPLE), AMPLE, 16))
            outcomes = []
            for row, budget in enumerate(budgets):
                self.acceptable.append(0 if rejects_all else texts[row][places[row] % len(texts[row])])
                accepted = min(budget.depth, self.acceptable[-1])
                places[row] += 1
                offered = min(budget.depth, accepted + 1)
                outcomes.append(RowOutcome(ids[row], budget.nodes, offered, accepted, accepted + 1))
            num_tokens = sum(1 + budget.nodes for budget in budgets)
            draft_s, pass_s = self.median_s(rows, max(budget.depth for budget in budgets), num_tokens)
            draft_noise, pass_noise = self.next_noise(rows)
            controller.record(Outcome(outcomes, 0, draft_s * draft_noise, pass_s * pass_noise))
            tokens.append(float(sum(row.num_emitted for row in outcomes)))
            seconds.append(draft_s + pass_s)
        return tokens, seconds


def calibrated(recording: Recording) -> MeasuredDepth:
    """A controller after a calibration in these rounds, which measured several depths."""
    script = Script(MeasuredDepth(), counts=True)
    for rows in sorted({1, recording.rows}):
        for script.depth in (0, 4, 8, 1, 2):
            recording.play(script, 3, rows, seed=script.depth)
            script.finish()
    script.controller.begin()
    return script.controller


def share_of_best(case: str, seed: int, count: int = 1500, rejects_all: bool = False) -> float:
    """A calibrated controller's speed over that of the best fixed depth, which is chosen after the rounds."""
    recording = Recording(*CASES[case])
    controller = calibrated(recording)
    tokens, seconds = recording.play(controller, count, recording.rows, seed, rejects_all)
    return sum(tokens) / sum(seconds) / max(map(recording.fixed_speed, range(DEEPEST + 1)))

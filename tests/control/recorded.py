"""Rounds of the bundled models as they were timed on 2 cores of an AMD EPYC, played again for controllers.

`recorded.json` has, for each drafter in a quiet and in a busy moment and for 1, 4, 8 and 16 rows: the median
microseconds of drafting by depth and of the target's part by tokens; how far single rounds were off, in percent of
these, drafting and pass by turns, in the order in which they were seen; and of some texts how many of 8 guesses were
accepted, round by round, a digit each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from control.worlds import AMPLE, AUTO_WISH
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.control.controller import Controller, Load
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Budget, Outlook
from forerun.engine.calibration import Script

FOUND = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
CASES = {f"{name}, {rows} rows": (name, int(rows)) for name, each in FOUND.items() for rows in each}
DEEPEST = 8
TURNS = 3  # a text is played so often before another one follows


@dataclass
class Recording:
    """The rounds of one drafter in one moment, for so many rows."""

    name: str
    rows: int

    def __post_init__(self) -> None:
        self.texts = [[int(digit) for digit in text] for text in FOUND[self.name][str(self.rows)]["texts"]]
        self.number = 0  # of the round
        self.right: list[int] = []  # how many of 8 guesses would have been accepted in the rounds that were played last

    def taken_s(self, rows: int, depth: int, num_tokens: int) -> tuple[float, float]:
        """What drafting and the pass take on the median."""
        times = FOUND[self.name][str(rows)]

        def seconds(part: str, size: int) -> float:
            return 1e-6 * float(np.interp(size, *zip(*times[part], strict=True)))

        return seconds("draft_us", depth), seconds("pass_us", num_tokens)

    def off(self, rows: int) -> tuple[float, float]:
        """How far the next round is off."""
        found = FOUND[self.name][str(rows)]["off"]
        self.number += 1
        first = 2 * self.number % len(found)
        return found[first] / 100, found[first + 1] / 100

    def fixed_speed(self, depth: int) -> float:
        """Tokens per second of the rounds that were played last, had all of them been drafted so far."""
        counts = [1 + min(depth, each) for each in self.right]
        taken_s = sum(self.taken_s(self.rows, depth, self.rows * (1 + depth)))
        return self.rows * sum(counts) / len(counts) / taken_s

    def played(
        self, controller: Controller, count: int, rows: int, seed: int = 0, wrong: bool = False
    ) -> tuple[list[float], list[float]]:
        """Tokens and median seconds of so many rounds under a controller; `wrong`: no guess is ever right."""
        dice = random.Random(seed)
        ids, places, texts = list(range(rows)), [0] * rows, [dice.choice(self.texts) for _ in range(rows)]
        tokens, seconds, self.right = [], [], []
        for _ in range(count):
            for row in range(rows):
                if places[row] == TURNS * len(texts[row]):
                    ids[row], places[row], texts[row] = max(ids) + 1, 0, dice.choice(self.texts)
            load = Load(list(ids), [AUTO_WISH] * rows, [AMPLE] * rows, 0)
            budgets: Sequence[Budget] = [Budget(0)] * rows
            if not controller.skips(load):
                outlook = Outlook([0] * rows, [DEEPEST] * rows)
                budgets = controller.budgets(load, outlook, Spare(dict.fromkeys(ids, AMPLE), AMPLE, 16))
            found = []
            for row, budget in enumerate(budgets):
                self.right.append(0 if wrong else texts[row][places[row] % len(texts[row])])
                right = min(budget.depth, self.right[-1])
                places[row] += 1
                found.append(RowOutcome(ids[row], budget.nodes, min(budget.depth, right + 1), right, right + 1))
            num_tokens = sum(1 + budget.nodes for budget in budgets)
            draft_s, pass_s = self.taken_s(rows, max(budget.depth for budget in budgets), num_tokens)
            draft_off, pass_off = self.off(rows)
            controller.record(Outcome(found, 0, draft_s * draft_off, pass_s * pass_off))
            tokens.append(float(sum(row.num_emitted for row in found)))
            seconds.append(draft_s + pass_s)
        return tokens, seconds


def calibrated(recording: Recording) -> MeasuredDepth:
    """A controller that has seen the depths which a calibration measures."""
    script = Script(MeasuredDepth(), counts=True)
    for rows in sorted({1, recording.rows}):
        for script.depth in (0, 4, 8, 1, 2):
            recording.played(script, 3, rows, seed=script.depth)
            script.finish()
    script.controller.begin()
    return script.controller


def score(case: str, seed: int, count: int = 1500, wrong: bool = False) -> float:
    """Speed over that of the best fixed depth, behind a calibration."""
    recording = Recording(*CASES[case])
    controller = calibrated(recording)
    tokens, seconds = recording.played(controller, count, recording.rows, seed, wrong)
    return sum(tokens) / sum(seconds) / max(map(recording.fixed_speed, range(DEEPEST + 1)))

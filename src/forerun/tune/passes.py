"""Passes: what rounds of every size take on this machine, measured with the engine itself.

What a pass costs rises with its tokens in steps, not along a line, and where the steps are depends on the processor, so
the sizes that a prediction needs are measured and not read off a line. A drafter that always fills its depth makes
rounds of any size; the user's drafter works behind it, so that its time is measured in the same rounds. Rounds of each
size alternate with plain ones: what counts is the ratio to the plain rounds beside it, and of ratios the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.annotations import ProgressCallback
from forerun.bench.lane import Lane, Timed
from forerun.bench.plan import Group
from forerun.bench.run import Stage
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.engine.engine import Engine
from forerun.errors import DraftError
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from forerun.tune.predict import RoundShape

WARM = 2  # rounds of a wave that do not count, behind those that read prompts
MOST_WAVES = 60
COARSE_DEPTHS = (1, 2, 4, 8, 16)


@dataclass(slots=True)
class FullChains:
    """A drafter whose chains always have so many guesses: those of the drafter behind it, filled up with any token.

    `sizes` are the guesses of each row; None leaves the drafts as they are. Merged trees are never changed.
    """

    drafter: Drafter
    deepest: int
    sizes: Sequence[int] | None = None
    limits: Sequence[int] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        """The drafter's own."""
        return self.drafter.taps

    @property
    def names(self) -> tuple[str, ...]:
        """The drafter's own."""
        return self.drafter.names

    def observe(self, news: Committed) -> None:
        """What the drafter is told."""
        self.drafter.observe(news)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The drafter's guesses, as many as there shall be."""
        own = [
            replace(budget, depth=min(budget.depth, limit), nodes=min(budget.nodes, limit))
            for budget, limit in zip(budgets, self.limits, strict=True)
        ]
        draft = self.drafter.propose(draws, own, tail)
        if self.sizes is None or draft.tree.width > 1:
            return draft
        wanted = [min(size, budget.depth) for size, budget in zip(self.sizes, budgets, strict=True)]
        counts = (draft.tree.valid.sum(1) - 1).tolist()
        if counts == wanted:
            return draft
        texts = [
            [row.tokens[-1], *(chain[1 : 1 + min(count, size)]), *[row.tokens[-1]] * (size - count)]
            for row, chain, count, size in zip(draws.rows, draft.tree.tokens.tolist(), counts, wanted, strict=True)
        ]
        return Draft(DraftTree.of_texts(texts), pass_s=draft.pass_s)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Every sequence can be drafted as far as any size needs."""
        found = self.drafter.outlook(seq_ids)
        self.limits = found.limit
        return found if self.sizes is None else replace(found, limit=[self.deepest] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        """The drafter forgets."""
        self.drafter.forget(seq_ids)


@dataclass(frozen=True, slots=True)
class TimedRound:
    """A round: its rows, the tokens of its pass, its deepest draft, and its seconds, those of drafting apart."""

    num_rows: int
    num_tokens: int
    depth: int
    others_s: float
    draft_s: float

    @classmethod
    def of(cls, timed: Timed) -> TimedRound:
        """A round of the engine."""
        outcome = timed.outcome
        depth = max((row.num_drafted for row in outcome.rows), default=0)
        return cls(len(outcome.rows), outcome.num_tokens, depth, timed.step_s - outcome.draft_s, outcome.draft_s)


@dataclass(slots=True)
class RowCosts:
    """What rounds of so many rows take beside a plain one of them, which takes `plain_s`.

    `passes` are by tokens, `drafts` by depth, both as ratios; drafters read `reading_s` seconds for each prompt token.
    """

    plain_s: float
    passes: dict[int, float]
    drafts: dict[int, float]
    reading_s: float = 0.0

    def pass_s(self, num_tokens: int) -> float:
        """Seconds of a pass over so many tokens and of all that goes with it: on the line to the nearest sizes."""
        return self.plain_s * along(self.passes, num_tokens)

    def draft_s(self, depth: int) -> float:
        """Seconds of drafting so far."""
        return self.plain_s * along({0: 0.0, **self.drafts}, depth) if depth else 0.0

    @property
    def most_tokens(self) -> int:
        """The largest pass that was measured."""
        return max(self.passes)

    def newer(self, beside: Sequence[RowCosts]) -> RowCosts:
        """With the mean of newer ratios where there are some."""

        def joined(name: str) -> dict[int, float]:
            seen: dict[int, list[float]] = {}
            for own in beside:
                for size, ratio in getattr(own, name).items():
                    seen.setdefault(size, []).append(ratio)
            return {**getattr(self, name), **{size: statistics.fmean(ratios) for size, ratios in seen.items()}}

        return replace(self, passes=joined("passes"), drafts=joined("drafts"))

    def as_object(self) -> dict[str, Any]:
        """For the notes."""
        pairs = {name: sorted(getattr(self, name).items()) for name in ("passes", "drafts")}
        return {"plain_s": self.plain_s, "reading_s": self.reading_s, **pairs}

    @classmethod
    def of(cls, noted: Iterable[Mapping[str, Any]]) -> RowCosts:
        """From notes of the same rows; of what several hold the last counts."""
        each = list(noted)
        assert each, "something was measured"
        joined = {
            name: {int(size): ratio for one in each for size, ratio in one[name]} for name in ("passes", "drafts")
        }
        return cls(each[0]["plain_s"], joined["passes"], joined["drafts"], each[0]["reading_s"])


def along(known: Mapping[int, float], size: int) -> float:
    """The value at a size: on the line between its neighbours, and beyond the last in proportion to it."""
    sizes = sorted(known)
    last = sizes[-1]
    if size > last > 0:
        return known[last] * size / last
    return float(np.interp(size, sizes, [known[each] for each in sizes]))


@dataclass(frozen=True, slots=True)
class PassTable:
    """What rounds take, by arm and rows; rows between two that were measured are taken to cost in between."""

    by_arm: Mapping[str, Mapping[int, RowCosts]]

    def round_s(self, arm: str, shape: RoundShape) -> float:
        """Seconds of a round of this shape, drafted by this arm."""
        known = self.by_arm[arm]
        draft_s = self.draft_s(arm, shape.num_drafted, shape.depth)
        reading_s = self.between(known, shape.num_drafted, lambda own: own.reading_s) * shape.num_read
        return self.pass_s(arm, shape.num_rows, shape.num_tokens) + draft_s + reading_s

    def draft_s(self, arm: str, num_drafted: int, depth: int) -> float:
        """Seconds of drafting so many rows so far."""
        return self.between(self.by_arm[arm], num_drafted, lambda own: own.draft_s(depth))

    def pass_s(self, arm: str, num_rows: int, num_tokens: int) -> float:
        """Seconds of a round without its drafting."""
        known = self.by_arm[arm]
        largest = known[max(known)]

        def of(own: RowCosts) -> float:
            most = own.most_tokens
            if num_tokens <= most:
                return own.pass_s(num_tokens)
            return own.pass_s(most) * largest.pass_s(num_tokens) / largest.pass_s(most)

        return self.between(known, num_rows, of)

    def between(self, known: Mapping[int, RowCosts], num_rows: int, figure: Any) -> float:
        """A figure for so many rows."""
        rows = sorted(known)
        return float(np.interp(num_rows, rows, [figure(known[each]) for each in rows])) if num_rows else 0.0


def rows_of(batch: int) -> list[int]:
    """For how many rows rounds are measured, where a batch has so many places."""
    return sorted({1, *([batch // 2] if batch >= 4 else []), batch})


def sizes_at(num_rows: int, depths: Iterable[int]) -> list[int]:
    """The tokens of passes in which all rows are drafted so far."""
    return [num_rows * (1 + depth) for depth in depths]


@dataclass(slots=True)
class PassMeter:
    """Measures rounds of so many rows, which are drafted by `arm` (None where a drafter is no mix)."""

    stage: Stage
    group: Group  # its batch is the number of rows
    arm: str | None
    deepest: int
    repeats: int
    ratios: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)  # size: depth, pass, drafting
    plain: list[float] = field(default_factory=list)
    reading: list[tuple[int, float, int]] = field(default_factory=list)  # prompt tokens, seconds, depth

    def measure(self, sizes: Sequence[int], report: ProgressCallback) -> RowCosts:
        """What rounds of these sizes take, and what drafters take to read prompts. DraftError where no round fits."""
        order = [size for _ in range(self.repeats) for size in sizes]
        number = 0
        for wave in range(MOST_WAVES):
            if number >= len(order):
                break
            report(f"measuring rounds of {self.group.batch}", number / len(order))
            number += self.wave(order[number:], wave)
        if not self.plain:
            raise DraftError(
                "no round with guesses fits behind these prompts in the context of the model: give shorter prompts, "
                "or fewer --max-tokens."
            )
        passes = {size: statistics.median(each[1] for each in seen) for size, seen in self.ratios.items()}
        drafts: dict[int, list[float]] = {}
        for seen in self.ratios.values():
            for depth, _, ratio in seen:
                drafts.setdefault(depth, []).append(ratio)
        plain_s = statistics.median(self.plain)
        found = RowCosts(
            plain_s, {self.group.batch: 1.0} | passes, {d: statistics.median(r) for d, r in drafts.items()}
        )
        found.reading_s = self.reading_of(found)
        return found

    def reading_of(self, found: RowCosts) -> float:
        """Seconds that drafters take for a token of a prompt, beyond what drafting alone takes."""
        each = [max(0.0, taken_s - found.draft_s(depth)) / max(1, num) for num, taken_s, depth in self.reading]
        return statistics.median(each) if each else 0.0

    def wave(self, sizes: Sequence[int], number: int) -> int:
        """Some texts, as long as they last; how many of the sizes were measured."""
        full = FullChains(self.stage.drafter or self.stage.llm.drafter, self.deepest)  # type: ignore[arg-type]
        lane = self.lane(full, number)
        engine, sequences, rounds = lane.engine, lane.sequences, list[TimedRound]()
        try:
            while any(sequence.unread for sequence in sequences):
                lane.step(self.stage.clock)
            self.read_first(lane, full)
            for _ in range(WARM):
                self.step(lane, full, 0)
            for size in [each for own in sizes for each in (self.group.batch, own)]:
                needed = -(-size // self.group.batch) + 1  # tokens that may still be said, where all guesses fit
                if any(each.room <= needed for each in sequences) or len(engine.sequences) < len(sequences):
                    break
                rounds.append(self.step(lane, full, size - self.group.batch))
        finally:
            lane.clear()
        return max(1, self.learn(rounds))  # where not even one fits it is left out

    def learn(self, rounds: Sequence[TimedRound]) -> int:
        """Compare each round with guesses with the plain ones beside it; how many there are."""
        for before, own, after in zip(rounds[::2], rounds[1::2], [*rounds[2::2], *rounds[-2:-1]], strict=False):
            plain = [each.others_s + each.draft_s for each in (before, after) if not each.depth]
            beside_s = statistics.fmean(plain)
            self.plain.append(plain[0])
            seen = self.ratios.setdefault(own.num_tokens, [])
            seen.append((own.depth, own.others_s / beside_s, own.draft_s / beside_s))
        return len(rounds) // 2

    def read_first(self, lane: Lane, full: FullChains) -> None:
        """The first draft of new texts, before which drafters read all of their prompts."""
        num_read = sum(sequence.num_prompt for sequence in lane.sequences)
        own = self.step(lane, full, self.group.batch * COARSE_DEPTHS[0])
        self.reading.append((num_read, own.draft_s, own.depth))

    def step(self, lane: Lane, full: FullChains, num_guesses: int) -> TimedRound:
        """One round with so many guesses, shared out evenly."""
        num_rows = len(lane.sequences)
        each, more = divmod(num_guesses, num_rows)
        full.sizes = [each + (row < more) for row in range(num_rows)] if num_guesses else None
        wish = Speculation(each + (more > 0), drafter=self.arm)
        for sequence in lane.sequences:
            sequence.speculation = wish
        return TimedRound.of(lane.step(self.stage.clock))

    def lane(self, full: FullChains, number: int) -> Lane:
        """New sequences, as the job has them, which may go on long enough for every draft to fit."""
        stage, llm = self.stage, self.stage.llm
        items, sequences = stage.workloads[self.group.workload].items, []
        for row in range(self.group.batch):
            item = items[(number * self.group.batch + row) % len(items)]
            length = stage.num_tokens if item.answer is None else len(item.answer)
            params = SamplingParams(
                temperature=self.group.temperature, seed=row, max_tokens=length + self.deepest + 2, ignore_eos=True
            )
            sequences += llm.requests.sequences(Request.of(item.prompt, params, Speculation(0), f"passes {number}"))
        engine = Engine(
            llm.engine.runner,
            full,
            controller=FixedDepth(),
            options=EngineOptions(self.group.batch, llm.engine.options.chunk_tokens, prefix_cache=False),
            num_ids=llm.requests.num_ids,
            kernels=llm.engine.kernels,
        )
        return Lane(engine, sequences)

"""What is measured of a drafter: its guesses at every place of every text, and what rounds of every size take.

A pilot decodes plainly, a token a round, and in each round the drafter guesses as deep as is of interest. What it
guessed is kept, and compared with the text when that is known. So the guesses are known behind every token, and not
only where the rounds of some depth happen to begin; `predict.py` plays any depth from that.

What a pass costs rises with its tokens in steps, not along a line, and where the steps are depends on the processor, so
the sizes that a prediction needs are measured and not read off a line. A drafter that always fills its depth makes
rounds of any size; the user's drafter works behind it, so that its time is measured in the same rounds. Rounds of each
size alternate with plain ones: what counts is the ratio to the plain rounds beside it, and of ratios the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from forerun.annotations import ProgressCallback
from forerun.bench.plan import Group
from forerun.bench.run import Lane, Stage, Timed
from forerun.config import Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.errors import DraftError
from forerun.machine import Neighbours
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from forerun.tune.predict import Guessed, RoundShape

WARM = 2  # rounds of a wave that do not count, behind those that read prompts
MOST_WAVES = 60
COARSE_DEPTHS = (1, 2, 4, 8, 16)
GuessedTree = tuple[Sequence[int], Sequence[int]]  # of a draft: its tokens, root first, and their parents


@dataclass(slots=True)
class ForwardingDrafter:
    """A drafter in front of the one that is measured, which learns and forgets as it would alone."""

    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        """The drafter's."""
        return self.drafter.taps

    @property
    def names(self) -> tuple[str, ...]:
        """The drafter's."""
        return self.drafter.names

    def observe(self, news: Committed) -> None:
        """What the drafter is told."""
        self.drafter.observe(news)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The drafter's."""
        return self.drafter.outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """The drafter forgets; what was measured stays."""
        self.drafter.forget(seq_ids)


@dataclass(slots=True)
class PilotDrafter(ForwardingDrafter):
    """A drafter whose guesses are recorded instead of given away: every sequence gets its root alone.

    `seen` holds its drafts by sequence and by the length of the text that ends with their root.
    """

    seen: dict[int, dict[int, GuessedTree]] = field(default_factory=dict)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """Record what the drafter guesses; roots alone."""
        tree = self.drafter.propose(draws, budgets, tail).tree
        for row, budget, *guessed in zip(draws.rows, budgets, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            if budget.depth:
                self.seen.setdefault(row.seq_id, {})[len(row.tokens)] = (guessed[0], guessed[1])
        return Draft(DraftTree.of_roots([row.tokens[-1] for row in draws.rows]))

    def places(self, seq_id: int, prompt: int, answer: Sequence[int], deepest: int) -> list[list[Guessed]]:
        """How the drafts of a sequence did, by the number of tokens said before, as `TextRounds` has it."""
        drafts = self.seen.get(seq_id, {})
        return [judged_at_depths(drafts.get(prompt + i), answer[i:], deepest) for i in range(len(answer))]


def judged_at_depths(draft: GuessedTree | None, text: Sequence[int], deepest: int) -> list[Guessed]:
    """How a draft did, cut to depth 1, 2, and so on, as long as that makes a difference; `text` followed the root."""
    by_depth = [] if draft is None else [judged(draft, text, depth) for depth in range(1, deepest + 1)]
    while len(by_depth) > 1 and by_depth[-1] == by_depth[-2]:
        by_depth.pop()
    return by_depth if any(guessed.drafted for guessed in by_depth) else []


def judged(draft: GuessedTree, text: Sequence[int], depth: int) -> Guessed:
    """What a draft, cut to a depth, comes to where the text goes on like this."""
    below: dict[tuple[int, int], int] = {}
    levels, drafted = [0], 0
    for node, (token, parent) in enumerate(zip(*draft, strict=True)):
        if node == 0:
            continue
        levels.append(levels[parent] + 1 if token >= 0 and parent >= 0 else depth + 1)
        if levels[node] <= depth:
            drafted += 1
            below.setdefault((parent, token), node)
    node, accepted = 0, 0
    while accepted < len(text) and (node, text[accepted]) in below:
        node, accepted = below[node, text[accepted]], accepted + 1
    return Guessed(drafted, accepted)


@dataclass(slots=True)
class FullChains(ForwardingDrafter):
    """A drafter whose chains always have so many guesses: those of the drafter behind it, filled up with any token.

    `sizes` are the guesses of each row; None leaves the drafts as they are. Merged trees are never changed.
    """

    deepest: int
    sizes: Sequence[int] | None = None
    told: Outlook = field(default_factory=lambda: Outlook(unread=[], limit=[]), init=False)  # before the round

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The drafter's guesses, as many as there shall be."""
        limited = [within(budget, limit) for budget, limit in zip(budgets, self.told.limit, strict=True)]
        draft = self.drafter.propose(draws, limited, tail)
        if self.sizes is None or draft.tree.width > 1:
            return draft
        sizes = [min(size, budget.depth) for size, budget in zip(self.sizes, budgets, strict=True)]
        counts = (draft.tree.valid.sum(1) - 1).tolist()
        if counts == sizes:
            return draft
        texts = [
            [row.tokens[-1], *(chain[1 : 1 + min(count, size)]), *[row.tokens[-1]] * (size - count)]
            for row, chain, count, size in zip(draws.rows, draft.tree.tokens.tolist(), counts, sizes, strict=True)
        ]
        return Draft(DraftTree.of_texts(texts), pass_s=draft.pass_s)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Every sequence can be drafted as far as any size needs."""
        self.told = self.drafter.outlook(seq_ids)
        return self.told if self.sizes is None else replace(self.told, limit=[self.deepest] * len(seq_ids))


def within(budget: Budget, depth: int) -> Budget:
    """A budget of chains, cut to a depth."""
    return budget if depth >= budget.depth else replace(budget, depth=depth, nodes=min(depth, budget.nodes))


@dataclass(slots=True)
class RowCosts:
    """What rounds of so many rows take beside a plain one of them, which takes `plain_s`.

    `passes` are by tokens, `drafts` by depth, both as ratios; drafters read `reading_s` seconds for each prompt token.
    `num_busy` are the cores that other programs kept busy while all that was measured.
    """

    plain_s: float
    passes: dict[int, float]
    drafts: dict[int, float]
    reading_s: float = 0.0
    num_busy: float | None = None

    def pass_s(self, num_tokens: int) -> float:
        """Seconds of a pass over so many tokens and of all that goes with it: on the line to the nearest sizes."""
        return self.plain_s * along(self.passes, num_tokens)

    def draft_s(self, depth: int) -> float:
        """Seconds of drafting so far."""
        return self.plain_s * along({0: 0.0, **self.drafts}, depth) if depth else 0.0

    def round_ratio(self, depth: int) -> float:
        """What a round of one row that is drafted so far takes, over a plain one."""
        return (self.pass_s(1 + depth) + self.draft_s(depth)) / self.plain_s

    def newer(self, beside: Sequence[RowCosts]) -> RowCosts:
        """With the mean of newer ratios where there are some."""

        def joined(name: str) -> dict[int, float]:
            seen: dict[int, list[float]] = {}
            for size, ratio in (pair for each in beside for pair in getattr(each, name).items()):
                seen.setdefault(size, []).append(ratio)
            return {**getattr(self, name), **{size: statistics.fmean(ratios) for size, ratios in seen.items()}}

        return replace(self, passes=joined("passes"), drafts=joined("drafts"))

    @classmethod
    def from_json(cls, entry: Any) -> RowCosts:
        """What JSON was made of; it knows names that are texts alone."""
        passes, drafts = ({int(size): ratio for size, ratio in entry[name].items()} for name in ("passes", "drafts"))
        return cls(entry["plain_s"], passes, drafts, entry["reading_s"], entry.get("num_busy"))


def along(known: Mapping[int, float], size: int) -> float:
    """The value at a size: on the line between its neighbours, and beyond the last in proportion to it."""
    sizes = sorted(known)
    last = sizes[-1]
    if size > last > 0:
        return known[last] * size / last
    return float(np.interp(size, sizes, [known[each] for each in sizes]))


@dataclass(frozen=True, slots=True)
class PassTable:
    """What rounds take, by drafter and rows; rows between two that were measured are taken to cost in between."""

    by_drafter: Mapping[str, Mapping[int, RowCosts]]

    def round_s(self, drafter: str, shape: RoundShape) -> float:
        """Seconds of a round of this shape, drafted by this drafter."""
        reading_s = self.between(drafter, shape.num_drafted, lambda costs: costs.reading_s) * shape.num_read
        draft_s = self.draft_s(drafter, shape.num_drafted, shape.depth)
        return self.pass_s(drafter, shape.num_rows, shape.num_tokens) + draft_s + reading_s

    def draft_s(self, drafter: str, num_drafted: int, depth: int) -> float:
        """Seconds of drafting so many rows so far."""
        return self.between(drafter, num_drafted, lambda costs: costs.draft_s(depth))

    def pass_s(self, drafter: str, num_rows: int, num_tokens: int) -> float:
        """Seconds of a round without its drafting."""
        largest = self.by_drafter[drafter][max(self.by_drafter[drafter])]

        def of(costs: RowCosts) -> float:
            most = max(costs.passes)
            if num_tokens <= most:
                return costs.pass_s(num_tokens)
            return costs.pass_s(most) * largest.pass_s(num_tokens) / largest.pass_s(most)

        return self.between(drafter, num_rows, of)

    def between(self, drafter: str, num_rows: int, figure: Callable[[RowCosts], float]) -> float:
        """A figure for so many rows."""
        rows = sorted(self.by_drafter[drafter])
        figures = [figure(self.by_drafter[drafter][each]) for each in rows]
        return float(np.interp(num_rows, rows, figures)) if num_rows else 0.0


def rows_of(batch: int) -> list[int]:
    """For how many rows rounds are measured, where a batch has so many places."""
    return sorted({1, *([batch // 2] if batch >= 4 else []), batch})


def sizes_at(num_rows: int, depths: Iterable[int]) -> list[int]:
    """The tokens of passes in which all rows are drafted so far."""
    return [num_rows * (1 + depth) for depth in depths]


@dataclass(slots=True)
class PassMeter:
    """Measures rounds of so many rows, which are drafted by `drafter` (None where a drafter is no mix)."""

    stage: Stage
    group: Group  # its batch is the number of rows
    drafter: str | None
    deepest: int
    repeats: int
    ratios: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)  # size: depth, pass, drafting
    plain: list[float] = field(default_factory=list)
    shortest_s: dict[int, float] = field(default_factory=dict)  # round by depth, 0 for plain ones
    reading: list[tuple[int, float, int]] = field(default_factory=list)  # prompt tokens, seconds, depth

    def measure(self, sizes: Sequence[int], report: ProgressCallback) -> RowCosts:
        """What rounds of these sizes take, and what drafters take to read prompts. DraftError where no round fits."""
        order = [size for _ in range(self.repeats) for size in sizes]
        number, neighbours = 0, Neighbours()
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
        by_depth: dict[int, list[float]] = {}
        for depth, _, ratio in chain.from_iterable(self.ratios.values()):
            by_depth.setdefault(depth, []).append(ratio)
        drafts = {depth: statistics.median(ratios) for depth, ratios in by_depth.items()}
        costs = RowCosts(statistics.median(self.plain), {self.group.batch: 1.0} | passes, drafts)
        each_s = [max(0.0, taken_s - costs.draft_s(depth)) / max(1, num) for num, taken_s, depth in self.reading]
        costs.reading_s = statistics.median(each_s) if each_s else 0.0  # beyond what drafting alone takes
        costs.num_busy = neighbours.num_busy()
        return costs

    def wave(self, sizes: Sequence[int], number: int) -> int:
        """Some texts, as long as they last; how many of the sizes were measured."""
        batch = self.group.batch
        full = FullChains(self.stage.drafter or self.stage.llm.drafter, self.deepest)  # type: ignore[arg-type]
        lane = self.lane(full, number)
        sequences, rounds = lane.sequences, list[Timed]()
        try:
            while any(sequence.unread for sequence in sequences):
                lane.step(self.stage.clock)
            self.read_first(lane, full)
            for _ in range(WARM):
                self.step(lane, full, 0)
            for size in chain.from_iterable((batch, size) for size in sizes):
                needed = -(-size // batch) + 1  # tokens that may still be said, where all guesses fit
                if any(each.room <= needed for each in sequences) or len(lane.engine.sequences) < len(sequences):
                    break
                rounds.append(self.step(lane, full, size - batch))
        finally:
            lane.clear()
        return max(1, self.learn(rounds))  # where not even one fits it is left out

    def learn(self, rounds: Sequence[Timed]) -> int:
        """Compare each round with guesses with the plain ones beside it; how many there are."""
        for each in rounds:
            self.shortest_s[each.depth] = min(each.step_s, self.shortest_s.get(each.depth, each.step_s))
        for before, drafted, after in zip(rounds[::2], rounds[1::2], [*rounds[2::2], *rounds[-2:-1]], strict=False):
            beside_s = statistics.fmean(each.step_s for each in (before, after) if not each.depth)
            self.plain.append(before.step_s)
            seen = self.ratios.setdefault(drafted.outcome.num_tokens, [])
            seen.append((drafted.depth, drafted.others_s / beside_s, drafted.outcome.draft_s / beside_s))
        return len(rounds) // 2

    def read_first(self, lane: Lane, full: FullChains) -> None:
        """The first draft of new texts, before which drafters read all of their prompts."""
        num_read = sum(sequence.num_prompt for sequence in lane.sequences)
        timed = self.step(lane, full, self.group.batch * COARSE_DEPTHS[0])
        self.reading.append((num_read, timed.outcome.draft_s, timed.depth))

    def step(self, lane: Lane, full: FullChains, num_guesses: int) -> Timed:
        """One round with so many guesses, shared out evenly."""
        num_rows = len(lane.sequences)
        each, more = divmod(num_guesses, num_rows)
        full.sizes = [each + (row < more) for row in range(num_rows)] if num_guesses else None
        speculation = Speculation(each + (more > 0), drafter=self.drafter)
        for sequence in lane.sequences:
            sequence.speculation = speculation
        return lane.step(self.stage.clock)

    def lane(self, full: FullChains, number: int) -> Lane:
        """New sequences, as the job has them, which may go on long enough for every draft to fit."""
        stage = replace(
            self.stage,
            speculation=lambda depth: Speculation(0),
            controllers={},
            drafter=full,
            controller=FixedDepth(),
            num_spare=self.deepest + 2,
        )
        first = number * self.group.batch
        numbers = range(first, first + self.group.batch)
        return stage.lane(self.group, self.deepest, numbers, tenant=f"passes {number}")

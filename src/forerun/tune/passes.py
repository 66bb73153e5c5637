"""Measurements of a drafter: its drafts at every position of every text, and the cost of rounds of every size.

A pilot run decodes plainly, one token per round, and records in each round what the drafter would draft at the maximum
depth. So the drafts are known after every token, not only where rounds of some depth start; `predict.py` simulates any
depth from them.

The cost of a pass is a step function of its number of tokens and depends on the processor, so the sizes that a
prediction needs are measured, not interpolated. `FullChains` pads drafts to any length, which gives rounds of any size;
the user's drafter runs in the same rounds, so its time is measured too. Rounds of each size alternate with plain ones;
the cost is the median of the ratios to neighbouring plain rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import numpy as np

from forerun.annotations import ProgressCallback
from forerun.bench.plan import Group
from forerun.bench.run import BenchSetup, TimedEngine, TimedRound
from forerun.config import Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.errors import DraftError
from forerun.machine import Neighbours
from forerun.sampling.draws import Draws
from forerun.stored import SMALLEST, of_json
from forerun.tree import DraftTree
from forerun.tune.predict import DraftOutcome, RoundShape

WARM_UP = 2  # rounds of a wave after its prefill
MOST_WAVES = 60
COARSE_DEPTHS = (1, 2, 4, 8, 16)
RecordedTree = tuple[Sequence[int], Sequence[int]]  # a draft's tokens, root first, and their parents


@dataclass(slots=True)
class ForwardingDrafter:
    """A wrapper of the measured drafter that forwards all calls except `propose`."""

    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of the measured drafter."""
        return self.drafter.taps

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the measured drafter."""
        return self.drafter.names

    def observe(self, committed: Committed) -> None:
        """Forward committed tokens to the measured drafter."""
        self.drafter.observe(committed)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The outlook of the measured drafter."""
        return self.drafter.outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Let the measured drafter forget sequences; recorded drafts are kept."""
        self.drafter.forget(seq_ids)


@dataclass(slots=True)
class PilotDrafter(ForwardingDrafter):
    """Records drafts without using them: every round is a plain one.

    `recorded`: drafts by sequence id and by the length of the text up to their root.
    """

    recorded: dict[int, dict[int, RecordedTree]] = field(default_factory=dict)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """Record the drafts; return a tree of roots only."""
        tree = self.drafter.propose(draws, budgets, tail).tree
        for row, budget, *trees in zip(draws.rows, budgets, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            if budget.depth:
                self.recorded.setdefault(row.seq_id, {})[len(row.tokens)] = (trees[0], trees[1])
        return Draft(DraftTree.of_roots([row.tokens[-1] for row in draws.rows]))

    def places(self, seq_id: int, prompt: int, answer: Sequence[int], deepest: int) -> list[list[DraftOutcome]]:
        """The outcomes of a sequence's drafts by position in its answer, as in `TextRounds.places`."""
        drafts = self.recorded.get(seq_id, {})
        return [outcomes_by_depth(drafts.get(prompt + i), answer[i:], deepest) for i in range(len(answer))]


def outcomes_by_depth(draft: RecordedTree | None, text: Sequence[int], deepest: int) -> list[DraftOutcome]:
    """The outcomes of a draft cut to depth 1, 2, ..., without equal ones at the end; `text` follows the root."""
    by_depth = [] if draft is None else [outcome_of(draft, text, depth) for depth in range(1, deepest + 1)]
    while len(by_depth) > 1 and by_depth[-1] == by_depth[-2]:
        by_depth.pop()
    return by_depth if any(outcome.drafted for outcome in by_depth) else []


def outcome_of(draft: RecordedTree, text: Sequence[int], depth: int) -> DraftOutcome:
    """The outcome of a draft cut to a depth, if `text` follows its root."""
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
    return DraftOutcome(drafted, accepted)


@dataclass(slots=True)
class FullChains(ForwardingDrafter):
    """Cuts the measured drafter's chains to fixed lengths, or pads them with arbitrary tokens.

    `sizes`: the number of draft tokens of each row; None leaves drafts unchanged. Merged trees are never changed.
    """

    deepest: int
    sizes: Sequence[int] | None = None
    last_outlook: Outlook = field(default_factory=lambda: Outlook(unread=[], limit=[]), init=False)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The drafter's chains, cut or padded to `sizes`."""
        limited = [within(budget, limit) for budget, limit in zip(budgets, self.last_outlook.limit, strict=True)]
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
        """The drafter's outlook, with the depth limit raised to `deepest`."""
        outlook = self.last_outlook = self.drafter.outlook(seq_ids)
        return outlook if self.sizes is None else replace(outlook, limit=[self.deepest] * len(seq_ids))


def within(budget: Budget, depth: int) -> Budget:
    """A chain budget, limited to a depth."""
    return budget if depth >= budget.depth else replace(budget, depth=depth, nodes=depth)


@dataclass(slots=True)
class RowCosts:
    """Costs of rounds with a fixed number of rows, relative to a plain round, which takes `plain_s` seconds.

    `passes` are ratios by number of tokens, `drafts` ratios by depth. `reading_s` is the drafter's prefill time per
    prompt token, `num_busy` the number of cores that other programs used during the measurement.
    """

    plain_s: Annotated[float, SMALLEST]
    passes: dict[int, Annotated[float, SMALLEST]]
    drafts: dict[int, float]
    reading_s: float = 0.0
    num_busy: float | None = None

    def pass_s(self, num_tokens: int) -> float:
        """Seconds of a round without drafting, interpolated between the measured sizes."""
        return self.plain_s * along(self.passes, num_tokens)

    def draft_s(self, depth: int) -> float:
        """Seconds of drafting `depth` tokens."""
        return self.plain_s * along({0: 0.0, **self.drafts}, depth) if depth else 0.0

    def round_ratio(self, depth: int) -> float:
        """The cost of a round of one row at this depth, relative to a plain round."""
        return (self.pass_s(1 + depth) + self.draft_s(depth)) / self.plain_s

    def newer(self, costs: Sequence[RowCosts]) -> RowCosts:
        """These costs, with ratios replaced by the mean of newer ones if there are any."""

        def updated(name: str) -> dict[int, float]:
            newer: dict[int, list[float]] = {}
            for size, ratio in (pair for each in costs for pair in getattr(each, name).items()):
                newer.setdefault(size, []).append(ratio)
            return {**getattr(self, name), **{size: statistics.fmean(ratios) for size, ratios in newer.items()}}

        num_busy = max((each.num_busy for each in (self, *costs) if each.num_busy is not None), default=None)
        return replace(self, passes=updated("passes"), drafts=updated("drafts"), num_busy=num_busy)

    @classmethod
    def from_json(cls, entry: Any) -> RowCosts:
        """The inverse of JSON encoding. Raises ValueError for anything else, and for costs without a pass."""
        costs: RowCosts = of_json(cls, entry)
        if not costs.passes:
            raise ValueError("passes is empty")
        return costs


def along(known: Mapping[int, float], size: int) -> float:
    """Linear interpolation of a value at a size; proportional to the size beyond the largest one."""
    sizes = sorted(known)
    last = sizes[-1]
    if size > last > 0:
        return known[last] * size / last
    return float(np.interp(size, sizes, [known[each] for each in sizes]))


@dataclass(frozen=True, slots=True)
class PassTable:
    """Costs of rounds by drafter and number of rows, interpolated between the measured numbers of rows."""

    by_drafter: Mapping[str, Mapping[int, RowCosts]]

    def round_s(self, drafter: str, shape: RoundShape) -> float:
        """Seconds of a round of this shape with this drafter."""
        reading_s = self.between(drafter, shape.num_drafted, lambda costs: costs.reading_s) * shape.num_read
        draft_s = self.draft_s(drafter, shape.num_drafted, shape.depth)
        return self.pass_s(drafter, shape.num_rows, shape.num_tokens) + draft_s + reading_s

    def draft_s(self, drafter: str, num_drafted: int, depth: int) -> float:
        """Seconds of drafting `num_drafted` rows to this depth."""
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
        """A figure of RowCosts, interpolated for this number of rows."""
        rows = sorted(self.by_drafter[drafter])
        figures = [figure(self.by_drafter[drafter][each]) for each in rows]
        return float(np.interp(num_rows, rows, figures)) if num_rows else 0.0


def rows_of(batch: int) -> list[int]:
    """The numbers of rows to measure for a batch size."""
    return sorted({1, *([batch // 2] if batch >= 4 else []), batch})


def sizes_at(num_rows: int, depths: Iterable[int]) -> list[int]:
    """The numbers of tokens of passes in which all rows are drafted to these depths."""
    return [num_rows * (1 + depth) for depth in depths]


@dataclass(slots=True)
class PassMeter:
    """Measures rounds with a fixed number of rows; `drafter` selects one of a mix, else None."""

    setup: BenchSetup
    group: Group  # its batch is the number of rows
    drafter: str | None
    deepest: int
    repeats: int
    ratios: dict[int, list[tuple[int, float, float]]] = field(default_factory=dict)  # size: depth, pass, drafting
    plain: list[float] = field(default_factory=list)
    shortest_s: dict[int, float] = field(default_factory=dict)  # shortest round by depth, 0: plain
    reading: list[tuple[int, float, int]] = field(default_factory=list)  # prompt tokens, seconds, depth

    def measure(self, sizes: Sequence[int], report: ProgressCallback) -> RowCosts:
        """Measure rounds of these sizes, and the drafter's prefill. Raises DraftError if no round fits the context."""
        order = [size for _ in range(self.repeats) for size in sizes]
        number, neighbours = 0, Neighbours()
        for wave in range(MOST_WAVES):
            if number >= len(order):
                break
            report(f"measuring rounds, batch {self.group.batch}", number / len(order))
            number += self.wave(order[number:], wave)
        if not self.plain:
            raise DraftError(
                "these prompts leave no room for a drafted round in the model's context: use shorter prompts, "
                "or fewer --max-tokens."
            )
        passes = {size: statistics.median(each[1] for each in seen) for size, seen in self.ratios.items()}
        by_depth: dict[int, list[float]] = {}
        for depth, _, ratio in chain.from_iterable(self.ratios.values()):
            by_depth.setdefault(depth, []).append(ratio)
        drafts = {depth: statistics.median(ratios) for depth, ratios in by_depth.items()}
        costs = RowCosts(statistics.median(self.plain), {self.group.batch: 1.0} | passes, drafts)
        each_s = [max(0.0, taken_s - costs.draft_s(depth)) / max(1, num) for num, taken_s, depth in self.reading]
        costs.reading_s = statistics.median(each_s) if each_s else 0.0  # without the drafting itself
        costs.num_busy = neighbours.num_busy()
        return costs

    def wave(self, sizes: Sequence[int], number: int) -> int:
        """Measure sizes on one batch of texts until it ends; returns the number of sizes measured."""
        batch = self.group.batch
        full = FullChains(self.setup.drafter or self.setup.llm.drafter, self.deepest)  # type: ignore[arg-type]
        timed_engine = self.new_engine(full, number)
        sequences, rounds = timed_engine.sequences, list[TimedRound]()
        try:
            while any(sequence.unread for sequence in sequences):
                timed_engine.step(self.setup.clock)
            self.read_first(timed_engine, full)
            for _ in range(WARM_UP):
                self.step(timed_engine, full, 0)
            for size in chain.from_iterable((batch, size) for size in sizes):
                needed = -(-size // batch) + 1  # tokens that must be left in the answer
                num_running = len(timed_engine.engine.sequences)
                if num_running < len(sequences) or any(each.room <= needed for each in sequences):
                    break
                rounds.append(self.step(timed_engine, full, size - batch))
        finally:
            timed_engine.clear()
        return max(1, self.record(rounds))  # a size that does not fit at all is skipped

    def record(self, rounds: Sequence[TimedRound]) -> int:
        """Record each drafted round's ratio to its neighbouring plain rounds; returns the number of drafted rounds."""
        for each in rounds:
            self.shortest_s[each.depth] = min(each.step_s, self.shortest_s.get(each.depth, each.step_s))
        for before, drafted, after in zip(rounds[::2], rounds[1::2], [*rounds[2::2], *rounds[-2:-1]], strict=False):
            plain_s = statistics.fmean(each.step_s for each in (before, after) if not each.depth)
            self.plain.append(before.step_s)
            ratios = self.ratios.setdefault(drafted.outcome.num_tokens, [])
            draft_s = drafted.outcome.draft_s
            ratios.append((drafted.depth, (drafted.step_s - draft_s) / plain_s, draft_s / plain_s))
        return len(rounds) // 2

    def read_first(self, timed_engine: TimedEngine, full: FullChains) -> None:
        """Time the first draft of new texts, which includes the drafter's prefill."""
        num_read = sum(sequence.num_prompt for sequence in timed_engine.sequences)
        timed = self.step(timed_engine, full, self.group.batch * COARSE_DEPTHS[0])
        self.reading.append((num_read, timed.outcome.draft_s, timed.depth))

    def step(self, timed_engine: TimedEngine, full: FullChains, num_drafted: int) -> TimedRound:
        """Run one round with `num_drafted` draft tokens, distributed evenly over the rows."""
        num_rows = len(timed_engine.sequences)
        each, more = divmod(num_drafted, num_rows)
        full.sizes = [each + (row < more) for row in range(num_rows)] if num_drafted else None
        speculation = Speculation(each + (more > 0), drafter=self.drafter)
        for sequence in timed_engine.sequences:
            sequence.speculation = speculation
        return timed_engine.step(self.setup.clock)

    def new_engine(self, full: FullChains, number: int) -> TimedEngine:
        """An engine with new sequences that have room for full drafts at the end."""
        setup = replace(
            self.setup,
            speculation=lambda depth: Speculation(0),
            controllers={},
            drafter=full,
            controller=FixedDepth(),
            num_spare=self.deepest + 2,
        )
        first = number * self.group.batch
        numbers = range(first, first + self.group.batch)
        return setup.new_engine(self.group, self.deepest, numbers, tenant=f"passes {number}")

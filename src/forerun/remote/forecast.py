"""Figures of each load from measured blocks: speed-up, acceptance, the load at which speculation gets slower, advice.

A depth is recommended only if it was measured and the lower end of its interval is at least 1. An unmeasured depth can
be suggested for a trial under the same condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.bench.figures import Spread, over
from forerun.remote.counters import ServedAcceptance, acceptance_of
from forerun.remote.depths import DepthRange, RoundEconomy, depth_ranges, likely_range
from forerun.remote.measure import PLAIN, SPECULATING, ServedBlock

WORTH_CHANGING = 1.03  # minimum improvement for which another depth is recommended
FARTHEST = 4  # maximum extrapolation, as a multiple of the highest load


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """One contender at one load: tokens per second of all clients together, and seconds between tokens of one."""

    tokens_per_s: Spread | None
    token_s: Spread | None
    acceptance: ServedAcceptance | None
    num_failed: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedCell:
    """The figures of one load. `plain` and `speed_up` are None without a plain server.

    `speed_up`: that of the server's setting; `likely`: its 90 % confidence interval; `cost`: duration of a round in
    plain rounds; `by_depth`: depths with a known interval. `num_differing` of `num_compared` answers differ from those
    without speculation.
    """

    clients: int
    num_repetitions: int
    speculating: ServedFigures
    plain: ServedFigures | None
    speed_up: Spread | None
    likely: tuple[float, float] | None
    cost: Spread | None
    by_depth: tuple[DepthRange, ...]
    num_differing: int
    num_compared: int

    @property
    def served_depth(self) -> int | None:
        """The draft length of the server's setting; None if unknown."""
        return None if self.speculating.acceptance is None else self.speculating.acceptance.full_depth


def cell_of(clients: int, blocks: Sequence[ServedBlock]) -> ServedCell:
    """The figures of one load from its blocks."""
    plain = {block.block.turn.repetition: block for block in blocks if block.contender == PLAIN}
    drafted = [block for block in blocks if block.contender != PLAIN]
    pairs = [(block, plain[r]) for block in drafted if (r := block.block.turn.repetition) in plain]
    ratios = [ratio for block, other in pairs if block.served and (ratio := over(other.token_s, block.token_s))]
    served = [each for pair in pairs if pair[0].served and (each := economy(*pair))]
    same = [same for pair in pairs for same in same_answers(*pair)]
    return ServedCell(
        clients,
        len({block.block.turn.repetition for block in blocks}),
        figures_of([block for block in blocks if block.contender == SPECULATING]),
        figures_of(list(plain.values())) if plain else None,
        Spread.of(ratios),
        likely_range(ratios, ratios) if ratios else None,
        Spread.of(each.cost for each in served),
        depth_ranges(by_repetition(pairs)),
        same.count(False),
        len(same),
    )


def economy(block: ServedBlock, plain: ServedBlock) -> RoundEconomy | None:
    """The speed-up and acceptance of a block; None if unknown."""
    seen, ratio = acceptance_of(block.counts, block.num_tokens), over(plain.token_s, block.token_s)
    depth = block.requested_depth or (seen.full_depth if seen else None)
    return RoundEconomy(depth, ratio, seen) if seen and ratio and depth else None


def by_repetition(pairs: Sequence[tuple[ServedBlock, ServedBlock]]) -> list[list[RoundEconomy]]:
    """The economies of each repetition: those of requested depths if there are any, else of the server's setting."""
    any_requested = any(block.requested_depth for block, _ in pairs)
    economies: dict[int, list[RoundEconomy]] = {}
    for block, plain in pairs:
        if (each := economy(block, plain)) and bool(block.requested_depth) == any_requested:
            economies.setdefault(block.block.turn.repetition, []).append(each)
    return list(economies.values())


def same_answers(block: ServedBlock, other: ServedBlock) -> list[bool]:
    """For each request that both answered, whether the texts are equal."""
    texts = {answer.index: answer.digest for answer in other.block.complete}
    return [texts[answer.index] == answer.digest for answer in block.block.complete if answer.index in texts]


def figures_of(blocks: Sequence[ServedBlock]) -> ServedFigures:
    """The figures of one contender at one load, over its repetitions."""
    answers = [answer for block in blocks for answer in block.block.answers]
    counts = [acceptance_of(block.counts, block.num_tokens) for block in blocks]
    known = [each for each in counts if each is not None]
    middle = sorted(known, key=lambda each: each.tokens_per_round)[len(known) // 2] if known else None
    return ServedFigures(
        Spread.of(block.block.tokens_per_s for block in blocks),
        Spread.of(block.token_s for block in blocks),
        middle,
        sum(bool(answer.error) for answer in answers),
        tuple(dict.fromkeys(answer.error for answer in answers if answer.error)),
    )


def slower_from(cells: Sequence[ServedCell]) -> ServedCell | None:
    """The lowest load at and above which speculation was slower than plain decoding; None if there is none."""
    smallest = None
    for cell in sorted(cells, key=lambda cell: cell.clients, reverse=True):
        if cell.speed_up is None or cell.speed_up.median >= 1:
            break
        smallest = cell
    return smallest


def predicted_slower_from(cells: Sequence[ServedCell]) -> float | None:
    """The load at which the linearly extrapolated cost of a round equals its tokens; None if it is too high.

    None also unless speculation was faster at all measured loads.
    """
    known = [(cell.clients, cell.cost.median, cell.speed_up) for cell in cells if cell.cost and cell.speed_up]
    if len(known) < 2 or not all(speed_up.median > 1 for *_, speed_up in known):
        return None
    slope, first = np.polyfit([clients for clients, *_ in known], [cost for _, cost, _ in known], 1)
    heaviest, cost, speed_up = max(known, key=lambda each: each[0])
    tokens_per_round = cost * speed_up.median
    if slope <= 0:
        return None
    crossing = float((tokens_per_round - first) / slope)
    return crossing if heaviest < crossing <= FARTHEST * heaviest else None


@dataclass(frozen=True, slots=True)
class DepthAdvice:
    """The recommended depth: None is the current setting, 0 plain decoding; `clear`: whether measurements support it.

    `trial`: an unmeasured depth that should be faster; `open_depth`: if there is no trial, one that may be faster.
    """

    depth: int | None
    clear: bool
    trial: DepthRange | None
    open_depth: DepthRange | None


def advice_of(cell: ServedCell) -> DepthAdvice | None:
    """The advice for a load; None without a comparison, or with a single repetition, which does not show the noise."""
    if cell.speed_up is None or cell.likely is None or cell.num_repetitions < 2:
        return None
    measured = [each for each in cell.by_depth if each.measured and each.depth]
    choices: list[tuple[int | None, float, float]] = [(None, cell.speed_up.median, cell.likely[0])]
    choices += [(each.depth, each.middle / WORTH_CHANGING, each.low) for each in measured]
    faster = [(speed_up, depth) for depth, speed_up, low in choices if low >= 1]
    best, depth = max(faster, key=lambda each: each[0], default=(1.0, 0))
    clear = bool(faster) or all(speed_up <= 1 for _, speed_up, _ in choices)
    others = [each for each in cell.by_depth if not each.measured]
    trials = [each for each in others if each.low >= 1 and each.middle >= WORTH_CHANGING * best]
    trial = max(trials, key=lambda each: each.middle, default=None)
    possible = [each for each in others if each.high >= WORTH_CHANGING * best and not trial]
    return DepthAdvice(depth, clear, trial, max(possible, key=lambda each: each.middle, default=None))

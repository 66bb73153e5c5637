"""What measured blocks say of other depths and loads: the economy of drafting, seen from outside.

A round with guesses takes v times as long as a plain one and gives G tokens, so drafting is G / v times as fast; G is
counted, the speed-up is measured, and v follows. That v rises with the depth along a line from 1 is an assumption, and
the only one: a server has one depth at a time. Where drafting at all has a cost, the line flatters depths below the one
that is served, and is too strict with those above. All is done within a repetition, so that figures have a spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.bench.figures import Spread, over
from forerun.economy import expected_tokens
from forerun.remote.counters import ServedAcceptance, acceptance_of
from forerun.remote.measure import PLAIN, SPECULATING, ServedBlock

DEEPEST = 16
FARTHEST = 4  # times the heaviest load, beyond which the line through costs is not drawn


@dataclass(frozen=True, slots=True)
class RoundEconomy:
    """One repetition: the speed-up, what rounds gave, and what they cost beside plain ones."""

    speed_up: float
    acceptance: ServedAcceptance

    @property
    def cost(self) -> float:
        """How many plain rounds a round took."""
        return self.acceptance.tokens_per_round / self.speed_up

    def forecast(self, depth: int) -> float | None:
        """The speed-up that a depth is expected to have; None where acceptance by depth is not known.

        Beyond the deepest guess that was judged, acceptance is taken to be that of the last. Rounds that were measured
        to cost less than plain ones are not taken to cost less still where they are deeper.
        """
        seen = self.acceptance
        rates = seen.at_depth
        if not rates or not seen.depth or seen.covered is None:
            return None
        rates = [*rates, *[rates[-1]] * DEEPEST]
        tokens = 1 + seen.covered * (expected_tokens(rates, depth) - 1)
        share = depth / seen.depth if self.cost > 1 else min(1.0, depth / seen.depth)
        return tokens / (1 + (self.cost - 1) * share)


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """One contender at one load: tokens a second of all clients together, and seconds between tokens of one."""

    tokens_per_s: Spread | None
    token_s: Spread | None
    acceptance: ServedAcceptance | None
    num_failed: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedCell:
    """One load. `plain` and `speed_up` are None where there is nothing to compare with.

    The speed-up is that of decoding; `cost` is how many plain rounds a round takes; `by_depth[k]` what k guesses a
    round would bring. `num_differing` answers of `num_compared` were not those without speculation.
    """

    clients: int
    speculating: ServedFigures
    plain: ServedFigures | None
    speed_up: Spread | None
    cost: Spread | None
    by_depth: tuple[Spread, ...]
    num_differing: int
    num_compared: int

    @property
    def best_depth(self) -> int | None:
        """The depth that is expected to be fastest; None where no depth can be told from another."""
        if not self.by_depth:
            return None
        return max(range(len(self.by_depth)), key=lambda depth: self.by_depth[depth].median)


def range_at(cell: ServedCell, depth: int) -> tuple[float, float]:
    """Between which speed-ups a depth of at least 1 may lie.

    All that a round costs more than a plain one falls to its guesses, along the line, or to drafting at all.
    """
    assert cell.cost is not None, "depths are forecast where the cost of rounds is known"
    seen, cost = cell.speculating.acceptance, max(1.0, cell.cost.median)
    along = 1 + (cost - 1) * depth / seen.depth if seen and seen.depth else cost
    bounds = cell.by_depth[depth].median, cell.by_depth[depth].median * along / cost
    return min(bounds), max(bounds)


def cell_of(clients: int, blocks: Sequence[ServedBlock]) -> ServedCell:
    """What the blocks of one load say."""
    speculating, plain = ([b for b in blocks if b.contender == name] for name in (SPECULATING, PLAIN))
    by_repetition = {block.block.turn.repetition: block for block in plain}
    pairs = [(block, by_repetition[r]) for block in speculating if (r := block.block.turn.repetition) in by_repetition]
    ratios = [over(other.token_s, block.token_s) for block, other in pairs]
    rounds = [
        RoundEconomy(ratio, acceptance)
        for (block, _), ratio in zip(pairs, ratios, strict=True)
        if ratio and (acceptance := acceptance_of(block.counts, block.num_tokens))
    ]
    same = [same for pair in pairs for same in same_answers(*pair)]
    return ServedCell(
        clients,
        figures_of(speculating),
        figures_of(plain) if plain else None,
        Spread.of(ratios),
        Spread.of(each.cost for each in rounds),
        by_depth(rounds),
        same.count(False),
        len(same),
    )


def by_depth(rounds: Sequence[RoundEconomy]) -> tuple[Spread, ...]:
    """Expected speed-ups at every depth that is not more than twice the one that was served."""
    depths = [each.acceptance.depth for each in rounds if each.acceptance.depth]
    if not depths:
        return ()
    deepest = min(DEEPEST, max(round(2 * max(depths)), 2))
    spreads = [Spread.of(each.forecast(depth) for each in rounds) for depth in range(deepest + 1)]
    return tuple(spread for spread in spreads if spread is not None)


def same_answers(block: ServedBlock, other: ServedBlock) -> list[bool]:
    """For each request that both answered, whether the texts are the same."""
    texts = {answer.index: answer.digest for answer in other.block.complete}
    return [texts[answer.index] == answer.digest for answer in block.block.complete if answer.index in texts]


def figures_of(blocks: Sequence[ServedBlock]) -> ServedFigures:
    """One contender at one load, over its repetitions."""
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


def hurts_from(cells: Sequence[ServedCell]) -> ServedCell | None:
    """The smallest load from which on speculation was slower than none, at every load; None where it never was."""
    smallest = None
    for cell in sorted(cells, key=lambda cell: cell.clients, reverse=True):
        if cell.speed_up is None or cell.speed_up.median >= 1:
            break
        smallest = cell
    return smallest


def expected_to_hurt_from(cells: Sequence[ServedCell]) -> float | None:
    """Where the line through the costs of rounds, by load, crosses what they give; None where that is too far to say.

    Loads that were measured come from there: it is only asked where speculation helped at all of them.
    """
    known = [(cell.clients, cell.cost.median, cell.speed_up) for cell in cells if cell.cost and cell.speed_up]
    if len(known) < 2 or not all(speed_up.median > 1 for *_, speed_up in known):
        return None
    slope, first = np.polyfit([clients for clients, *_ in known], [cost for _, cost, _ in known], 1)
    heaviest, cost, speed_up = max(known, key=lambda each: each[0])
    gives = cost * speed_up.median
    if slope <= 0:
        return None
    crossing = float((gives - first) / slope)
    return crossing if heaviest < crossing <= FARTHEST * heaviest else None

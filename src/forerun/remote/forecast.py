"""What measured blocks say of each load: speed-ups, acceptance, and from where on speculation hurts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.bench.figures import Spread, over
from forerun.remote.counters import ServedAcceptance, acceptance_of
from forerun.remote.depths import DepthRange, RoundEconomy, depth_ranges, likely_range
from forerun.remote.measure import PLAIN, SPECULATING, ServedBlock

FARTHEST = 4  # times the heaviest load, beyond which the line through costs is not drawn


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

    The speed-up is that of decoding, as it is served, and `likely` the range that holds it nine times in ten; `cost`
    is how many plain rounds a round takes; `by_depth` has the depths of which something is known. `num_differing`
    answers of `num_compared` were not those without speculation.
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
        """The guesses of a draft as it was served; None where the server does not tell."""
        return None if self.speculating.acceptance is None else self.speculating.acceptance.whole_depth


def cell_of(clients: int, blocks: Sequence[ServedBlock]) -> ServedCell:
    """What the blocks of one load say."""
    plain = {block.block.turn.repetition: block for block in blocks if block.contender == PLAIN}
    drafting = [block for block in blocks if block.contender != PLAIN]
    pairs = [(block, plain[r]) for block in drafting if (r := block.block.turn.repetition) in plain]
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
    """What the rounds of a block gave and cost; None where the server does not tell, or nothing came."""
    seen, ratio = acceptance_of(block.counts, block.num_tokens), over(plain.token_s, block.token_s)
    depth = block.asked_depth or (seen.whole_depth if seen else None)
    return RoundEconomy(depth, ratio, seen) if seen and ratio and depth else None


def by_repetition(pairs: Sequence[tuple[ServedBlock, ServedBlock]]) -> list[list[RoundEconomy]]:
    """Each repetition's rounds: those of depths that were asked for, or else of the one that is served."""
    asked = any(block.asked_depth for block, _ in pairs)
    economies: dict[int, list[RoundEconomy]] = {}
    for block, plain in pairs:
        if (each := economy(block, plain)) and bool(block.asked_depth) == asked:
            economies.setdefault(block.block.turn.repetition, []).append(each)
    return list(economies.values())


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

"""Choices for a round: which way each row is drafted and how far, and what such a round gives and takes.

`measured.py` weighs the choices and takes one; `arms.py` knows the ways that a row has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.draft.base import NO_DRAFT, Budget
from forerun.economy import NO_TIME_S, PassCost
from forerun.engine.arms import Arms, Way

MANY = 5  # members, above which sets of some of them are not looked at

Ways = Mapping[int, Way]
Choice = Sequence[tuple[Way, int] | None]  # a way and its depth, for every row


@dataclass(slots=True)
class Drafts:
    """The drafts of a round that is being planned: how deep each row is, what they give and what they take."""

    arms: Arms
    depths: list[int]
    num_tokens: int  # in the target's pass
    gain: float
    deepest: dict[int, int] = field(default_factory=dict)  # by member
    num_rows: dict[int, int] = field(default_factory=dict)
    num_unread: dict[int, int] = field(default_factory=dict)

    def deepen(self, row: int, way: Way, depth: int, gain: float) -> None:
        """Draft a row so far, which adds so many accepted guesses."""
        before, self.depths[row] = self.depths[row], depth
        self.num_tokens += way.nodes(depth) - way.nodes(before)
        self.gain += gain
        for member in way.members:
            self.deepest[member] = max(depth, self.deepest.get(member, 0))
            if before == 0:
                self.num_rows[member] = self.num_rows.get(member, 0) + 1
                self.num_unread[member] = self.num_unread.get(member, 0) + way.num_unread.get(member, 0)

    def tokens_per_s(self, passes: PassCost) -> float:
        """Tokens that the round gives, over the time that it takes."""
        taken_s = passes.expect(self.num_tokens)
        for member, depth in self.deepest.items():
            taken_s += self.arms.arms[member].cost_s(depth, self.num_rows[member], self.num_unread[member])
        return self.gain / max(NO_TIME_S, taken_s)


def sets(members: Sequence[int]) -> Iterator[frozenset[int]]:
    """The sets of members that are looked at, small ones first, none at all before them."""
    sizes = range(len(members) + 1) if len(members) <= MANY else (0, 1, len(members))
    return (frozenset(chosen) for size in sizes for chosen in itertools.combinations(members, size))


def tokens_of(choice: Choice) -> float:
    """What a round of this choice gives."""
    return float(len(choice)) + sum(sum(each[0].survival[: each[1]]) for each in choice if each is not None)


def best_of(own: Ways, among: frozenset[int] | range, merging: bool) -> Way | None:
    """The way with the most gain among those that these members can draft, the first of several; None if none.

    A row that must be drafted has a way in every set.
    """
    possible = [way for way in own.values() if merging or len(way.members) == 1]
    inside = [way for way in possible if way.members <= frozenset(among)]
    forced = [way for way in possible or own.values() if not way.free]
    return max(inside or forced, key=lambda way: way.gain, default=None)


def fallbacks(taken: tuple[Way, int] | None, own: Ways) -> list[Budget]:
    """The budget that was chosen; behind a merged one, which takes the most room, that of its best member."""
    if taken is None:
        return [NO_DRAFT]
    way, depth = taken
    single = best_of(own, way.members, merging=False) if len(way.members) > 1 else None
    return [way.to(depth)] + ([single.to(min(depth, single.budget.depth))] if single else [])

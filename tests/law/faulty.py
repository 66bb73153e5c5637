"""Real drafters with faults: a round's draft is a member's, that of a rule-breaking drafter, or a member's corrupted.

The members observe all tokens and draft as usual, so their state must stay right although the engine verifies drafts
that they did not make.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook, adoptable
from forerun.sampling.draws import Draws
from law.hostile import HOSTILE, Situation, drafted


@dataclass(slots=True)
class Faulty:
    """A third of the drafts are faults: those of rule-breaking drafters, or a member's with wrong tokens.

    `answers` is for the oracles among the rule-breakers. Names and outlook are those of the first member.
    """

    members: Sequence[Drafter]
    rng: random.Random
    answers: Callable[[], Sequence[Sequence[int]]]
    weights: Sequence[int] | None = None  # how often each member is asked

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(tap for member in self.members for tap in member.taps))

    @property
    def names(self) -> tuple[str, ...]:
        return self.members[0].names

    def observe(self, committed: Committed) -> None:
        for member in self.members:
            columns = [self.taps.index(tap) for tap in member.taps]
            features = None if committed.features is None else committed.features[:, columns]
            member.observe(replace(committed, features=features))

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return min(adoptable(member, text, most, salt) for member in self.members)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        fault = self.rng.random()
        if fault < 1 / 6:
            now = Situation(draws, budgets, self.answers(), self.rng)
            return drafted(self.rng.choice(list(HOSTILE.values())), now)
        (member,) = self.rng.choices(self.members, self.weights)
        draft = member.propose(draws, budgets, tail)
        if fault < 1 / 3:
            tokens = torch.where(draft.tree.valid & (draft.tree.parents >= 0), draft.tree.tokens ^ 1, draft.tree.tokens)
            return replace(draft, tree=replace(draft.tree, tokens=tokens), resume=None)
        return draft

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return self.members[0].outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        for member in self.members:
            member.forget(seq_ids)

"""A real drafter with faults: now and then its drafts are another's, spoilt, or missing.

What it is told, and its own work, go on undisturbed, so that its state has to bear drafts that it did not make.
"""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from hostile import HOSTILE, Situation, drafted

from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook, adoptable
from forerun.sampling.draws import Draws


@dataclass(slots=True)
class Faulty:
    """Every third draft is a fault: one of those that break every rule, or its own with wrong tokens.

    `answers` are what the oracles among those rule-breakers know.
    """

    drafter: Drafter
    rng: random.Random
    answers: Sequence[Sequence[int]]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def names(self) -> tuple[str, ...]:
        return self.drafter.names

    def observe(self, news: Committed) -> None:
        self.drafter.observe(news)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return adoptable(self.drafter, text, most, salt)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        fault = self.rng.random()
        if fault < 1 / 6:
            return drafted(self.rng.choice(list(HOSTILE.values())), Situation(draws, budgets, self.answers, self.rng))
        draft = self.drafter.propose(draws, budgets, tail)
        if fault < 1 / 3:
            tokens = torch.where(draft.tree.valid & (draft.tree.parents >= 0), draft.tree.tokens ^ 1, draft.tree.tokens)
            return replace(draft, tree=replace(draft.tree, tokens=tokens), resume=None)
        return draft

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return self.drafter.outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.drafter.forget(seq_ids)

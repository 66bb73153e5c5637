"""Drafters for `--draft python:`, that are wrong on purpose."""

import random
from collections.abc import Sequence

import torch
from typing_extensions import override

from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree


class Wrong:
    """Drafts what the target is least likely to say: tokens backwards from the end of the vocabulary."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("wrong",)

    def observe(self, committed: Committed) -> None: ...

    def forget(self, seq_ids: Sequence[int]) -> None: ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook(unread=[0] * len(seq_ids), limit=[9] * len(seq_ids))

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        last = draws.vocab - 1
        chains = [
            [row.tokens[-1], *range(last, last - min(budget.depth, budget.nodes), -1)]
            for row, budget in zip(draws.rows, budgets, strict=True)
        ]
        return Draft(DraftTree.of_texts(chains))


class Random(Wrong):
    """Drafts trees of any form with any tokens, far outside the vocabulary and the budget too, and their parents."""

    names = ("random",)

    def __init__(self) -> None:
        self.rng = random.Random(7)

    @override
    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        size, rng = self.rng.randrange(1, 9), self.rng
        kinds = (lambda: rng.randrange(draws.vocab), lambda: rng.randrange(-9, 2**31))
        tokens = [[row.tokens[-1], *(rng.choice(kinds)() for _ in range(size))] for row in draws.rows]
        parents = [[-1, *(rng.choice([i, rng.randrange(-2, size + 2)]) for i in range(size))] for _ in draws.rows]
        return Draft(DraftTree(torch.tensor(tokens), torch.tensor(parents), depth=size, width=size))

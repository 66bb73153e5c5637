"""The pilot: what a drafter guesses at every place of every text, recorded without judging any of it.

The engine decodes plainly, a token a round, and in each round the drafter guesses as deep as is of interest. What it
guessed is kept, and compared with the text when that is known. So the guesses are known behind every token, and not
only where the rounds of some depth happen to begin; `predict.py` plays any depth from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from forerun.tune.predict import Guessed

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

"""A drafter for `--draft python:again.py:Again`."""

from forerun.draft.base import Draft, Outlook
from forerun.tree import DraftTree


class Again:
    """Drafts what followed the last token where it stood before."""

    taps, names = (), ("again",)

    def __init__(self):
        self.seen = set()  # ids of sequences that were observed; others get no draft

    def observe(self, committed):
        self.seen.update(committed.seq_ids)

    def forget(self, seq_ids):
        self.seen.difference_update(seq_ids)

    def outlook(self, seq_ids):
        return Outlook(unread=[0] * len(seq_ids), limit=[8 if seq_id in self.seen else 0 for seq_id in seq_ids])

    def propose(self, draws, budgets, tail=None):
        return Draft(DraftTree.of_texts(list(map(self.chain, draws.rows, budgets))))

    def chain(self, row, budget):
        *before, root = row.tokens
        known = row.seq_id in self.seen and root in before
        after = before[len(before) - before[::-1].index(root) :] if known else []
        return [root, *after[: budget.depth]]

"""ModelDrafter: a draft model with its own KV cache.

A draft model reads tokens, of the target's vocabulary or of its own. Its text may be revised if a tokenizer changes
earlier tokens, and it can judge another drafter's chains. `Follower` does the rest, and `draft/vocab/translate.py`
plans it (`plan_model`).
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft.base import Budget, JudgeLogits, Question
from forerun.draft.model.drafted_text import DraftedText, DraftRow, Revision
from forerun.draft.model.follower import TAIL_TOKENS, Follower
from forerun.draft.vocab.vocabulary import SharedTokens
from forerun.models.chains import SameIds
from forerun.models.runner import Runner


class ModelDrafter(Follower):
    """Drafts with a model of the target's tokenizer, or of one that shares tokens with it.

    `vocab_size` is the width of the target's logits: the drafter's are cut, or padded with -inf, to it. With `shared`
    the text comes in the drafter's tokens, by `revise`, and only shared tokens are drafted.
    """

    names: tuple[str, ...] = ("model",)

    def __init__(self, runner: Runner, vocab_size: int, shared: SharedTokens | None = None) -> None:
        super().__init__(runner, shared or SameIds(vocab_size, runner.vocab_size))
        self.vocab_size = vocab_size
        self.shared = shared

    def revise(self, revisions: Sequence[Revision]) -> None:
        """Replace texts from some token on; the unchanged part stays in the cache."""
        for revision in revisions:
            drafted = self.sequences.setdefault(revision.seq_id, DraftedText())
            kept = drafted.rewrite(revision.first, revision.tokens)
            if kept < self.runner.length(revision.seq_id):
                self.runner.truncate(revision.seq_id, kept)
                drafted.clear()
        self.confirm([revision.seq_id for revision in revisions])

    def judge(self, questions: Sequence[Question]) -> JudgeLogits:
        """The logits after the roots and guesses; tokens read for earlier questions are not read again."""
        self.pass_s = 0.0
        rooms = [self.room(self.sequences[q.seq_id], q.late) for q in questions]
        asked = {q.seq_id: i for i, (q, room) in enumerate(zip(questions, rooms, strict=True)) if room > len(q.guesses)}
        # An id beyond its vocabulary is one that it never says: what is read in its place is of no consequence.
        rows = [
            DraftRow(q.seq_id, q.late, Budget(depth=1), [g if g < self.ids.num_model_ids else 0 for g in q.guesses])
            for q in (questions[i] for i in asked.values())
        ]
        self.cut_tails(rows)
        passed = self.read_roots(self.catch_up(rows, TAIL_TOKENS))
        return JudgeLogits([asked[row.seq_id] for row in passed.rows], passed.logits, self.pass_s)

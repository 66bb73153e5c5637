"""ModelDrafter: a draft model with its own KV cache.

A draft model reads tokens of the target's vocabulary or of its own. In the latter case earlier tokens of its text may
change while the text grows (`revise`). It can also judge another drafter's chains. `Follower` does the rest, and
`plan_model` in `draft/vocab/translate.py` plans it.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.draft.base import Budget, ChainToJudge, JudgeLogits
from forerun.draft.model.drafted_text import DraftedText, DraftRow, Revision
from forerun.draft.model.follower import TAIL_TOKENS, Follower
from forerun.draft.vocab.vocabulary import SharedTokens
from forerun.models.chains import SameIds
from forerun.models.runner import Runner


class ModelDrafter(Follower):
    """Drafts with a model of the target's tokenizer, or of one that shares tokens with it.

    `vocab_size` is the width of the target's logits, to which the drafter's logits are cut or padded with -inf. With
    `shared` the text comes in the drafter's tokens, through `revise`, and only shared tokens are drafted.
    """

    names: tuple[str, ...] = ("model",)

    def __init__(self, runner: Runner, vocab_size: int, shared: SharedTokens | None = None) -> None:
        super().__init__(runner, shared or SameIds(vocab_size, runner.vocab_size))
        self.vocab_size = vocab_size
        self.shared = shared

    def revise(self, revisions: Sequence[Revision]) -> None:
        """Replace the ends of texts; the unchanged part stays in the cache."""
        for revision in revisions:
            drafted = self.sequences.setdefault(revision.seq_id, DraftedText())
            kept = drafted.rewrite(revision.first, revision.tokens)
            if kept < self.runner.length(revision.seq_id):
                self.runner.truncate(revision.seq_id, kept)
                drafted.clear()
        self.confirm([revision.seq_id for revision in revisions])

    def judge(self, chains: Sequence[ChainToJudge]) -> JudgeLogits:
        """The logits along these chains; tokens of an earlier call are not read again."""
        self.pass_s = 0.0
        rows, indices = [], {}
        for i, chain in enumerate(chains):
            if self.max_depth(self.sequences[chain.seq_id], chain.after_text) > len(chain.draft_tokens):
                # An id beyond its vocabulary has probability 0, so the logits after it never matter.
                tokens = [token if token < self.ids.num_model_ids else 0 for token in chain.draft_tokens]
                rows.append(DraftRow(chain.seq_id, chain.after_text, Budget(depth=1), tokens))
                indices[chain.seq_id] = i
        self.cut_tails(rows)
        passed = self.read_roots(self.catch_up(rows, TAIL_TOKENS))
        return JudgeLogits([indices[row.seq_id] for row in passed.rows], passed.logits, self.pass_s)

"""FedFollower: a Follower that reads the target's hidden states, which come only once.

States of text that was not read yet are kept with it (`unread_states.py`), so an idle drafter runs no pass; they are
read if they take too much memory. A text without its states is not drafted any more. Subclasses decide how their model
uses the states (`run`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch

from forerun.draft.base import NO_DRAFT, Committed
from forerun.draft.model.drafted_text import DraftRow, starts_of
from forerun.draft.model.follower import CHUNK_TOKENS, TAIL_TOKENS, Follower
from forerun.draft.model.unread_states import ShownText
from forerun.models.chains import Chains, ChainStart, ParallelHeads, UnreadTexts
from forerun.models.runner import Read
from forerun.sampling.draws import Draws


class FedFollower(Follower):
    """A Follower that reads the target's states at `taps`; without taps it reads tokens alone.

    `draws_after_text`: a call of the runner can read text and generate chains after it.
    """

    rereads: ClassVar[bool] = False
    draws_after_text: bool = False
    drawn: Sequence[ChainStart] = ()  # the chains that the last draft drew behind text, guess by guess
    least_text: ClassVar[int] = 1  # tokens of each row that a call has to read before it draws behind them

    def observe(self, news: Committed) -> None:
        """Record the final tokens and their states; draft tokens that they confirm stay in the cache.

        Raises WrongTarget for text without the required states. No pass runs as long as the unread states take at most
        UNREAD_BYTES.
        """
        super().observe(news)
        if self.taps and news.adopted:
            self.take_over(news.seq_ids)
        elif self.taps:
            self.wait(news)

    def take_over(self, seq_ids: Sequence[int]) -> None:
        """Start texts that come without states; a text that it does not hold completely is lost."""
        for seq_id in seq_ids:
            self.begin(seq_id)
            if self.num_unread(seq_id) and not self.states.share(seq_id, self.unread_text(seq_id)):
                self.lose(seq_id)

    def wait(self, news: Committed) -> None:
        """Keep the states of these texts until they are read; if they take too much memory, read the largest text."""
        several = len(news.seq_ids) > 1
        copied = several and len(news.tokens) > TAIL_TOKENS * len(news.seq_ids)  # a part would hold prompts too
        for seq_id, (start, end) in zip(news.seq_ids, pairwise(news.offsets), strict=True):
            drafted = self.sequences[seq_id]
            if len(drafted.text) > self.window:
                self.lose(seq_id)
            count = min(end - start, self.num_unread(seq_id))  # guesses that came true are read
            if count:
                states = news.shown(self.names[0])[end - count : end]
                states = states.clone() if copied else states
                self.states.add(seq_id, self.unread_text(seq_id), [states], in_round=several and not copied)
        while not self.states.fits():
            fullest = self.states.fullest()
            self.read_text([DraftRow(fullest, (), NO_DRAFT)], [fullest])

    @torch.inference_mode()
    def draw_after_text(self, draws: Draws, rows: Sequence[DraftRow]) -> Chains | None:
        """Used if each row has little unread text, as after a round, since its states are known.

        On a device longer text is read first except for its last token, so that a new row does not delay the others.
        """
        self.drawn = []
        if not self.draws_after_text or draws.rejection or any(row.guesses or row.budget.width > 1 for row in rows):
            return None
        if self.runner.draws_unseen:
            rows = self.catch_up([*rows], TAIL_TOKENS, spared=1)
            for row in rows:
                self.begin(row.seq_id, -1)
        texts = [self.unread(row.seq_id) for row in rows]
        if not texts or not all(self.least_text <= len(text) <= TAIL_TOKENS for text in texts):
            return None
        if any(row.late != self.late(row.seq_id) for row in rows):
            return None
        if not self.runner.draws_unseen and any(row.seq_id not in self.runner.cache for row in rows):
            return None
        starts = starts_of(draws, {row.seq_id: row.budget for row in rows})
        started_s, reads = time.perf_counter(), [Read(row.seq_id, text) for row, text in zip(rows, texts, strict=True)]
        read, heads = self.unread_texts(reads), self.parallel_heads(rows)
        chains = self.runner.draw_chains(draws, starts, None, self.ids, False, None, read, heads)
        self.pass_s += time.perf_counter() - started_s
        if chains is not None:
            self.drawn = starts if heads is None else []
            self.keep_ends(reads, read)
            for read_text in reads:
                self.states.drop(read_text.seq_id, len(read_text.tokens))
        return chains

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """These reads of text as UnreadTexts; called only if `draws_after_text`."""
        raise AssertionError(f"{type(self).__name__} does not draw behind text")

    def parallel_heads(self, rows: Sequence[DraftRow]) -> ParallelHeads | None:
        """The heads that generate these rows' chains without a pass in between; None if there are none."""
        return None

    def keep_ends(self, reads: Sequence[Read], texts: UnreadTexts) -> None:
        """Keep the model's outputs at the ends of the texts that such a call has read."""

    def unread_text(self, seq_id: int) -> ShownText:
        """A sequence's text, from where its unread states start."""
        drafted = self.sequences[seq_id]
        return ShownText(drafted.salt, drafted.text, self.runner.length(seq_id))

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in [waiting for waiting in seq_ids if waiting in self.states.waiting]:
            self.leave_states(seq_id)
        if any(start.seq_id in seq_ids for start in self.drawn):
            self.drawn = []
        super().forget(seq_ids)

    def leave_states(self, seq_id: int) -> None:
        """Keep the prefix of an ending text for other texts; read enough to complete a block that was started."""
        drafted, size = self.sequences[seq_id], self.runner.cache.blocks.block_size
        length, num_whole = self.runner.length(seq_id), len(drafted.text) // size * size
        if drafted.salt is None or length >= num_whole:
            return
        if length % size == 0:
            self.states.end(seq_id)
        elif len(drafted.text) - length <= CHUNK_TOKENS:
            self.read_text([DraftRow(seq_id, (), NO_DRAFT)], [seq_id])

"""FedFollower: a follower that reads the target's states, which are shown once.

This module decides what becomes of states that nobody has read: they wait with their text (`unread_states.py`), so a
drafter that rests makes no pass, and they are read where they take too much memory. A text whose states are gone is not
drafted any more. What a drafter makes of states is for its `run` to say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch

from forerun.draft.base import NO_DRAFT, Committed
from forerun.draft.model.drafted_text import DraftRow
from forerun.draft.model.follower import CHUNK_TOKENS, TAIL_TOKENS, Follower
from forerun.draft.model.unread_states import ShownText
from forerun.models.chains import Chains, HeadsAhead, Start, UnreadTexts
from forerun.models.runner import Read
from forerun.sampling.draws import Draws


class FedFollower(Follower):
    """A follower whose `taps` are the states that it reads; without any it reads tokens alone.

    `draws_behind_text`: a call of the runner can read text and draw behind it.
    """

    rereads: ClassVar[bool] = False
    draws_behind_text: bool = False
    drawn: Sequence[Start] = ()  # the chains that the last draft drew behind text, guess by guess
    least_text: ClassVar[int] = 1  # tokens of each row that a call has to read before it draws behind them

    def observe(self, news: Committed) -> None:
        """Remember what became final, and its states; guesses that it confirms stay read.

        Raises WrongTarget for text without the states that are to be read. No pass is made as long as the states that
        wait do not take more than UNREAD_BYTES.
        """
        super().observe(news)
        if self.taps and news.adopted:
            self.take_over(news.seq_ids)
        elif self.taps:
            self.wait(news)

    def take_over(self, seq_ids: Sequence[int]) -> None:
        """Begin texts that come without states; one that it does not hold as a whole, read or not, is lost."""
        for seq_id in seq_ids:
            self.begin(seq_id)
            if self.num_unread(seq_id) and not self.states.share(seq_id, self.unread_text(seq_id)):
                self.lose(seq_id)

    def wait(self, news: Committed) -> None:
        """Keep the states of these texts until they are read; where they take too much, read the text with most."""
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
    def draw_behind_text(self, draws: Draws, rows: Sequence[DraftRow]) -> Chains | None:
        """Where little text of each row is not read, as behind a round: the states beside it are there.

        On a device more is read first but for its last token, so that a new row does not hold up the others.
        """
        self.drawn = []
        if not self.draws_behind_text or draws.rejection or any(row.guesses or row.budget.width > 1 for row in rows):
            return None
        if self.runner.draws_unseen:
            rows = self.catch_up([*rows], TAIL_TOKENS, spared=1)
            for row in rows:
                self.begin(row.seq_id, -1)
        texts = [self.unread(row.seq_id) for row in rows]
        numbers = {seq_id: i for i, seq_id in enumerate(draws.seq_ids)}
        if not texts or not all(self.least_text <= len(text) <= TAIL_TOKENS for text in texts):
            return None
        if any(row.late != self.late(row.seq_id) for row in rows):
            return None
        if not self.runner.draws_unseen and any(row.seq_id not in self.runner.cache for row in rows):
            return None
        starts = [
            Start(numbers[row.seq_id], row.seq_id, min(row.budget.depth, row.budget.nodes), row.budget.min_survival)
            for row in rows
        ]
        started_s, reads = time.perf_counter(), [Read(row.seq_id, text) for row, text in zip(rows, texts, strict=True)]
        read, heads = self.unread_texts(reads), self.heads_ahead(rows)
        chains = self.runner.draw_chains(draws, starts, None, self.ids, False, None, read, heads)
        self.pass_s += time.perf_counter() - started_s
        if chains is not None:
            self.drawn = starts if heads is None else []
            self.keep_ends(reads, read)
            for read_text in reads:
                self.states.drop(read_text.seq_id, len(read_text.tokens))
        return chains

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """These reads of text, as such a call reads them; asked only of what draws behind text."""
        raise AssertionError(f"{type(self).__name__} does not draw behind text")

    def heads_ahead(self, rows: Sequence[DraftRow]) -> HeadsAhead | None:
        """What makes the guesses of these rows without a pass between them; None where they are read one by one."""
        return None

    def keep_ends(self, reads: Sequence[Read], texts: UnreadTexts) -> None:
        """Keep what such a call made of texts."""

    def unread_text(self, seq_id: int) -> ShownText:
        """A sequence's text, whose states begin where it is not read."""
        drafted = self.sequences[seq_id]
        return ShownText(drafted.salt, drafted.text, self.runner.length(seq_id))

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in [waiting for waiting in seq_ids if waiting in self.states.waiting]:
            self.leave_states(seq_id)
        super().forget(seq_ids)

    def leave_states(self, seq_id: int) -> None:
        """Leave the states of an ending text to texts that begin alike; read what completes a block that was begun."""
        drafted, size = self.sequences[seq_id], self.runner.cache.blocks.block_size
        length, num_whole = self.runner.length(seq_id), len(drafted.text) // size * size
        if drafted.salt is None or length >= num_whole:
            return
        if length % size == 0:
            self.states.end(seq_id)
        elif len(drafted.text) - length <= CHUNK_TOKENS:
            self.read_text([DraftRow(seq_id, (), NO_DRAFT)], [seq_id])

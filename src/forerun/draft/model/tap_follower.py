"""TapFollower: a Follower whose model reads the target's hidden states, which the engine reports only once.

The states of unread text are stored (`unread_states.py`) until the text is read, so an idle drafter runs no pass; text
is also read if its states take too much memory. A text whose states are missing is not drafted any more. Subclasses
define how their model uses the states (`run`).
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
from forerun.draft.model.unread_states import TextStates
from forerun.models.chains import Chains, ChainStart, ParallelHeads, UnreadTexts
from forerun.models.runner import Read
from forerun.sampling.draws import Draws


class TapFollower(Follower):
    """A Follower that reads the target's states at `taps`; without taps it reads tokens alone.

    `draws_after_text`: whether the runner has a call that reads text and then draws chains. Such a call needs at least
    `least_text` unread tokens of each row. `drawn` are the chains of the last draft if they were drawn in this way.
    """

    rereads: ClassVar[bool] = False
    draws_after_text: bool = False
    drawn: Sequence[ChainStart] = ()
    least_text: ClassVar[int] = 1

    def observe(self, committed: Committed) -> None:
        """Record the final tokens and their states; keys and values of accepted draft tokens stay in the cache.

        Raises WrongTarget for text without the required states. No pass runs as long as the unread states take at most
        UNREAD_BYTES.
        """
        super().observe(committed)
        if self.taps and committed.adopted:
            self.adopt(committed.seq_ids)
        elif self.taps:
            self.store_states(committed)

    def adopt(self, seq_ids: Sequence[int]) -> None:
        """Start texts that come without states, from the cache and the states of other texts.

        A text of which a part is missing is lost.
        """
        for seq_id in seq_ids:
            self.start_row(seq_id)
            if self.num_unread(seq_id) and not self.states.share(seq_id, self.unread_text(seq_id)):
                self.lose(seq_id)

    def store_states(self, committed: Committed) -> None:
        """Store the states of these tokens until the text is read; over the memory limit, read the longest texts."""
        several = len(committed.seq_ids) > 1
        # A view of a round's states keeps all of them in memory, so it is not used for rounds with long prompts.
        copied = several and len(committed.tokens) > TAIL_TOKENS * len(committed.seq_ids)
        for seq_id, (start, end) in zip(committed.seq_ids, pairwise(committed.offsets), strict=True):
            drafted = self.sequences[seq_id]
            if len(drafted.text) > self.window:
                self.lose(seq_id)
            count = min(end - start, self.num_unread(seq_id))  # accepted draft tokens may be read already
            if count:
                states = committed.required_features(self.names[0])[end - count : end]
                states = states.clone() if copied else states
                self.states.add(seq_id, self.unread_text(seq_id), [states], in_round=several and not copied)
        while not self.states.make_room():
            longest = self.states.longest()
            self.read_text([DraftRow(longest, (), NO_DRAFT)], [longest])

    @torch.inference_mode()
    def draw_after_text(self, draws: Draws, rows: Sequence[DraftRow]) -> Chains | None:
        """As in Follower; None unless each row has little unread text, as after a round.

        On a device longer text is prefilled before, except for its last token: its row then draws with the others.
        """
        self.drawn = []
        if not self.draws_after_text or draws.rejection or any(row.judged or row.budget.width > 1 for row in rows):
            return None
        if self.runner.draws_unseen:
            rows = self.catch_up([*rows], TAIL_TOKENS, spared=1)
            for row in rows:
                self.start_row(row.seq_id, -1)
        texts = [self.unread(row.seq_id) for row in rows]
        if not texts or not all(self.least_text <= len(text) <= TAIL_TOKENS for text in texts):
            return None
        if any(row.after_text != self.after_text(row.seq_id) for row in rows):
            return None
        if not self.runner.draws_unseen and any(row.seq_id not in self.runner.cache for row in rows):
            return None
        starts = starts_of(draws, {row.seq_id: row.budget for row in rows})
        started_s, reads = time.perf_counter(), [Read(row.seq_id, text) for row, text in zip(rows, texts, strict=True)]
        read, heads = self.unread_texts(reads), self.parallel_heads(rows)
        chains = self.runner.draw_chains(draws, starts, None, self.ids, texts=read, heads=heads)
        self.pass_s += time.perf_counter() - started_s
        if chains is not None:
            self.drawn = starts if heads is None else []
            self.keep_ends(reads, read)
            for read_text in reads:
                self.states.drop(read_text.seq_id, len(read_text.tokens))
        return chains

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """These tokens with their states, as the input of the runner's call; needed if `draws_after_text`."""
        raise AssertionError(f"{type(self).__name__} does not draw after text")

    def parallel_heads(self, rows: Sequence[DraftRow]) -> ParallelHeads | None:
        """The heads that predict all tokens of these rows' chains after one pass; None if the model has none."""
        return None

    def keep_ends(self, reads: Sequence[Read], texts: UnreadTexts) -> None:
        """Save the model's outputs at the ends of the texts that `draw_after_text` has read."""

    def unread_text(self, seq_id: int) -> TextStates:
        """A sequence's text, without states, from its first unread token on."""
        drafted = self.sequences[seq_id]
        return TextStates(drafted.salt, drafted.text, self.runner.length(seq_id))

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in [waiting for waiting in seq_ids if waiting in self.states.waiting]:
            self.keep_prefix(seq_id)
        if any(start.seq_id in seq_ids for start in self.drawn):
            self.drawn = []
        super().forget(seq_ids)

    def keep_prefix(self, seq_id: int) -> None:
        """Keep the unread states of a finished text for other texts with this prefix.

        If the last block of the cache is incomplete, the text is read instead, since only whole blocks are shared.
        """
        drafted, size = self.sequences[seq_id], self.runner.cache.blocks.block_size
        length, num_in_blocks = self.runner.length(seq_id), len(drafted.text) // size * size
        if drafted.salt is None or length >= num_in_blocks:
            return
        if length % size == 0:
            self.states.retire(seq_id)
        elif len(drafted.text) - length <= CHUNK_TOKENS:
            self.read_text([DraftRow(seq_id, (), NO_DRAFT)], [seq_id])

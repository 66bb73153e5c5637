"""Follower: the common part of all drafters that are models with a KV cache.

A follower keeps its model's cache in step with the target's sequences. Committed text is read lazily, when its sequence
is drafted the next time; draft tokens are read level by level. Keys and values of accepted draft tokens stay in the
cache, so a round usually reads the root and at most one token before it. A full cache makes drafts shallower and never
raises an error. A follower also chooses how drafts are generated: chains by one call of the runner or step by step, or
trees. Subclasses define the inputs of their models and the cache; the runner places tokens in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.blocks import OutOfBlocks
from forerun.cache.shared_prefix import CachedPrefix, CachedText, longest_prefix, num_shared, start_row
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass, number_tokens, starts_of
from forerun.draft.model.grower import LevelReader, grow, unseen_chains
from forerun.draft.model.unread_states import UnreadStates
from forerun.models.chains import Chains, ChainStart, IdMap, joined
from forerun.models.decoder import Outputs
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

NO_SEQUENCE = -1
CHUNK_TOKENS = 512  # most tokens of committed text in one pass
LEAST_WAITED = 64  # a new text waits for a prefix of at least this many tokens that another text is prefilling
TAIL_TOKENS = 8  # at most so many unread tokens are read in the pass of the root; longer text is prefilled before


class Follower:
    """Follows the target's sequences with a runner, and drafts with it.

    `rereads`: whether the runner's cache belongs to the drafter, so that a text can be read again after its keys and
    values were evicted. `TapFollower` is the variant that reads the target's states.
    """

    names: tuple[str, ...]
    taps: tuple[int, ...] = ()
    rereads: ClassVar[bool] = True

    def __init__(self, runner: Runner, ids: IdMap) -> None:
        self.runner = runner
        self.ids = ids
        self.sequences: dict[int, DraftedText] = {}
        self.states = UnreadStates()
        self.pass_s = 0.0  # time in passes since `propose` or `judge` was called

    def run(
        self,
        reads: Sequence[Read],
        drawn: DeviceTokens | None = None,
        features: Float[Tensor, "total taps hidden"] | None = None,
    ) -> Outputs:
        """One pass over these tokens. `features` are the target's states, for models that read final text with them.

        Raises OutOfBlocks, and changes nothing, if the cache is full.
        """
        return self.runner.read(reads, drawn=drawn)

    def states_at_roots(self, starts: Sequence[ChainStart]) -> Float[Tensor, "starts hidden"] | None:
        """The states that the model reads with the first draft tokens; None for a model that reads tokens alone."""
        return None

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """Complete the draft of the sequences in `granted`; a subclass may also change what stays in the cache."""
        return draft

    def observe(self, committed: Committed) -> None:
        """Record the final tokens; keys and values of accepted draft tokens stay in the cache."""
        for i, (seq_id, tokens, root) in enumerate(committed.rows()):
            if seq_id not in self.sequences:
                self.sequences[seq_id] = DraftedText(salt=committed.salts[i] if committed.salts else None)
            drafted = self.sequences[seq_id]
            assert not tokens or drafted.root in (None, tokens[0]), "the first committed token is not the last root"
            drafted.text.extend(tokens)
            drafted.root = root
            drafted.highest = max(drafted.highest, *tokens, root)
        self.confirm(committed.seq_ids)

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Commit the path of each tail that the text contains to the cache, and drop the rest of the tail."""
        with_tail, paths = [], []
        for seq_id in seq_ids:
            drafted = self.sequences[seq_id]
            drafted.number_pending()
            if drafted.tail:
                with_tail.append(seq_id)
                paths.append(drafted.path(self.unread(seq_id)))
                drafted.clear()
            elif seq_id in self.runner.tails:  # left by a `propose` that raised
                self.runner.drop([seq_id])
        if with_tail:
            self.runner.keep(with_tail, paths)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """The tokens whose keys and values or states are at hand; all of them if the text cannot be drafted anyway."""
        if most > self.window or not self.runner.cache.can_reserve([NO_SEQUENCE], [most]):
            return most
        return self.states.covered(text[:most], salt, self.beginning(text[:most], salt).num_tokens)

    def beginning(self, text: Sequence[int], salt: Hashable) -> CachedPrefix:
        """The cached prefix of a text."""
        others = (CachedText(seq_id, other.salt, other.text) for seq_id, other in self.sequences.items())
        return longest_prefix(self.runner.cache, text, salt, others)

    def start_row(self, seq_id: int, most: int | None = None) -> None:
        """Start the cache row of a new text with its cached prefix, at most the prefix of `text[:most]`."""
        drafted, cache = self.sequences[seq_id], self.runner.cache
        if seq_id not in cache:
            beginning = self.beginning(drafted.text[:most], drafted.salt)
            num_known = start_row(cache, CachedText(seq_id, drafted.salt, drafted.text), beginning)
            self.states.drop(seq_id, num_known)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the model's logits; the root alone if context or cache have no room."""
        self.pass_s = 0.0
        rows = self.draft_rows(draws.seq_ids, budgets, tail)
        self.cut_tails(rows)
        chains = self.draw_after_text(draws, rows)
        if chains is not None:
            return Draft(chains.tree(draws), chains.survival(), pass_s=self.pass_s)
        passed = self.read_roots(self.catch_up(rows, 0 if self.taps else TAIL_TOKENS))
        granted = {row.seq_id: row.budget for row in passed.rows}
        if not granted:
            return Draft(DraftTree.of_roots([row.tokens[-1] for row in draws.rows]), pass_s=self.pass_s)
        draft = self.finish(draws, self.grow(draws, granted, passed.logits), granted)
        return replace(draft, pass_s=self.pass_s + draft.pass_s)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]) -> Draft:
        """The draft from the logits after the roots."""
        chains = self.draw_chains(draws, granted, logits)
        if chains is not None:
            return Draft(chains.tree(draws), chains.survival())

        def read_on(reads: Sequence[Read]) -> Tensor | None:
            return self.logits(self.read(reads, granted))

        tails = {seq_id: self.sequences[seq_id] for seq_id in granted}
        reader = LevelReader(tails, read_on, self.ids, draws.seq_ids)
        return grow(draws, [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids], logits, reader)

    def draw_after_text(self, draws: Draws, rows: Sequence[DraftRow]) -> Chains | None:
        """Draw chains by one call of the runner that first reads the unread text; None if there is no such call."""
        return None

    def draw_chains(
        self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]
    ) -> Chains | None:
        """Draw chains by one call of the runner, or on a device without the host seeing the tokens.

        None if the draft must grow level by level on the host.
        """
        if any(budget.width > 1 for budget in granted.values()):
            return None
        unseen = self.runner.draws_unseen and not any(row.params.logits_processors for row in draws.rows)
        if unseen and any(budget.min_survival for budget in granted.values()):
            return None
        if not unseen and (draws.rejection or not draws.on_host):
            return None
        starts = starts_of(draws, granted)
        chains = self.draw_in_one_call(draws, starts, logits)
        if chains is None and unseen:
            chains = unseen_chains(draws, starts, logits, lambda reads, drawn: self.read_unseen(reads, drawn, granted))
        if chains is not None:
            number_tokens(self.sequences, self.ids, chains, starts)
        return chains

    def draw_in_one_call(
        self, draws: Draws, starts: Sequence[ChainStart], logits: Tensor, states: bool = False
    ) -> Chains | None:
        """Draw chains by one call of the runner; None if it has no such call for them. Its time counts as passes."""
        before, started_s = self.states_at_roots(starts), time.perf_counter()
        if self.taps and before is None:  # the states of draft tokens have to be computed step by step
            return None
        chains = self.runner.draw_chains(draws, starts, logits, self.ids, states=states, before=before)
        self.pass_s += time.perf_counter() - started_s
        return chains

    def read_unseen(self, reads: Sequence[Read], drawn: DeviceTokens, active: Collection[int]) -> Tensor | None:
        """Read one more token of each chain, which only the device knows; None if the cache is full."""
        return self.logits(self.read(reads, active, replace(drawn, tokens=self.ids.model_ids(drawn.tokens))))

    def logits(self, states: Outputs | None) -> Tensor | None:
        """The logits of a pass, over the target's ids."""
        return None if states is None else self.ids.target_logits(states.logits)

    def draft_rows(self, seq_ids: Sequence[int], budgets: Sequence[Budget], tail: Committed | None) -> list[DraftRow]:
        """The sequences with a depth above 0, within their budgets and the model's context."""
        tails = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        rows = []
        for seq_id, budget in zip(seq_ids, budgets, strict=True):
            after_text = tails.get(seq_id, self.after_text(seq_id))
            if seq_id not in self.sequences or after_text is None:
                continue
            depth = min(budget.depth, self.max_depth(self.sequences[seq_id], after_text))
            if depth > 0:
                budget = budget if depth == budget.depth else replace(budget, depth=depth)
                rows.append(DraftRow(seq_id, after_text, budget))
        return rows

    def after_text(self, seq_id: int) -> Sequence[int] | None:
        """The final tokens after a sequence's recorded text: its root. None if it cannot be drafted."""
        drafted = self.sequences.get(seq_id)
        return None if drafted is None or drafted.root is None else [drafted.root]

    @property
    def window(self) -> int:
        """The longest text that the model can read, in tokens."""
        return self.runner.window

    def max_depth(self, drafted: DraftedText, after_text: Sequence[int]) -> int:
        """The greatest depth after the text and `after_text`; the last draft token is never read.

        0 for a text with a token that the model's vocabulary does not have.
        """
        highest = max([drafted.highest, *after_text])
        if drafted.lost or highest >= self.ids.num_model_ids:
            return 0
        return max(0, self.window + 1 - len(drafted.text) - len(after_text))

    def unread(self, seq_id: int) -> list[int]:
        """The recorded text that is not in the cache."""
        return self.sequences[seq_id].text[self.runner.length(seq_id) :]

    def num_unread(self, seq_id: int) -> int:
        """The number of unread tokens; 0 if they will never be read."""
        drafted = self.sequences[seq_id]
        return 0 if drafted.lost else len(drafted.text) - self.runner.length(seq_id)

    def catch_up(self, rows: list[DraftRow], left_unread: int, spared: int = 0) -> list[DraftRow]:
        """Prefill final text in chunks until at most `left_unread` tokens of each row are unread.

        The last `spared` tokens of a text are not read. Returns the rows that fit the cache. A new text starts with its
        cached prefix, which another of these rows may just have prefilled.
        """
        rows = [row for row in rows if not self.sequences[row.seq_id].lost]
        while behind := [row.seq_id for row in rows if self.num_unread(row.seq_id) > left_unread]:
            ready = [seq_id for i, seq_id in enumerate(behind) if not self.is_prefix_being_read(seq_id, behind[:i])]
            for seq_id in ready:
                self.start_row(seq_id, -1)  # the last token has to be read, for the model's output there
            rows = self.read_text(rows, ready, spared)
        return rows

    def is_prefix_being_read(self, seq_id: int, others: Sequence[int]) -> bool:
        """Whether a new text should wait because one of `others` is prefilling at least LEAST_WAITED of its tokens."""
        drafted = self.sequences[seq_id]
        if not others or drafted.salt is None or seq_id in self.runner.cache:
            return False
        alike = (other for other in map(self.sequences.__getitem__, others) if other.salt == drafted.salt)
        most = max((num_shared(drafted.text, other.text, len(drafted.text)) for other in alike), default=0)
        return most - self.beginning(drafted.text[:most], drafted.salt).num_tokens >= LEAST_WAITED

    @torch.inference_mode()
    def read_text(self, rows: list[DraftRow], seq_ids: Sequence[int], spared: int = 0) -> list[DraftRow]:
        """Prefill at most CHUNK_TOKENS of these sequences' text in one pass; returns the rows that fit the cache."""
        reads, left = [], CHUNK_TOKENS
        for seq_id in seq_ids:
            unread = self.unread(seq_id)
            chunk = unread[: min(left, len(unread) - spared)]
            left -= len(chunk)
            reads.append(Read(seq_id, chunk))
        passed = self.read_fitting([read for read in reads if read.tokens], rows, of_text=True)
        if passed.reads:
            self.runner.keep([r.seq_id for r in passed.reads], [range(len(r.tokens)) for r in passed.reads])
            for read in passed.reads:
                self.states.drop(read.seq_id, len(read.tokens))
        return passed.rows

    def read_roots(self, rows: list[DraftRow]) -> RootPass:
        """Read the rest of the text, the roots, and the tokens to be judged, in one pass.

        Returns the rows that fit the cache, and the logits after each root and each judged token.
        """
        reads = []
        for row in rows:
            text = [*self.unread(row.seq_id), *row.after_text]
            num_read, tokens = len(self.sequences[row.seq_id].tail), [*text, *row.judged]
            deepest = len(tokens) + row.budget.depth - 1  # the last draft token is not read
            scratch = deepest if row.budget.width > 1 else 0
            judged = range(len(text) - 1 - num_read, len(tokens) - num_read)
            reads.append(Read(row.seq_id, tokens[num_read:], judged=judged, scratch=scratch))
        passed = self.read_fitting(reads, rows)
        for read in passed.reads:
            for token in read.tokens:
                self.sequences[read.seq_id].append(token)
        return passed

    def read_fitting(self, reads: list[Read], rows: list[DraftRow], of_text: bool = False) -> RootPass:
        """One pass over as many rows as fit the cache: idle sequences are evicted first, then the youngest rows."""
        active = {row.seq_id for row in rows}
        while reads:
            states = self.read(reads, active, features=joined(self.states.of(reads)) if of_text and self.taps else None)
            if states is not None:
                return RootPass(
                    reads, [row for row in rows if row.seq_id in active], self.ids.target_logits(states.logits)
                )
            youngest = max(read.seq_id for read in reads)  # ids grow with arrival
            if self.rereads:
                self.release([youngest])
            elif of_text:
                self.lose(youngest)
            active.discard(youngest)
            reads = [read for read in reads if read.seq_id != youngest]
        left = [row for row in rows if row.seq_id in active]
        return RootPass([], left, torch.empty(0, self.ids.vocab_size, device=self.runner.device))

    def read(
        self,
        reads: Sequence[Read],
        active: Collection[int],
        drawn: DeviceTokens | None = None,
        features: Tensor | None = None,
    ) -> Outputs | None:
        """One pass; None if the cache is full even after all sequences outside `active` were evicted."""
        idle = [s for s in self.sequences if s not in active and s in self.runner.cache] if self.rereads else []
        while True:
            started_s = time.perf_counter()
            try:
                return self.run(reads, drawn, features)
            except OutOfBlocks:
                if not idle:
                    return None
                self.release([idle.pop()])
            finally:
                self.pass_s += time.perf_counter() - started_s

    def cut_tails(self, rows: Sequence[DraftRow]) -> None:
        """Drop the tails of an earlier draft, except for the tokens with which these rows continue.

        The root is always read again, for its logits. A tree needs an empty tail.
        """
        for row in rows:
            self.sequences[row.seq_id].number_pending()
        rows = [row for row in rows if self.sequences[row.seq_id].tail or row.seq_id in self.runner.tails]
        if not rows:
            return
        texts = [[*self.unread(row.seq_id), *row.after_text[:-1]] if row.budget.width == 1 else [] for row in rows]
        counts = [self.sequences[row.seq_id].num_reusable(text) for row, text in zip(rows, texts, strict=True)]
        left = self.runner.cut([row.seq_id for row in rows], counts)
        for row, count in zip(rows, left, strict=True):
            self.sequences[row.seq_id].clear(count)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Evict these sequences from the cache; their text is prefilled again when they are drafted again.

        Blocks of text that may be shared stay in the prefix cache while there is room.
        """
        for seq_id in seq_ids:
            drafted = self.sequences.get(seq_id)
            if drafted is None or drafted.salt is None:
                self.runner.release([seq_id])
            else:
                self.runner.retire(seq_id, drafted.text, drafted.salt)
            if drafted is not None:
                drafted.clear()

    def lose(self, seq_id: int) -> None:
        """Stop drafting a sequence whose text did not fit, until it is forgotten and observed from the start."""
        self.release([seq_id])
        self.states.drop(seq_id)
        self.sequences[seq_id].lost = True

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The number of unread tokens, and the depth that the model's context allows."""
        unread, limit = [], []
        for seq_id in seq_ids:
            after_text = self.after_text(seq_id)
            # A model without the target's states reads the root too.
            unread.append(0 if after_text is None else self.num_unread(seq_id) + self.rereads)
            limit.append(0 if after_text is None else self.max_depth(self.sequences[seq_id], after_text))
        return Outlook(unread, limit, ends_early=not self.runner.draws_unseen)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop text and cache of these sequences; unknown ids are ignored."""
        self.release(seq_ids)
        for seq_id in seq_ids:
            self.states.drop(seq_id)
            self.sequences.pop(seq_id, None)

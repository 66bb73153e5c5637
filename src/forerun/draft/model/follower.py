"""Follower: what every drafter does that is a model, whatever the model reads.

This module decides what is read and when: committed text lazily, when a sequence is drafted again; guesses one level at
a time. The keys and values of accepted guesses are kept, so that a round usually starts with the root and at most one
token more. Lack of memory makes drafts shallower and is never an error. It also decides in which way guesses grow: as
chains, by one call of the runner or step by step, or as trees. The drafters decide what goes into their models, and
whose text and memory it is; the runner decides where tokens lie in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.beginnings import Beginning, LiveText, begin_row, longest_beginning, num_shared
from forerun.cache.blocks import OutOfBlocks
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook
from forerun.draft.model.drafted_text import DraftedText, DraftRow, RootPass, number_guesses
from forerun.draft.model.grower import LevelReader, grow, unseen_chains
from forerun.draft.model.unread_states import UnreadStates
from forerun.models.chains import Chains, IdExchange, Start, joined
from forerun.models.decoder import States
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

NO_SEQUENCE = -1
CHUNK_TOKENS = 512  # most tokens of committed text in one pass
LEAST_WAITED = 64  # tokens for whose sake a text waits until another one is read: below, they are read with it
TAIL_TOKENS = 8  # unread text up to here is read with the root; trees lay out their paths behind the kept text


class Follower:
    """Follows the target's sequences with a runner, and drafts with it.

    `rereads`: whether the runner's cache is the drafter's own, and a text can be read once more after its keys and
    values were given up. One that reads the target's states is a `FedFollower`.
    """

    names: tuple[str, ...]
    taps: tuple[int, ...] = ()
    rereads: ClassVar[bool] = True

    def __init__(self, runner: Runner, ids: IdExchange) -> None:
        self.runner = runner
        self.ids = ids
        self.sequences: dict[int, DraftedText] = {}
        self.states = UnreadStates()
        self.pass_s = 0.0  # in passes since the last call of `propose`

    def run(
        self,
        reads: Sequence[Read],
        drawn: DeviceTokens | None = None,
        features: Float[Tensor, "total taps hidden"] | None = None,
    ) -> States:
        """One pass over these tokens; `features` are the states after those of final text, for who reads them.

        Raises OutOfBlocks, with nothing changed, where there is no room.
        """
        return self.runner.read(reads, drawn=drawn)

    def behind_roots(self, starts: Sequence[Start]) -> Float[Tensor, "starts hidden"] | None:
        """The states that the guesses behind these roots are read beside; None where tokens are read alone."""
        return None

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """The draft as it is handed over, of the sequences that were `granted` a budget; their tails stay read."""
        return draft

    def observe(self, news: Committed) -> None:
        """Remember what became final; guesses that it confirms stay read."""
        for i, (seq_id, tokens, root) in enumerate(news.rows()):
            if seq_id not in self.sequences:
                self.sequences[seq_id] = DraftedText(salt=news.salts[i] if news.salts else None)
            drafted = self.sequences[seq_id]
            assert not tokens or drafted.root in (None, tokens[0]), "a sequence's news begin with its last root"
            drafted.text.extend(tokens)
            drafted.root = root
            drafted.highest = max(drafted.highest, *tokens, root)
        self.confirm(news.seq_ids)

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Keep of the tails what the texts confirm, and forget the rest."""
        kept, paths = [], []
        for seq_id in seq_ids:
            drafted = self.sequences[seq_id]
            drafted.settle()
            if drafted.tail:
                kept.append(seq_id)
                paths.append(drafted.path(self.unread(seq_id)))
                drafted.clear()
            elif seq_id in self.runner.tails:  # of a proposal that raised
                self.runner.drop([seq_id])
        if kept:
            self.runner.keep(kept, paths)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """As much as it holds of the text, read or not; all where it could not follow the text in any case."""
        if most > self.window or not self.runner.cache.can_reserve([NO_SEQUENCE], [most]):
            return most
        return self.states.known(text[:most], salt, self.beginning(text[:most], salt).num_tokens)

    def beginning(self, text: Sequence[int], salt: Hashable) -> Beginning:
        """How much of a text's beginning the cache holds."""
        others = (LiveText(seq_id, other.salt, other.text) for seq_id, other in self.sequences.items())
        return longest_beginning(self.runner.cache, text, salt, others)

    def begin(self, seq_id: int, most: int | None = None) -> None:
        """Begin the row of a text that has none with what the cache holds of it, of its first `most` tokens at most."""
        drafted, cache = self.sequences[seq_id], self.runner.cache
        if seq_id not in cache:
            beginning = self.beginning(drafted.text[:most], drafted.salt)
            num_known = begin_row(cache, LiveText(seq_id, drafted.salt, drafted.text), beginning)
            self.states.drop(seq_id, num_known)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the model's logits; the root alone where text or memory is full."""
        self.pass_s = 0.0
        rows = self.draft_rows(draws.seq_ids, budgets, tail)
        self.cut_tails(rows)
        chains = self.draw_behind_text(draws, rows)
        if chains is not None:
            return Draft(chains.tree(draws), chains.survival(), pass_s=self.pass_s)
        passed = self.read_roots(self.catch_up(rows, 0 if self.taps else TAIL_TOKENS))
        granted = {row.seq_id: row.budget for row in passed.rows}
        if not granted:
            return Draft(DraftTree.of_roots([row.tokens[-1] for row in draws.rows]), pass_s=self.pass_s)
        draft = self.finish(draws, self.grow(draws, granted, passed.logits), granted)
        return replace(draft, pass_s=self.pass_s + draft.pass_s)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]) -> Draft:
        """The guesses behind the roots."""
        chains = self.draw_chains(draws, granted, logits)
        if chains is not None:
            return Draft(chains.tree(draws), chains.survival())

        def read_on(reads: Sequence[Read]) -> Tensor | None:
            return self.logits(self.read(reads, granted))

        tails = {seq_id: self.sequences[seq_id] for seq_id in granted}
        reader = LevelReader(tails, read_on, self.ids, draws.seq_ids)
        return grow(draws, [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids], logits, reader)

    def draw_behind_text(self, draws: Draws, rows: Sequence[DraftRow]) -> Chains | None:
        """Chains by one call of the runner that reads the final text before them too; None where there is none."""
        return None

    def draw_chains(
        self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]
    ) -> Chains | None:
        """Chains by one call of the runner, or on a device where the host does not see them; None where they grow as
        trees do."""
        unseen = self.runner.draws_unseen and not any(row.params.logits_processors for row in draws.rows)
        priced = any(budget.min_survival for budget in granted.values())
        if any(budget.width > 1 for budget in granted.values()) or (
            priced if unseen else draws.rejection or not draws.on_host
        ):
            return None
        rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
        starts = [Start(rows[s], s, min(b.depth, b.nodes), b.min_survival) for s, b in granted.items()]
        chains = self.draw_at_once(draws, starts, logits)
        if chains is None and unseen:
            chains = unseen_chains(draws, starts, logits, lambda reads, drawn: self.read_unseen(reads, drawn, granted))
        if chains is not None:
            number_guesses(self.sequences, self.ids, chains, starts)
        return chains

    def draw_at_once(
        self, draws: Draws, starts: Sequence[Start], logits: Tensor, states: bool = False
    ) -> Chains | None:
        """The chains by one call of the runner, whose draws count with its passes; None where it has none for them."""
        before, started_s = self.behind_roots(starts), time.perf_counter()
        if self.taps and before is None:  # what guesses are read beside is computed step by step
            return None
        chains = self.runner.draw_chains(draws, starts, logits, self.ids, states, before)
        self.pass_s += time.perf_counter() - started_s
        return chains

    def read_unseen(self, reads: Sequence[Read], drawn: DeviceTokens, active: Collection[int]) -> Tensor | None:
        """Reads one more guess of each chain, which only the device knows; None where there is no room."""
        return self.logits(self.read(reads, active, replace(drawn, tokens=self.ids.own(drawn.tokens))))

    def logits(self, states: States | None) -> Tensor | None:
        """Those of a pass, over the target's ids."""
        return None if states is None else self.ids.spread(states.logits)

    def draft_rows(self, seq_ids: Sequence[int], budgets: Sequence[Budget], tail: Committed | None) -> list[DraftRow]:
        """The sequences to be drafted, their depths cut to what nodes, the model's context and the cache allow."""
        late = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        rows = []
        for seq_id, budget in zip(seq_ids, budgets, strict=True):
            new = late.get(seq_id, self.late(seq_id))
            if seq_id not in self.sequences or new is None:
                continue
            depth = min(budget.depth, budget.nodes, self.room(self.sequences[seq_id], new))
            if depth > 0:
                rows.append(DraftRow(seq_id, new, budget if depth == budget.depth else replace(budget, depth=depth)))
        return rows

    def late(self, seq_id: int) -> Sequence[int] | None:
        """The final tokens that are not part of a sequence's text, its root; None where it cannot be drafted."""
        drafted = self.sequences.get(seq_id)
        return None if drafted is None or drafted.root is None else [drafted.root]

    @property
    def window(self) -> int:
        """The longest text that can be read."""
        return self.runner.window

    def room(self, drafted: DraftedText, late: Sequence[int]) -> int:
        """The deepest draft behind the text and `late`; its last guess need not be read."""
        highest = max([drafted.highest, *late])
        if drafted.lost or highest >= self.ids.num_own:  # its vocabulary may be the smaller one
            return 0
        return max(0, self.window + 1 - len(drafted.text) - len(late))

    def unread(self, seq_id: int) -> list[int]:
        """The final text, up to its root, that the cache does not hold."""
        return self.sequences[seq_id].text[self.runner.length(seq_id) :]

    def num_unread(self, seq_id: int) -> int:
        """How many tokens that is; 0 where it will not be read."""
        drafted = self.sequences[seq_id]
        return 0 if drafted.lost else len(drafted.text) - self.runner.length(seq_id)

    def catch_up(self, rows: list[DraftRow], left_unread: int, spared: int = 0) -> list[DraftRow]:
        """Read and keep final text, in chunks, until no more than so much is unread; the rows that had room. So many
        tokens at a text's end are not read.

        A text without a row begins with what the cache holds of it, be it what another of these rows has just read.
        """
        rows = [row for row in rows if not self.sequences[row.seq_id].lost]
        while behind := [row.seq_id for row in rows if self.num_unread(row.seq_id) > left_unread]:
            apart = [seq_id for i, seq_id in enumerate(behind) if not self.is_coming(seq_id, behind[:i])]
            for seq_id in apart:
                self.begin(seq_id, -1)  # what the last token leaves is wanted
            rows = self.read_text(rows, apart, spared)
        return rows

    def is_coming(self, seq_id: int, others: Sequence[int]) -> bool:
        """Whether a text without a row begins as one of those that are being read, and goes on so for a while."""
        drafted = self.sequences[seq_id]
        if not others or drafted.salt is None or seq_id in self.runner.cache:
            return False
        alike = (other for other in map(self.sequences.__getitem__, others) if other.salt == drafted.salt)
        most = max((num_shared(drafted.text, other.text, len(drafted.text)) for other in alike), default=0)
        return most - self.beginning(drafted.text[:most], drafted.salt).num_tokens >= LEAST_WAITED

    @torch.inference_mode()
    def read_text(self, rows: list[DraftRow], seq_ids: Sequence[int], spared: int = 0) -> list[DraftRow]:
        """Read and keep a chunk of these sequences' text, which are among the rows; the rows that had room."""
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
        """Read what is left of the text, the roots, and guesses to be judged.

        Gives the rows that had room, and the logits after their roots and guesses.
        """
        reads = []
        for row in rows:
            text = [*self.unread(row.seq_id), *row.late]
            num_read, tokens = len(self.sequences[row.seq_id].tail), [*text, *row.guesses]
            deepest = len(tokens) + row.budget.depth - 1  # the last guess is not read
            scratch = deepest if row.budget.width > 1 else 0
            judged = range(len(text) - 1 - num_read, len(tokens) - num_read)
            reads.append(Read(row.seq_id, tokens[num_read:], judged=judged, scratch=scratch))
        passed = self.read_fitting(reads, rows)
        for read in passed.reads:
            for token in read.tokens:
                self.sequences[read.seq_id].append(token)
        return passed

    def read_fitting(self, reads: list[Read], rows: list[DraftRow], of_text: bool = False) -> RootPass:
        """Read as much as there is room for: idle sequences lose their K, V first, then the youngest are left out."""
        active = {row.seq_id for row in rows}
        while reads:
            states = self.read(reads, active, features=joined(self.states.of(reads)) if of_text and self.taps else None)
            if states is not None:
                return RootPass(reads, [row for row in rows if row.seq_id in active], self.ids.spread(states.logits))
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
    ) -> States | None:
        """One pass; None where there is no room even after all sequences outside `active` lost their K, V."""
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
        """Forget guesses that were neither confirmed nor refuted, but for those that these texts go on with.

        A root is always read, for its logits; a tail that may branch begins where the kept text ends.
        """
        for row in rows:
            self.sequences[row.seq_id].settle()
        rows = [row for row in rows if self.sequences[row.seq_id].tail or row.seq_id in self.runner.tails]
        if not rows:
            return
        texts = [[*self.unread(row.seq_id), *row.late[:-1]] if row.budget.width == 1 else [] for row in rows]
        counts = [self.sequences[row.seq_id].shared(text) for row, text in zip(rows, texts, strict=True)]
        left = self.runner.cut([row.seq_id for row in rows], counts)
        for row, count in zip(rows, left, strict=True):
            self.sequences[row.seq_id].clear(count)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Give up these sequences' K, V; their text stays known and is read again when they are drafted again.

        What a row held stays in the cache as long as there is room, where the text may be shared.
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
        """Stop drafting a sequence whose text found no room, until it is forgotten and observed from its start."""
        self.release([seq_id])
        self.states.drop(seq_id)
        self.sequences[seq_id].lost = True

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Text to be read before the next draft, and how far context and cache reach."""
        unread, limit = [], []
        for seq_id in seq_ids:
            late = self.late(seq_id)
            unread.append(0 if late is None else self.num_unread(seq_id) + self.rereads)  # the root, unless it is given
            limit.append(0 if late is None else self.room(self.sequences[seq_id], late))
        return Outlook(unread, limit, [None] * len(seq_ids), ends_early=not self.runner.draws_unseen)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop text, keys and values of these sequences; unknown ones are ignored."""
        self.release(seq_ids)
        for seq_id in seq_ids:
            self.states.drop(seq_id)
            self.sequences.pop(seq_id, None)

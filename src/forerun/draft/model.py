"""A smaller model as drafter, with a cache of its own, batched.

This module decides what the small model reads and when: committed text lazily, when a sequence is drafted again; its
own guesses one level at a time. The keys and values of accepted guesses are kept, so that a round usually starts with
the root and at most one token more. The model can also judge another drafter's chains, which it reads like its own.
Lack of memory makes drafts shallower and is never an error. `expand` grows trees; the runner decides where tokens lie
in the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.blocks import OutOfBlocks
from forerun.device import Download
from forerun.draft import chains
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook
from forerun.draft.chain_graph import ChainGraph
from forerun.draft.expand import expand
from forerun.draft.following import DraftRow, Following, Revision
from forerun.draft.judge import JudgeLogits, Question
from forerun.draft.levels import LevelReader
from forerun.draft.loop import Start, UnseenGuesses, can_draw_unseen, draw_chains
from forerun.draft.vocab import SharedTokens
from forerun.models.graphs import GraphRunner
from forerun.models.runner import DeviceTokens, Read, Runner, States
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

CHUNK_TOKENS = 512  # most tokens of committed text in one pass
TAIL_TOKENS = 8  # unread text up to here is read with the root; trees lay out their paths behind the kept text


class ModelDrafter:
    """Drafts with a model of the target's tokenizer, or of one that shares tokens with it.

    `vocab_size` is the width of the target's logits: the drafter's are cut, or padded with -inf, to it. With `shared`
    the text is told in the drafter's tokens, by `revise`, and only shared tokens are guessed.
    """

    taps: tuple[int, ...] = ()
    arms: tuple[str, ...] = ("model",)

    def __init__(self, runner: Runner, vocab_size: int, shared: SharedTokens | None = None) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self.shared = shared
        self.sequences: dict[int, Following] = {}
        self.pass_s = 0.0  # in passes since the last call of `propose`
        self.graph: ChainGraph | None = None
        if isinstance(runner, GraphRunner):
            self.graph = ChainGraph(runner, self.fit_vocabulary, vocab_size, self.own_tensor)

    def observe(self, news: Committed) -> None:
        """Remember what became final; guesses that it confirms stay read."""
        for seq_id, tokens, root in news.rows():
            following = self.sequences.setdefault(seq_id, Following())
            assert not tokens or following.root in (None, tokens[0]), "a sequence's news begin with its last root"
            following.text.extend(tokens)
            following.root = root
            following.highest = max(following.highest, *tokens, root)
        self.confirm(news.seq_ids)

    def revise(self, revisions: Sequence[Revision]) -> None:
        """Learn texts that are others than observed from some token on; what is still true stays read."""
        for revision in revisions:
            following = self.sequences.setdefault(revision.seq_id, Following())
            kept = following.rewrite(revision.first, revision.tokens)
            if kept < self.runner.length(revision.seq_id):
                self.runner.truncate(revision.seq_id, kept)
                following.clear()
        self.confirm([revision.seq_id for revision in revisions])

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Keep of the tails what the texts confirm, and forget the rest."""
        kept, paths = [], []
        for seq_id in seq_ids:
            following = self.sequences[seq_id]
            following.settle()
            if following.tail:
                kept.append(seq_id)
                paths.append(following.path(self.unread(seq_id)))
                following.clear()
        if kept:
            self.runner.keep(kept, paths)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the model's logits; the root alone where text or memory is full."""
        self.pass_s = 0.0
        wishes = self.wishes(draws.seq_ids, budgets, tail)
        self.cut_tails(wishes)
        passed = self.read_roots(self.catch_up(wishes))
        granted = {wish.seq_id: wish.budget for wish in passed.wishes}
        if granted and self.graph is not None and can_draw_unseen(draws, list(granted.values())):
            return self.draw_unseen(self.graph, draws, granted, passed.logits)
        if granted and chains.are_plain_chains(draws, list(granted.values())):
            return self.draw_chains(draws, granted, passed.logits)
        ends = {wish.seq_id: len(self.sequences[wish.seq_id].tail) - 1 for wish in passed.wishes}

        def read_on(reads: Sequence[Read]) -> Tensor | None:
            states = self.read(reads, granted)
            return None if states is None else self.fit_vocabulary(states.logits)

        reader = LevelReader(self.sequences, read_on, self.own, draws.seq_ids, ends)
        draft = expand(draws, [granted.get(seq_id, NO_DRAFT) for seq_id in draws.seq_ids], passed.logits, reader)
        return replace(draft, pass_s=self.pass_s)

    def judge(self, questions: Sequence[Question]) -> JudgeLogits:
        """Its logits behind the roots and guesses; what earlier questions had it read is not read again."""
        self.pass_s = 0.0
        rooms = [self.room(self.sequences[q.seq_id], q.late) for q in questions]
        asked = {q.seq_id: i for i, (q, room) in enumerate(zip(questions, rooms, strict=True)) if room > len(q.guesses)}
        # An id beyond its vocabulary is one that it never says: what is read in its place is of no consequence.
        known = self.runner.decoder.config.vocab_size
        wishes = [
            DraftRow(q.seq_id, q.late, Budget(depth=1), [g if g < known else 0 for g in q.guesses])
            for q in (questions[i] for i in asked.values())
        ]
        self.cut_tails(wishes)
        passed = self.read_roots(self.catch_up(wishes))
        return JudgeLogits([asked[wish.seq_id] for wish in passed.wishes], passed.logits, self.pass_s)

    def draw_chains(self, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]) -> Draft:
        """Chains of which nothing is asked but their tokens: in one call where there is one, else step by step."""
        budgets = {row: granted[seq_id] for row, seq_id in enumerate(draws.seq_ids) if seq_id in granted}
        drawn = self.draw_at_once(draws, budgets, logits)
        if drawn is not None:
            return Draft(DraftTree.of_texts(drawn), pass_s=self.pass_s)

        def read_on(rows: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
            seq_ids = [draws.seq_ids[row] for row in rows]
            own = self.own(tokens)
            states = self.read([Read(s, [max(0, t)], judged=(0,)) for s, t in zip(seq_ids, own, strict=True)], granted)
            if states is None:
                return None
            for seq_id, token in zip(seq_ids, own, strict=True):
                self.sequences[seq_id].append(token)
            return self.fit_vocabulary(states.logits)

        tree = chains.grow_chains(draws, budgets, logits, read_on)
        return Draft(tree, pass_s=self.pass_s)

    def draw_at_once(
        self, draws: Draws, budgets: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]
    ) -> list[list[int]] | None:
        """The chains, roots first, by one call of the runner; None where it has none for them."""
        laws = draws.row_laws if self.shared is None else None
        if laws is None or not laws.compiled:
            return None
        started_s = time.perf_counter()
        seq_ids, depths = [draws.seq_ids[row] for row in budgets], [min(b.depth, b.nodes) for b in budgets.values()]
        guesses = self.runner.draw_chains(seq_ids, depths, logits, laws.some(list(budgets)))
        self.pass_s += time.perf_counter() - started_s  # its draws are in the call with its passes
        if guesses is None:
            return None
        drawn = [[row.tokens[-1]] for row in draws.rows]
        for row, seq_id, depth, chain in zip(budgets, seq_ids, depths, guesses, strict=True):
            drawn[row] += chain
            for token in chain[: depth - 1]:
                self.sequences[seq_id].append(token)
        return drawn

    def draw_unseen(
        self, graph: ChainGraph, draws: Draws, granted: Mapping[int, Budget], logits: Float[Tensor, "granted vocab"]
    ) -> Draft:
        """Chains that are drawn and read on the device; the host learns of them with the round's verdict."""
        rows = {seq_id: row for row, seq_id in enumerate(draws.seq_ids)}
        starts = [Start(rows[seq_id], seq_id, min(b.depth, b.nodes)) for seq_id, b in granted.items()]

        def read_on(reads: Sequence[Read], drawn: DeviceTokens) -> Tensor | None:
            states = self.read(reads, granted, replace(drawn, tokens=self.own_tensor(drawn.tokens)))
            return None if states is None else self.fit_vocabulary(states.logits)

        started_s = time.perf_counter()
        drawn = graph.draw(draws, starts, logits)
        if drawn is not None:
            self.pass_s += time.perf_counter() - started_s  # its draws are in the graph with its passes
        else:
            drawn = draw_chains(draws, starts, logits, read_on)
        download = Download(self.own_tensor(drawn.guesses))
        for seq_id, num_read in drawn.num_read.items():
            self.sequences[seq_id].pending = UnseenGuesses(download, rows[seq_id], num_read)
        return Draft(drawn.tree(draws), pass_s=self.pass_s)

    def wishes(self, seq_ids: Sequence[int], budgets: Sequence[Budget], tail: Committed | None) -> list[DraftRow]:
        """The sequences to be drafted, their depths cut to what the model's context and the cache allow."""
        late = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        wishes = []
        for seq_id, budget in zip(seq_ids, budgets, strict=True):
            following = self.sequences.get(seq_id)
            if following is None or following.root is None:
                continue
            new = late.get(seq_id, [following.root])
            depth = min(budget.depth, self.room(following, new))
            if depth > 0:
                wishes.append(DraftRow(seq_id, new, budget if depth == budget.depth else replace(budget, depth=depth)))
        return wishes

    def room(self, following: Following, late: Sequence[int]) -> int:
        """The deepest draft behind the text and `late`; its last guess need not be read."""
        config, blocks = self.runner.decoder.config, self.runner.cache.blocks
        if max(following.highest, *late) >= config.vocab_size:  # a padded vocabulary may be smaller than the target's
            return 0
        window = min(config.max_positions, blocks.num_blocks * blocks.block_size)
        return max(0, window + 1 - len(following.text) - len(late))

    def unread(self, seq_id: int) -> list[int]:
        """The final text, up to its root, that the cache does not hold."""
        return self.sequences[seq_id].text[self.runner.length(seq_id) :]

    def catch_up(self, wishes: list[DraftRow]) -> list[DraftRow]:
        """Read and keep long stretches of final text, in chunks; returns the wishes for which there was room."""
        while behind := [w.seq_id for w in wishes if len(self.unread(w.seq_id)) > TAIL_TOKENS]:
            reads, left = [], CHUNK_TOKENS
            for seq_id in behind:
                chunk = self.unread(seq_id)[:left]
                left -= len(chunk)
                reads.append(Read(seq_id, chunk))
            reads = [read for read in reads if read.tokens]
            passed = self.read_fitting(reads, wishes)
            if passed.reads:
                paths = [range(len(read.tokens)) for read in passed.reads]
                self.runner.keep([read.seq_id for read in passed.reads], paths)
            wishes = passed.wishes
        return wishes

    def read_roots(self, wishes: list[DraftRow]) -> RootPass:
        """Read what is left of the text, the roots, and guesses to be judged.

        Gives the wishes that had room, and the logits after their roots and guesses.
        """
        reads = []
        for wish in wishes:
            text = [*self.unread(wish.seq_id), *wish.late]
            num_read, tokens = len(self.sequences[wish.seq_id].tail), [*text, *wish.guesses]
            deepest = len(tokens) + wish.budget.depth - 1  # the last guess is not read
            scratch = deepest if wish.budget.width > 1 else 0
            judged = range(len(text) - 1 - num_read, len(tokens) - num_read)
            reads.append(Read(wish.seq_id, tokens[num_read:], judged=judged, scratch=scratch))
        passed = self.read_fitting(reads, wishes)
        for read in passed.reads:
            for token in read.tokens:
                self.sequences[read.seq_id].append(token)
        return passed

    def read_fitting(self, reads: list[Read], wishes: list[DraftRow]) -> RootPass:
        """Read as much as there is room for: idle sequences lose their K, V first, then the youngest are left out."""
        active = {wish.seq_id for wish in wishes}
        while reads:
            states = self.read(reads, active)
            if states is not None:
                return RootPass(reads, [w for w in wishes if w.seq_id in active], self.fit_vocabulary(states.logits))
            youngest = max(read.seq_id for read in reads)  # ids grow with arrival
            self.release([youngest])
            active.discard(youngest)
            reads = [read for read in reads if read.seq_id != youngest]
        left = [w for w in wishes if w.seq_id in active]
        return RootPass([], left, torch.empty(0, self.vocab_size, device=self.runner.cache.keys.device))

    def read(self, reads: Sequence[Read], active: Collection[int], drawn: DeviceTokens | None = None) -> States | None:
        """One pass; None where there is no room even after all sequences outside `active` lost their K, V."""
        idle = [s for s in self.sequences if s not in active and s in self.runner.cache]
        while True:
            started_s = time.perf_counter()
            try:
                return self.runner.read(reads, drawn=drawn)
            except OutOfBlocks:
                if not idle:
                    return None
                self.release([idle.pop()])
            finally:
                self.pass_s += time.perf_counter() - started_s

    def fit_vocabulary(self, logits: Float[Tensor, "rows own_vocab"]) -> Float[Tensor, "rows vocab"]:
        """The logits over the target's ids: both vocabularies may be padded, to different sizes."""
        if self.shared is not None:
            return self.shared.spread(logits)
        missing = self.vocab_size - logits.shape[1]
        if missing == 0:
            return logits
        return functional.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, : self.vocab_size]

    def own(self, tokens: Sequence[int]) -> Sequence[int]:
        """The drafter's ids of guesses; below 0, and each another, where it has none."""
        return tokens if self.shared is None else [self.shared.known[token] for token in tokens]

    def own_tensor(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        """The same on the device; no token stays none."""
        return tokens if self.shared is None else self.shared.own(tokens)

    def cut_tails(self, wishes: Sequence[DraftRow]) -> None:
        """Forget guesses that were neither confirmed nor refuted, but for those that these texts go on with.

        A root is always read, for its logits; a tail that may branch begins where the kept text ends.
        """
        for wish in wishes:
            self.sequences[wish.seq_id].settle()
        wishes = [w for w in wishes if self.sequences[w.seq_id].tail or w.seq_id in self.runner.tails]
        if not wishes:
            return
        texts = [[*self.unread(wish.seq_id), *wish.late[:-1]] if wish.budget.width == 1 else [] for wish in wishes]
        counts = [self.sequences[wish.seq_id].shared(text) for wish, text in zip(wishes, texts, strict=True)]
        left = self.runner.cut([wish.seq_id for wish in wishes], counts)
        for wish, count in zip(wishes, left, strict=True):
            self.sequences[wish.seq_id].clear(count)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Give up these sequences' K, V; their text stays known and is read again when they are drafted again."""
        self.runner.release(seq_ids)
        for seq_id in seq_ids:
            self.sequences[seq_id].clear()

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Text to be read before the next draft, and how far context and cache reach."""
        unread, limit = [], []
        for seq_id in seq_ids:
            following = self.sequences.get(seq_id)
            if following is None or following.root is None:
                unread.append(0)
                limit.append(0)
            else:
                unread.append(len(self.unread(seq_id)) + 1)
                limit.append(self.room(following, [following.root]))
        return Outlook(unread=unread, limit=limit, expected=[None] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop text, keys and values of these sequences; unknown ones are ignored."""
        self.runner.release(seq_ids)
        for seq_id in seq_ids:
            self.sequences.pop(seq_id, None)


@dataclass(frozen=True, slots=True)
class RootPass:
    """A pass as far as there was room: what was read, which wishes are left, and the logits asked for."""

    reads: Sequence[Read]
    wishes: list[DraftRow]
    logits: Float[Tensor, "judged vocab"]

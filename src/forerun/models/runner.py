"""Runner: one model and its cache, used in terms of sequences and guesses.

This module decides where tokens go: which slots, which positions, which attention paths. A sequence's *tail* is what
was read behind its committed text since the last `keep`: numbered nodes that form a chain or a tree, possibly from
several reads. `keep` makes a path of the tail final. The target and every drafter that is a model use a Runner.

A tail that branches starts with `scratch` slots, in which each path is laid out as a chain would be; its nodes are
stored behind them. A chain needs none, because its nodes are already in the slots where they belong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.device import Download
from forerun.models.backends.base import ChainStarts
from forerun.models.batch import AttentionPath, Copy, QueryRule, TokenBatch
from forerun.models.chains import Chains, HeadsAhead, IdExchange, JudgedChains, Start, UnreadTexts
from forerun.models.decoder import Decoder, Hidden, States
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree


class Read(NamedTuple):
    """Tokens of one sequence to read in the next pass, behind its committed text and its tail.

    `parents[i]` numbers a node of the tail, these tokens included (they follow the nodes already there); -1 hangs
    off the committed text. None: a chain behind the tail's last node. `judged` are the indices into `tokens` whose
    logits are wanted. `scratch`, on the first read of a tail that will branch, is the length of its longest path.
    """

    seq_id: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    judged: Sequence[int] = ()
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens that only the device knows yet: guesses that a drafter drew there.

    `source[i]` is the place in `tokens` (flattened) of the i-th token of all reads, packed; -1 where the read's own
    token holds. -1 in `tokens` stands for no token: what is read there is never used.
    """

    tokens: Int[Tensor, "batch nodes"]
    source: Sequence[int]

    def resolve(self, reads: Sequence[Read]) -> list[Read]:
        """The reads with all tokens known to the host, which waits for them."""
        known, source = self.tokens.flatten().tolist(), iter(self.source)
        texts = [
            [
                token if at < 0 else max(0, known[at])
                for token, at in zip(r.tokens, itertools.islice(source, len(r.tokens)), strict=True)
            ]
            for r in reads
        ]
        return [read._replace(tokens=tokens) for read, tokens in zip(reads, texts, strict=True)]


@dataclass(frozen=True, slots=True)
class PartialPass:
    """Tokens that the layers below `layer` have read: what is left of their pass begins there.

    The first `counts[i]` tokens of the i-th read are a chain behind the committed text. Their keys and values of those
    layers lie in the sequence's tail, where this read would put them, and nothing else does. `hidden`, packed over the
    reads, are their states.
    """

    layer: int
    counts: Sequence[int]
    hidden: Float[Tensor, "known hidden"]

    def places(self, reads: Sequence[Read]) -> list[int]:
        """Where these tokens are among those of all reads, packed."""
        firsts = itertools.accumulate((len(read.tokens) for read in reads), initial=0)
        return [first + i for first, count in zip(firsts, self.counts, strict=False) for i in range(count)]


@dataclass(slots=True)
class Tail:
    """The nodes read behind a sequence's committed text."""

    scratch: int
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0 hangs off the committed text

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs off the one before it."""
        return not self.depths or self.depths[-1] == len(self.depths) - 1

    def path(self, node: int) -> list[int]:
        """The nodes from the committed text down to this one."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def grow(self, parents: Sequence[int] | None, count: int) -> range:
        """Number new nodes and record their parents."""
        first = len(self.parents)
        for i in range(count):
            parent = first + i - 1 if parents is None else parents[i]
            assert parent < first + i, f"node {first + i} has parent {parent}, which is not before it"
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return range(first, first + count)


# The verdict on a tree by the tokens that are drawn after its nodes.
TreeRule = Callable[[DraftTree, Int[Tensor, "batch nodes"]], Int[Tensor, "batch verdict"]]


class Judged(NamedTuple):
    """A verdict, and where requests want log-probabilities those of the token drawn after each node (`ranked`)."""

    packed: Int[Tensor, "batch verdict"]
    ranked: Float[Tensor, "nodes numbers"] | None


class Runner:
    """Reads tokens through a decoder into its cache. One row per sequence; rows appear with their first read.

    `resumes`: whether a pass can go on where one through the lower layers stopped (`PartialPass`). `draws_unseen`:
    whether a device draws chains and reads them, and begins passes, before the host sees what it reads.
    """

    resumes: ClassVar[bool] = True
    draws_unseen: ClassVar[bool] = False

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.tails: dict[int, Tail] = {}

    @classmethod
    def of(cls, decoder: Decoder, num_tokens: int, block_size: int = 64, **options: Any) -> Runner:
        """The decoder over a fresh cache of `num_tokens`, in its own number format; with options of the class."""
        cache = PagedCache(**decoder.cache_shape, num_tokens=num_tokens, block_size=block_size)
        return cls(decoder, cache, **options)

    def lower(self, num_layers: int) -> Runner:
        """A runner of the decoder's first layers, over the same cache: its tails are tails there too."""
        return type(self)(self.decoder.lower(num_layers), self.cache)

    @property
    def device(self) -> torch.device:
        return self.cache.keys.device

    @property
    def vocab_size(self) -> int:
        """Columns of its logits: all ids that it can read, and padding."""
        return self.decoder.config.vocab_size

    @cached_property
    def window(self) -> int:
        """The longest text that it can read, alone in its cache."""
        blocks = self.cache.blocks
        return min(self.decoder.config.max_positions, blocks.num_blocks * blocks.block_size)

    def length(self, seq_id: int) -> int:
        """Committed tokens read so far; 0 for an unknown sequence."""
        return self.cache.length(seq_id) if seq_id in self.cache else 0

    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        begun: PartialPass | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
    ) -> States:
        """One pass over all reads. Raises OutOfBlocks, with nothing changed, where the cache has no room.

        Tokens that are `begun` are read from their layer on; taps are then of that layer or later ones. `inputs`,
        packed over the reads, are states to read in place of the tokens' embeddings.
        """
        reads = reads if drawn is None else drawn.resolve(reads)
        counts = [len(r.tokens) + (0 if r.seq_id in self.tails else r.scratch) for r in reads]
        if begun is not None:
            assert all(self.cache.tail(r.seq_id) == n for r, n in zip(reads, begun.counts, strict=True) if n), "no tail"
            counts = [count - n for count, n in zip(counts, begun.counts, strict=True)]
        self.cache.reserve([r.seq_id for r in reads], counts)
        batch = self.pack(reads)
        if begun is None:
            hidden = self.decoder.forward(batch, self.cache, inputs=inputs, taps=taps)
        else:
            hidden = self.resume(batch, taps, begun, begun.places(reads))
        firsts = list(itertools.accumulate((len(r.tokens) for r in reads), initial=0))
        judged = [first + i for first, r in zip(firsts, reads, strict=False) for i in r.judged]
        if not judged:
            return States(hidden.last.new_empty(0, self.vocab_size), hidden.last, hidden.tapped)
        last = hidden.last if judged == list(range(firsts[-1])) else hidden.last[torch.tensor(judged)]
        return States(self.decoder.logits(last), hidden.last, hidden.tapped)

    def resume(self, batch: TokenBatch, taps: Sequence[int], begun: PartialPass, known: Sequence[int]) -> Hidden:
        """What a whole pass gives, to the bit: the lower layers for tokens outside `known` alone, the rest for all."""
        rest = sorted(set(range(len(batch.tokens))) - set(known))
        inputs = begun.hidden.new_empty(len(batch.tokens), self.decoder.config.hidden)
        inputs[torch.tensor(known)] = begun.hidden
        if rest:
            lower = self.decoder.forward(batch.some(rest), self.cache, layers=range(begun.layer))
            inputs[torch.tensor(rest)] = lower.last
        layers = range(begun.layer, self.decoder.config.layers)
        return self.decoder.forward(batch, self.cache, layers=layers, inputs=inputs, taps=taps)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """Those of states that a pass gave."""
        return self.decoder.logits(hidden)

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """What a rule says of the tokens that `draws` draw after all nodes, in one call; None but on a GPU."""
        return None

    def read_ahead(
        self, seq_ids: Sequence[int], verdict: Int[Tensor, "batch verdict"], taps: Sequence[int] = ()
    ) -> Download | None:
        """Begin the pass over the token that each of these sequences has drawn, behind its root; None but on a GPU."""
        return None

    def begin_chains(
        self, judged: JudgedChains, starts: Sequence[Start], ids: IdExchange, texts: UnreadTexts
    ) -> Download | None:
        """Begin the chains of the round behind a judged one, where each row's text are the root and guesses of that;
        None but on a GPU."""
        return None

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[Start],
        logits: Float[Tensor, "starts vocab"] | None,
        ids: IdExchange,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
        texts: UnreadTexts | None = None,
        heads: HeadsAhead | None = None,
    ) -> Chains | None:
        """Chains behind the tails, drawn and read in one call; all but a row's last guess join its tail.

        `logits` are those after the tails' last nodes, over the target's ids, and `before` the states there, for
        decoders that read states. None, with nothing changed, where there is no such call for the decoder, these ids or
        these draws, or no room in the cache. `states`: whether to give those of the guesses that are read.

        With `texts` these are read and kept first, in the same call, which finds logits and states itself; the guesses
        behind them are forgotten again. With `heads` nothing is read between guesses: a call for them is a GPU's.
        """
        seq_ids, lengths = [start.seq_id for start in starts], [0] * len(starts)
        if texts is not None:
            lengths = [len(text) for text in texts.tokens]
        counts = [length + max(0, start.depth - 1) for start, length in zip(starts, lengths, strict=True)]
        reads_states = before is not None or texts is not None
        draw = self.decoder.executor.chain_drawer(draws, reads_states) if ids.same and heads is None else None
        if draw is None or not self.cache.can_reserve(seq_ids, counts):
            return None
        tails = [self.tails.setdefault(seq_id, Tail(0)) for seq_id in seq_ids]
        assert all(tail.scratch == 0 for tail in tails), "a chain goes on from a chain"
        self.cache.reserve(seq_ids, counts)
        begin = ChainStarts(
            starts=starts,
            slots=[self.cache.start(seq_id) for seq_id in seq_ids],
            positions=[
                self.length(seq_id) + len(tail.parents) + length
                for seq_id, tail, length in zip(seq_ids, tails, lengths, strict=True)
            ],
            vocab_size=ids.vocab_size,
            logits=logits,
            states=before,
            head_ids=ids.head_ids,
            texts=texts,
        )
        shape = len(starts), max(start.depth for start in starts), self.decoder.config.hidden
        hidden = torch.empty(shape) if states else None
        drawn, survival = draw(begin, self.cache, hidden)
        trees = [HostTree.of_root(row.tokens[-1]) for row in draws.rows]
        chains = Chains(trees, {}, priced=survival is not None, states=hidden)
        for i, (start, guesses) in enumerate(zip(starts, drawn, strict=True)):
            trees[start.row].extend(guesses, [] if survival is None else survival[i])
        if texts is not None:
            self.keep(seq_ids, [range(length) for length in lengths])
            return chains
        chains.num_read.update({s: min(len(guesses), n) for s, guesses, n in zip(seq_ids, drawn, counts, strict=True)})
        for seq_id in seq_ids:
            self.tails[seq_id].grow(None, chains.num_read[seq_id])
        self.cache.cut(seq_ids, [len(self.tails[seq_id].parents) for seq_id in seq_ids])  # ended rows leave room
        return chains

    def pack(self, reads: Sequence[Read]) -> TokenBatch:
        """Lay the reads out side by side; their room is reserved already."""
        tokens, positions, slots = list[int](), list[int](), list[int]()
        paths: list[AttentionPath] = []
        for read in reads:
            tail = self.tails.setdefault(read.seq_id, Tail(read.scratch))
            nodes = tail.grow(read.parents, len(read.tokens))
            length = self.cache.length(read.seq_id)
            first_slot = self.cache.start(read.seq_id) + length
            place = ReadSlots(first_slot - length, length, len(tokens), self.decoder.executor.query_rule)
            paths += chain_paths(tail, nodes, place) if tail.scratch == 0 else tree_paths(tail, nodes, place)
            tokens += read.tokens
            positions += [length + tail.depths[n] for n in nodes]
            slots += [first_slot + tail.scratch + n for n in nodes]
        arrays = [torch.from_numpy(np.array(numbers, np.int64)) for numbers in (tokens, positions, slots)]
        return TokenBatch(arrays[0], arrays[1], arrays[2], paths)

    def keep(self, seq_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Make a path of each sequence's tail final, node numbers in order, and forget the rest of the tail."""
        firsts = [self.tails.pop(seq_id).scratch for seq_id in seq_ids]
        self.cache.keep(seq_ids, [[first + n for n in path] for first, path in zip(firsts, paths, strict=True)])

    def hand_over(self, seq_ids: Sequence[int]) -> None:
        """Forget the tails of these sequences but leave what was read, for another runner over the same cache."""
        for seq_id in seq_ids:
            self.tails.pop(seq_id, None)

    def cut(self, seq_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Forget each sequence's tail but for its first `counts[i]` nodes; one with scratch goes as a whole.

        Returns how many nodes are left of each.
        """
        left = []
        for seq_id, count in zip(seq_ids, counts, strict=True):
            tail = self.tails.pop(seq_id, Tail(0))
            left.append(0 if tail.scratch else min(count, len(tail.parents)))
            if left[-1] > 0:
                self.tails[seq_id] = Tail(0, tail.parents[:count], tail.depths[:count])
        rows = [(seq_id, count) for seq_id, count in zip(seq_ids, left, strict=True) if seq_id in self.cache]
        self.cache.cut([seq_id for seq_id, _ in rows], [count for _, count in rows])
        return left

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forget the tails of these sequences."""
        self.cut(seq_ids, [0] * len(seq_ids))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget a sequence's tail, and its committed tokens from `length` on."""
        self.tails.pop(seq_id, None)
        self.cache.truncate([seq_id], [length])

    def clear(self) -> None:
        """Forget all sequences, whatever an interrupted pass left of them."""
        self.tails.clear()
        self.cache.clear()

    def retire(self, seq_id: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Drop a sequence and free its slots, but keep what it read of its text for texts that begin alike."""
        self.tails.pop(seq_id, None)
        self.cache.retire(seq_id, tokens, salt)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences and free their slots; unknown ones are ignored."""
        self.hand_over(seq_ids)
        self.cache.release(seq_ids)


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Where a read lies: its row's first slot, the row's committed length, its first packed token. How it is cut."""

    run: int
    length: int
    packed: int
    rule: QueryRule


def chain_paths(tail: Tail, nodes: range, place: ReadSlots) -> list[AttentionPath]:
    """The one path of a chain: its nodes are where a chain's belong."""
    assert tail.is_chain, "a branching tail needs scratch slots on its first read"
    queries = list(range(place.packed, place.packed + len(nodes)))
    return make_paths(queries, [place.length + n for n in nodes], place.run, place.rule)


def tree_paths(tail: Tail, nodes: range, place: ReadSlots) -> list[AttentionPath]:
    """One path per new leaf, each query on the first path that holds it."""
    inner = {tail.parents[n] for n in nodes}
    seen: set[int] = set()
    paths = []
    for leaf in nodes:
        if leaf in inner:
            continue
        path = tail.path(leaf)
        assert len(path) <= tail.scratch, f"a path of {len(path)} nodes in a scratch of {tail.scratch}"
        fresh = [n for n in path if n >= nodes.start and n not in seen]
        seen.update(fresh)
        chain = place.run + place.length
        copy = Copy([chain + tail.scratch + n for n in path], chain)
        queries = [place.packed + n - nodes.start for n in fresh]
        positions = [place.length + tail.depths[n] for n in fresh]
        paths += make_paths(queries, positions, place.run, place.rule, copy)
    return paths


def make_paths(
    queries: list[int], positions: list[int], first_slot: int, rule: QueryRule, copy: Copy | None = None
) -> list[AttentionPath]:
    """A path from its packed token numbers and their positions, ascending; as many as the rule wants it cut into."""
    cuts = range(0, len(queries), rule.block)
    parts = [(queries[i : i + rule.block], positions[i : i + rule.block]) for i in cuts]
    return [AttentionPath(*part, first_slot, rule.pad, None if i else copy) for i, part in enumerate(parts)]

"""Runner: one model and its KV cache, with an interface of sequences and draft tokens.

This module assigns tokens to slots, positions and attention paths. A sequence's *tail* is what was read after its
committed text since the last `keep`: numbered nodes that form a chain or a tree, possibly from several reads. `keep`
commits a path of the tail. The target and every draft model use a Runner.

A tail that branches starts with `scratch` slots, into which each path is copied as a chain; its nodes are stored behind
them. A chain needs none, because its nodes are already in their final slots.
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
from forerun.models.chains import Chains, IdMap, JudgedChains, ParallelHeads, Start, UnreadTexts
from forerun.models.decoder import Decoder, Hidden, States
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree


class Read(NamedTuple):
    """Tokens of one sequence to read in the next pass, after its committed text and its tail.

    `parents[i]` is the number of a node of the tail, these tokens included (they follow the nodes already there); -1 is
    the committed text. None: a chain after the tail's last node. `judged` are the indices into `tokens` whose logits
    are needed. `scratch`, on the first read of a tail that will branch, is the length of its longest path.
    """

    seq_id: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    judged: Sequence[int] = ()
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Tokens that only the device knows yet: draft tokens sampled there.

    `source[i]` is the index into `tokens` (flattened) of the i-th token of all reads, packed; -1 if the read's own
    token is used. -1 in `tokens` is no token: its result is never used.
    """

    tokens: Int[Tensor, "batch nodes"]
    source: Sequence[int]

    def resolve(self, reads: Sequence[Read]) -> list[Read]:
        """The reads with all tokens on the host, which waits for them."""
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
    """Tokens that the layers below `layer` have already computed: their pass continues there.

    The first `counts[i]` tokens of the i-th read are a chain after the committed text. Their keys and values of those
    layers lie in the sequence's tail, where this read would put them, and nothing else does. `hidden`, packed over the
    reads, are their states.
    """

    layer: int
    counts: Sequence[int]
    hidden: Float[Tensor, "known hidden"]

    def places(self, reads: Sequence[Read]) -> list[int]:
        """Indices of these tokens among those of all reads, packed."""
        firsts = itertools.accumulate((len(read.tokens) for read in reads), initial=0)
        return [first + i for first, count in zip(firsts, self.counts, strict=False) for i in range(count)]


@dataclass(slots=True)
class Tail:
    """The nodes read after a sequence's committed text."""

    scratch: int
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0 hangs off the committed text

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the one before it."""
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
    """A verdict and, if requests want log-probabilities, those of the token sampled after each node (`ranked`)."""

    packed: Int[Tensor, "batch verdict"]
    ranked: Float[Tensor, "nodes numbers"] | None


class Runner:
    """Runs tokens through a decoder with its KV cache. One row per sequence; rows appear with their first read.

    `resumes`: whether a pass can continue one through the lower layers (`PartialPass`). `draws_unseen`: whether a
    device generates chains, and starts passes, before the host knows the tokens.
    """

    resumes: ClassVar[bool] = True
    draws_unseen: ClassVar[bool] = False

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.tails: dict[int, Tail] = {}

    @classmethod
    def of(cls, decoder: Decoder, num_tokens: int, block_size: int = 64, **options: Any) -> Runner:
        """A runner of the decoder with a new cache of `num_tokens`, in its dtype; with options of the class."""
        cache = PagedCache(**decoder.cache_shape, num_tokens=num_tokens, block_size=block_size)
        return cls(decoder, cache, **options)

    def lower(self, num_layers: int) -> Runner:
        """A runner of the decoder's first layers that shares the cache and the tails."""
        return type(self)(self.decoder.lower(num_layers), self.cache)

    @property
    def device(self) -> torch.device:
        return self.cache.keys.device

    @property
    def vocab_size(self) -> int:
        """Width of its logits: all ids that it can read, and padding."""
        return self.decoder.config.vocab_size

    @cached_property
    def window(self) -> int:
        """The longest text that it can read, if alone in its cache."""
        blocks = self.cache.blocks
        return min(self.decoder.config.max_positions, blocks.num_blocks * blocks.block_size)

    def length(self, seq_id: int) -> int:
        """Number of committed tokens; 0 for an unknown sequence."""
        return self.cache.length(seq_id) if seq_id in self.cache else 0

    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        begun: PartialPass | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
    ) -> States:
        """One pass over all reads. Raises OutOfBlocks, with nothing changed, if the cache is full.

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
        """The result of a whole pass, with the same bits: the lower layers run for tokens outside `known` only."""
        rest = sorted(set(range(len(batch.tokens))) - set(known))
        inputs = begun.hidden.new_empty(len(batch.tokens), self.decoder.config.hidden)
        inputs[torch.tensor(known)] = begun.hidden
        if rest:
            lower = self.decoder.forward(batch.some(rest), self.cache, layers=range(begun.layer))
            inputs[torch.tensor(rest)] = lower.last
        layers = range(begun.layer, self.decoder.config.layers)
        return self.decoder.forward(batch, self.cache, layers=layers, inputs=inputs, taps=taps)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """The logits of these states of a pass."""
        return self.decoder.logits(hidden)

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """Sample after all nodes and apply a rule, in one call; None except on a GPU."""
        return None

    def read_ahead(
        self, seq_ids: Sequence[int], verdict: Int[Tensor, "batch verdict"], taps: Sequence[int] = ()
    ) -> Download | None:
        """Start the pass over each sequence's newly sampled token, which follows its root; None except on a GPU."""
        return None

    def begin_chains(
        self, judged: JudgedChains, starts: Sequence[Start], ids: IdMap, texts: UnreadTexts
    ) -> Download | None:
        """Start the chains that follow a verified round, whose nodes are the unread texts; None except on a GPU."""
        return None

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[Start],
        logits: Float[Tensor, "starts vocab"] | None,
        ids: IdMap,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
        texts: UnreadTexts | None = None,
        heads: ParallelHeads | None = None,
    ) -> Chains | None:
        """Generate chains after the tails in one call; all but a chain's last token join its tail.

        `logits` are those after the tails' last nodes, over the target's ids, and `before` the states there, for
        decoders that read states. None, with nothing changed, if there is no such call for the decoder, these ids or
        these draws, or if the cache is full. `states`: whether to return those of the draft tokens that are read.

        With `texts` these are read and kept first, in the same call, which computes logits and states itself; the draft
        tokens are then dropped again. With `heads` no pass runs between draft tokens, on a GPU only.
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
        """The reads as one TokenBatch; their slots are reserved already."""
        tokens, positions, slots = list[int](), list[int](), list[int]()
        paths: list[AttentionPath] = []
        for read in reads:
            tail = self.tails.setdefault(read.seq_id, Tail(read.scratch))
            nodes = tail.grow(read.parents, len(read.tokens))
            length = self.cache.length(read.seq_id)
            first_slot = self.cache.start(read.seq_id) + length
            rule, queries = self.decoder.executor.query_rule, range(len(tokens), len(tokens) + len(nodes))
            if tail.scratch:
                paths += tree_paths(tail, nodes, queries, first_slot, length, rule)
            else:  # a chain, whose nodes are in their final slots
                assert tail.is_chain, "a branching tail needs scratch slots on its first read"
                paths += make_paths(queries, [length + n for n in nodes], first_slot - length, rule)
            tokens += read.tokens
            positions += [length + tail.depths[n] for n in nodes]
            slots += [first_slot + tail.scratch + n for n in nodes]
        arrays = [torch.from_numpy(np.array(numbers, np.int64)) for numbers in (tokens, positions, slots)]
        return TokenBatch(arrays[0], arrays[1], arrays[2], paths)

    def keep(self, seq_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit a path of each sequence's tail, node numbers in order, and drop the rest of the tail."""
        firsts = [self.tails.pop(seq_id).scratch for seq_id in seq_ids]
        self.cache.keep(seq_ids, [[first + n for n in path] for first, path in zip(firsts, paths, strict=True)])

    def hand_over(self, seq_ids: Sequence[int]) -> None:
        """Drop the tails of these sequences but leave the cache, for another runner with the same cache."""
        for seq_id in seq_ids:
            self.tails.pop(seq_id, None)

    def cut(self, seq_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Drop all but the first `counts[i]` nodes of each sequence's tail; a tail with scratch is dropped as a whole.

        Returns the number of nodes left of each.
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
        """Drop the tails of these sequences."""
        self.cut(seq_ids, [0] * len(seq_ids))

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop a sequence's tail, and its committed tokens from `length` on."""
        self.tails.pop(seq_id, None)
        self.cache.truncate([seq_id], [length])

    def clear(self) -> None:
        """Drop all sequences, also what an interrupted pass left of them."""
        self.tails.clear()
        self.cache.clear()

    def retire(self, seq_id: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Drop a sequence and free its slots, but keep its text in the prefix cache."""
        self.tails.pop(seq_id, None)
        self.cache.retire(seq_id, tokens, salt)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences and free their slots; unknown ones are ignored."""
        self.hand_over(seq_ids)
        self.cache.release(seq_ids)


def tree_paths(
    tail: Tail, nodes: range, queries: range, first_slot: int, length: int, rule: QueryRule
) -> list[AttentionPath]:
    """One path per new leaf; each query is on the first path that contains it. The committed text has `length` tokens,
    and the tail's slots begin at `first_slot`."""
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
        copy = Copy([first_slot + tail.scratch + n for n in path], first_slot)
        positions = [length + tail.depths[n] for n in fresh]
        paths += make_paths([queries[n - nodes.start] for n in fresh], positions, first_slot - length, rule, copy)
    return paths


def make_paths(
    queries: Sequence[int], positions: list[int], first_slot: int, rule: QueryRule, copy: Copy | None = None
) -> list[AttentionPath]:
    """A path from packed token indices and their positions, ascending; split as the query rule requires."""
    cuts = range(0, len(queries), rule.block)
    parts = [(queries[i : i + rule.block], positions[i : i + rule.block]) for i in cuts]
    return [AttentionPath(*part, first_slot, rule.pad, None if i else copy) for i, part in enumerate(parts)]

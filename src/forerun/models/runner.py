"""Runner: one model and its KV cache, with an interface of sequences and draft tokens.

The target and every draft model use a Runner. It assigns cache slots, positions and attention paths to tokens. A
sequence's *tail* is what was read after its committed text: numbered nodes that form a chain or a tree, possibly over
several reads. `keep` commits one path of the tail and drops its other nodes.

The slots of a tail that branches begin with a scratch area, into which each path is copied as a chain before attention;
the nodes themselves are stored after it. A chain needs no scratch area, since its nodes are in their final slots.
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
from forerun.models.batch import AttentionPath, QueryRule, SlotCopy, TokenBatch
from forerun.models.chains import Chains, ChainStart, IdMap, ParallelHeads, UnreadTexts, VerifiedChains
from forerun.models.decoder import Decoder, LayerOutputs, Outputs
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree


class Read(NamedTuple):
    """Tokens of one sequence to read in the next pass; they become the next nodes of its tail.

    `parents[i]` is the number of the node before `tokens[i]`, an earlier node of the tail; -1: the committed text.
    `parents` None: a chain after the tail's last node. `judged` are the indices into `tokens` whose logits are needed.
    `scratch`, on the first read of a tail that will branch, is the number of nodes of its longest path.
    """

    seq_id: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    judged: Sequence[int] = ()
    scratch: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Draft tokens that were sampled on the device and that the host does not know yet.

    `source[i]` is the index into the flattened `tokens` for the i-th token of all reads, packed; -1: the token in the
    read is used. A -1 in `tokens` stands for no token; any token may be read in its place, since its result is unused.
    """

    tokens: Int[Tensor, "batch nodes"]
    source: Sequence[int]

    def resolve(self, reads: Sequence[Read]) -> list[Read]:
        """The reads with all tokens filled in; waits for the device."""
        known, first, resolved = self.tokens.flatten().tolist(), 0, list[Read]()
        for read in reads:
            sources = self.source[first : first + len(read.tokens)]
            tokens = [t if at < 0 else max(0, known[at]) for t, at in zip(read.tokens, sources, strict=True)]
            resolved.append(read._replace(tokens=tokens))
            first += len(read.tokens)
        return resolved


@dataclass(frozen=True, slots=True)
class PartialPass:
    """The output of the layers below `layer` for some tokens of a pass, which then run through the other layers only.

    They are the first `counts[i]` tokens of read i: a chain after the committed text that is the sequence's entire
    tail, so that its keys and values are where this read puts them. `hidden` are the packed streams entering `layer`.
    """

    layer: int
    counts: Sequence[int]
    hidden: Float[Tensor, "known hidden"]

    def places(self, reads: Sequence[Read]) -> list[int]:
        """The indices of these tokens among the tokens of all reads, packed."""
        firsts = itertools.accumulate((len(read.tokens) for read in reads), initial=0)
        return [first + i for first, count in zip(firsts, self.counts, strict=False) for i in range(count)]


@dataclass(slots=True)
class Tail:
    """The nodes read after a sequence's committed text, whose children have parent -1 and depth 0."""

    scratch: int  # slots of the scratch area
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

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
        """Add `count` nodes with these parents (None: a chain after the last node); returns their numbers."""
        first = len(self.parents)
        for i in range(count):
            parent = first + i - 1 if parents is None else parents[i]
            assert parent < first + i, f"node {first + i} has parent {parent}, which is not before it"
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return range(first, first + count)


# The verdict on a tree, given the target's token after each node.
TreeRule = Callable[[DraftTree, Int[Tensor, "batch nodes"]], Int[Tensor, "batch verdict"]]


class Judged(NamedTuple):
    """A packed verdict and, if requests need log-probabilities, those of the target's token after each node."""

    packed: Int[Tensor, "batch verdict"]
    ranked: Float[Tensor, "nodes numbers"] | None


class Runner:
    """Runs tokens through a decoder with its KV cache. A sequence is added by its first read.

    `resumes`: whether `read` supports a PartialPass. `draws_unseen`: whether the device samples draft tokens and starts
    passes before the host knows the tokens, as on a GPU.
    """

    resumes: ClassVar[bool] = True
    draws_unseen: ClassVar[bool] = False

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.tails: dict[int, Tail] = {}

    @classmethod
    def of(cls, decoder: Decoder, num_tokens: int, block_size: int = 64, **options: Any) -> Runner:
        """A runner of this class with a new cache of `num_tokens`; `options` are further arguments of the class."""
        cache = PagedCache(**decoder.cache_shape, num_tokens=num_tokens, block_size=block_size)
        return cls(decoder, cache, **options)

    def lower(self, num_layers: int) -> Runner:
        """A runner of the decoder's first layers that uses the same cache, with tails of its own."""
        return type(self)(self.decoder.lower(num_layers), self.cache)

    @property
    def device(self) -> torch.device:
        return self.cache.keys.device

    @property
    def vocab_size(self) -> int:
        """The width of the logits: all token ids that the model can read, and padding."""
        return self.decoder.config.vocab_size

    @cached_property
    def window(self) -> int:
        """The longest text in tokens that the model can read, if no other sequence is in the cache."""
        blocks = self.cache.blocks
        return min(self.decoder.config.max_positions, blocks.num_blocks * blocks.block_size)

    def length(self, seq_id: int) -> int:
        """The number of committed tokens; 0 for an unknown sequence."""
        return self.cache.length(seq_id) if seq_id in self.cache else 0

    def read(
        self,
        reads: Sequence[Read],
        taps: Sequence[int] = (),
        drawn: DeviceTokens | None = None,
        partial: PartialPass | None = None,
        inputs: Float[Tensor, "total hidden"] | None = None,
    ) -> Outputs:
        """One pass over all reads. Raises OutOfBlocks, with nothing changed, if the cache is full.

        `drawn` fills in tokens that only the device knows. The tokens of a `partial` start at its layer; all taps
        must then be of that layer or later ones. `inputs`, packed over the reads, replace the tokens' embeddings.
        """
        reads = reads if drawn is None else drawn.resolve(reads)
        counts = [len(r.tokens) + (0 if r.seq_id in self.tails else r.scratch) for r in reads]
        if partial is not None:
            tails = [self.cache.tail(read.seq_id) for read in reads]
            assert all(n in (0, tail) for n, tail in zip(partial.counts, tails, strict=True)), "a tail is not known"
            counts = [count - n for count, n in zip(counts, partial.counts, strict=True)]
        self.cache.reserve([r.seq_id for r in reads], counts)
        batch = self.pack(reads)
        if partial is None:
            hidden = self.decoder.forward(batch, self.cache, inputs=inputs, taps=taps)
        else:
            hidden = self.resume(batch, taps, partial, partial.places(reads))
        firsts = list(itertools.accumulate((len(r.tokens) for r in reads), initial=0))
        judged = [first + i for first, r in zip(firsts, reads, strict=False) for i in r.judged]
        if not judged:
            return Outputs(hidden.last.new_empty(0, self.vocab_size), hidden.last, hidden.tapped)
        last = hidden.last if judged == list(range(firsts[-1])) else hidden.last[torch.tensor(judged)]
        return Outputs(self.decoder.logits(last), hidden.last, hidden.tapped)

    def resume(
        self, batch: TokenBatch, taps: Sequence[int], partial: PartialPass, known: Sequence[int]
    ) -> LayerOutputs:
        """The result of a complete pass, to the bit; `known` are the indices of the partial pass's tokens."""
        rest = sorted(set(range(len(batch.tokens))) - set(known))
        inputs = partial.hidden.new_empty(len(batch.tokens), self.decoder.config.hidden)
        inputs[torch.tensor(known)] = partial.hidden
        if rest:
            lower = self.decoder.forward(batch.select(rest), self.cache, layers=range(partial.layer))
            inputs[torch.tensor(rest)] = lower.last
        layers = range(partial.layer, self.decoder.config.layers)
        return self.decoder.forward(batch, self.cache, layers=layers, inputs=inputs, taps=taps)

    def logits(self, hidden: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows vocab"]:
        """The logits of these hidden states of a pass."""
        return self.decoder.logits(hidden)

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Judged | None:
        """Sample the target's token after each node and apply `rule`, in one call; None except on a GPU."""
        return None

    def read_ahead(
        self, seq_ids: Sequence[int], verdict: Int[Tensor, "batch verdict"], taps: Sequence[int] = ()
    ) -> Download | None:
        """Start the next pass, over the token that the verdict gives each sequence; None except on a GPU."""
        return None

    def begin_chains(
        self, judged: VerifiedChains, starts: Sequence[ChainStart], ids: IdMap, texts: UnreadTexts
    ) -> Download | None:
        """Start the chains after a verified round, whose nodes are the unread `texts`; None except on a GPU."""
        return None

    def draw_chains(
        self,
        draws: Draws,
        starts: Sequence[ChainStart],
        logits: Float[Tensor, "starts vocab"] | None,
        ids: IdMap,
        states: bool = False,
        before: Float[Tensor, "starts hidden"] | None = None,
        texts: UnreadTexts | None = None,
        heads: ParallelHeads | None = None,
    ) -> Chains | None:
        """Generate chains after the tails in one call; all tokens of a chain except the last are read into its tail.

        `logits` are those after the tails' last nodes, over the target's ids, and `before` the hidden states there, for
        decoders that read states. With `texts`, the call reads and commits these first, computes logits and states
        itself, and does not keep the draft tokens. With `heads`, on a GPU only, no pass runs between draft tokens.
        `states`: whether to return the residual streams at the draft tokens that are read. None, with nothing changed,
        if there is no such call for this decoder, these ids or these draws, or if the cache is full.
        """
        seq_ids, lengths = [start.seq_id for start in starts], [0] * len(starts)
        if texts is not None:
            lengths = [len(text) for text in texts.tokens]
        counts = [length + max(0, start.depth - 1) for start, length in zip(starts, lengths, strict=True)]
        reads_states = before is not None or texts is not None
        draw = self.decoder.executor.chain_drawer(draws, reads_states) if ids.same_ids and heads is None else None
        if draw is None or not self.cache.can_reserve(seq_ids, counts):
            return None
        tails = [self.tails.setdefault(seq_id, Tail(0)) for seq_id in seq_ids]
        assert all(tail.scratch == 0 for tail in tails), "chains can only follow tails that are chains"
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
        chains = Chains(trees, {}, has_survival=survival is not None, states=hidden)
        for i, (start, tokens) in enumerate(zip(starts, drawn, strict=True)):
            trees[start.row].extend(tokens, [] if survival is None else survival[i])
        if texts is not None:
            self.keep(seq_ids, [range(length) for length in lengths])
            return chains
        for seq_id, tail, tokens, most in zip(seq_ids, tails, drawn, counts, strict=True):
            chains.num_read[seq_id] = len(tail.grow(None, min(len(tokens), most)))
        self.cache.cut(seq_ids, [len(tail.parents) for tail in tails])  # frees the slots of chains that ended early
        return chains

    def pack(self, reads: Sequence[Read]) -> TokenBatch:
        """The reads as one TokenBatch; adds their nodes to the tails. Their cache slots must be reserved."""
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
        """Commit one path of each sequence's tail, given as node numbers in order, and drop its other nodes."""
        firsts = [self.tails.pop(seq_id).scratch for seq_id in seq_ids]
        self.cache.keep(seq_ids, [[first + n for n in path] for first, path in zip(firsts, paths, strict=True)])

    def hand_over(self, seq_ids: Sequence[int]) -> None:
        """Forget the tails of these sequences without changing the cache, which another runner uses from now on."""
        for seq_id in seq_ids:
            self.tails.pop(seq_id, None)

    def cut(self, seq_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Drop all but the first `counts[i]` nodes of each sequence's tail; a tail with a scratch area is dropped.

        Returns the number of nodes that are left of each tail.
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
        """Drop all sequences, including those that an interrupted pass left in an invalid state."""
        self.tails.clear()
        self.cache.clear()

    def retire(self, seq_id: int, tokens: Sequence[int], salt: Hashable) -> None:
        """Drop a sequence, whose text stays in the prefix cache under `salt` until its slots are needed."""
        self.tails.pop(seq_id, None)
        self.cache.retire(seq_id, tokens, salt)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences and free their slots; unknown ones are ignored."""
        self.hand_over(seq_ids)
        self.cache.release(seq_ids)


def tree_paths(
    tail: Tail, nodes: range, queries: range, first_slot: int, length: int, rule: QueryRule
) -> list[AttentionPath]:
    """One path per leaf among the new `nodes`; each node's query is on the first path that contains it.

    `queries` are the nodes' indices in the batch; the tail's slots begin at `first_slot`, after `length` tokens.
    """
    inner = {tail.parents[n] for n in nodes}
    done: set[int] = set()
    paths = []
    for leaf in nodes:
        if leaf in inner:
            continue
        path = tail.path(leaf)
        assert len(path) <= tail.scratch, f"a path of {len(path)} nodes in a scratch of {tail.scratch}"
        fresh = [n for n in path if n >= nodes.start and n not in done]
        done.update(fresh)
        copy = SlotCopy([first_slot + tail.scratch + n for n in path], first_slot)
        positions = [length + tail.depths[n] for n in fresh]
        paths += make_paths([queries[n - nodes.start] for n in fresh], positions, first_slot - length, rule, copy)
    return paths


def make_paths(
    queries: Sequence[int], positions: list[int], first_slot: int, rule: QueryRule, copy: SlotCopy | None = None
) -> list[AttentionPath]:
    """The attention path of these token indices, at ascending `positions`; several if `rule` limits their queries."""
    cuts = range(0, len(queries), rule.block)
    parts = [(queries[i : i + rule.block], positions[i : i + rule.block]) for i in cuts]
    return [AttentionPath(*part, first_slot, rule.pad, None if i else copy) for i, part in enumerate(parts)]

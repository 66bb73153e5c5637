"""TokenBatch: the input of a pass: tokens, the cache slots of their keys and values, and the keys they attend to.

A prompt chunk or a chain is one attention path; a tree has one path per leaf. Before attention on a path of a tree, the
keys and values of its draft tokens are copied to consecutive slots, where a chain would have them. So every query
attends to the same keys in the same order as in plain decoding, and gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from forerun.annotations import Float, Int

KEY_PAD = 512  # the number of keys is padded to a multiple of this; padding keys are masked


@dataclass(frozen=True, slots=True)
class QueryRule:
    """How a backend needs the queries of a path: at most `block` at a time, padded to a multiple of `pad`."""

    pad: int
    block: int = 1 << 30


SINGLE_QUERIES = QueryRule(1)  # for backends that compute each query by itself


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Keys and values to copy before attention, from the slots `source`, in order, to the slots from `first` on."""

    source: Sequence[int]
    first: int


@dataclass(frozen=True)
class AttentionPath:
    """The queries of one path of one sequence, and where their keys are.

    `queries` are indices into the batch's tokens, and `positions` their positions, ascending. The key of position p is
    in slot `first_slot + p`; a query attends to the keys up to its own position.
    """

    queries: Sequence[int]
    positions: Sequence[int]
    first_slot: int
    pad: int = 1  # the number of queries is padded to a multiple of this, by repeating the last one
    copy: SlotCopy | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        """The number of keys up to the last query's, padded to a multiple of KEY_PAD."""
        return -(-(self.positions[-1] + 1) // KEY_PAD) * KEY_PAD

    @cached_property
    def padded_queries(self) -> Int[Tensor, " padded"]:
        return self.padded(self.queries)

    def padded(self, values: Sequence[int]) -> Int[Tensor, " padded"]:
        return torch.tensor([*values, *[values[-1]] * (-len(values) % self.pad)])

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Float[Tensor, "rows keys"]:
        """The additive mask, 0 where a query attends to a key, else -inf: the padded queries, `group` times."""
        if window not in self.masks:
            key = torch.arange(self.num_keys)
            positions = self.padded(self.positions)[:, None]
            attended = key <= positions
            if window is not None:
                attended &= key > positions - window
            mask = torch.zeros(attended.shape, dtype=dtype).masked_fill_(~attended, -math.inf)
            self.masks[window] = mask.repeat(group, 1)
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one pass, packed over sequences: prompt chunks, chains and trees."""

    tokens: Int[Tensor, " total"]
    positions: Int[Tensor, " total"]
    slots: Int[Tensor, " total"]  # where their keys and values are stored
    paths: list[AttentionPath]

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """A batch of only the tokens with these indices, ascending; they attend to the same keys."""
        number, index = {row: i for i, row in enumerate(rows)}, torch.tensor(rows, dtype=torch.long)
        paths = []
        for path in self.paths:
            chosen = [(number[q], p) for q, p in zip(path.queries, path.positions, strict=True) if q in number]
            if chosen:
                queries, positions = zip(*chosen, strict=True)
                paths.append(replace(path, queries=queries, positions=positions, masks={}))
        return TokenBatch(self.tokens[index], self.positions[index], self.slots[index], paths)

    def bidirectional(self) -> TokenBatch:
        """A batch without causal masks: every token of a sequence attends to all keys that its last token sees."""
        last: dict[int, int] = {}
        for path in self.paths:
            last[path.first_slot] = max(last.get(path.first_slot, 0), path.positions[-1])
        paths = [replace(p, positions=[last[p.first_slot]] * len(p.queries), masks={}) for p in self.paths]
        return replace(self, paths=paths)

    def without_first(self, count: int) -> tuple[TokenBatch, list[int] | slice]:
        """A batch of the tokens from position `count` on, which attend to keys from there on; and their indices.

        A batch of fixed shape keeps all rows, of which the tokens before `count` attend to nothing.
        """
        rows = [row for row, position in enumerate(self.positions.tolist()) if position >= count]
        part = self.select(rows)
        paths = [
            replace(p, positions=[at - count for at in p.positions], first_slot=p.first_slot + count, masks={})
            for p in part.paths
        ]
        return replace(part, paths=paths), rows

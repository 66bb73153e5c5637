"""TokenBatch: the input of a pass: tokens, the cache slots of their keys and values, and the keys they attend to.

A prompt chunk and a chain are one attention path; a tree is one path per leaf. Before a path attends, the keys and
values of its draft tokens are copied into the slots of a chain, so every path attends to exactly what plain decoding
would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from forerun.annotations import Float, Int

KEY_PAD = 512  # what the number of keys is padded to a multiple of, by masked ones


@dataclass(frozen=True, slots=True)
class QueryRule:
    """How a backend groups the queries of a path: padded to a multiple of `pad`, and at most `block` at a time."""

    pad: int
    block: int = 1 << 30


EACH_ALONE = QueryRule(1)  # of backends that read every query by itself


@dataclass(frozen=True, slots=True)
class Copy:
    """Draft tokens to lay out as a chain: copy cache slots `source`, in order, to the slots from `first` on."""

    source: Sequence[int]
    first: int


@dataclass(frozen=True)
class AttentionPath:
    """The queries of one path of one sequence: packed token indices, at ascending positions; and the keys' place.

    Keys are the slots from `first_slot` on; query i attends to those up to its own position.
    """

    queries: Sequence[int]
    positions: Sequence[int]
    first_slot: int
    pad: int = 1  # what the number of queries is padded to a multiple of, by repeating the last one
    copy: Copy | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        """Number of keys up to the last query's, padded."""
        return -(-(self.positions[-1] + 1) // KEY_PAD) * KEY_PAD

    @cached_property
    def padded_queries(self) -> Int[Tensor, " padded"]:
        return self.padded(self.queries)

    def padded(self, values: Sequence[int]) -> Int[Tensor, " padded"]:
        return torch.tensor([*values, *[values[-1]] * (-len(values) % self.pad)])

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Float[Tensor, "rows keys"]:
        """0 where a query attends to a key, -inf elsewhere; one row per query and head of a group."""
        if window not in self.masks:
            key = torch.arange(self.num_keys)
            positions = self.padded(self.positions)[:, None]
            seen = key <= positions
            if window is not None:
                seen &= key > positions - window
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            self.masks[window] = mask.repeat(group, 1)
        return self.masks[window]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens to read in one pass, packed over sequences: prompt chunks, chains and trees."""

    tokens: Int[Tensor, " total"]
    positions: Int[Tensor, " total"]
    slots: Int[Tensor, " total"]  # where their keys and values are stored
    paths: list[AttentionPath]

    def some(self, rows: Sequence[int]) -> TokenBatch:
        """A batch of some of the tokens, in ascending order, with the same keys."""
        number, index = {row: i for i, row in enumerate(rows)}, torch.tensor(rows, dtype=torch.long)
        paths = []
        for path in self.paths:
            chosen = [(number[q], p) for q, p in zip(path.queries, path.positions, strict=True) if q in number]
            if chosen:
                queries, positions = zip(*chosen, strict=True)
                paths.append(replace(path, queries=queries, positions=positions, masks={}))
        return TokenBatch(self.tokens[index], self.positions[index], self.slots[index], paths)

    def bidirectional(self) -> TokenBatch:
        """Non-causal: every token of a sequence attends to what its last one does. Positions do not change."""
        last: dict[int, int] = {}
        for path in self.paths:
            last[path.first_slot] = max(last.get(path.first_slot, 0), path.positions[-1])
        paths = [replace(p, positions=[last[p.first_slot]] * len(p.queries), masks={}) for p in self.paths]
        return replace(self, paths=paths)

    def without_first(self, count: int) -> tuple[TokenBatch, list[int] | slice]:
        """The tokens after the first `count` of their texts, with keys from there on, and these tokens' packed indices.
        A batch of fixed shape keeps all rows; the others attend to nothing.
        """
        rows = [row for row, position in enumerate(self.positions.tolist()) if position >= count]
        part = self.some(rows)
        paths = [
            replace(p, positions=[at - count for at in p.positions], first_slot=p.first_slot + count, masks={})
            for p in part.paths
        ]
        return replace(part, paths=paths), rows

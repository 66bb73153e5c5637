"""Attention over the cache, one root-to-leaf path at a time, with bits that do not depend on the company.

Decides how queries meet the cached keys on a CPU. A prompt chunk and a chain are one path; a tree is one path per
leaf. Before a path attends, the keys and values of its guesses are copied into the slots that a chain would use, so
every path sees exactly what plain decoding would see. Queries are padded to a multiple of 4 and keys to a multiple
of 512 (masked): with these two paddings torch's attention kernel gives a query the same bits for any number of
neighbours. Sliding windows mask; they never shift the view. Knows nothing of layers, norms or rotations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

QUERY_PAD = 4
KEY_PAD = 512


@dataclass(frozen=True, slots=True)
class Copy:
    """Guesses to lay out as a chain: cache slots `source`, in order, to the slots from `first` on."""

    source: Int[Tensor, " guesses"]
    first: int


@dataclass(frozen=True, slots=True)
class AttentionPath:
    """The queries of one path of one sequence, and where their keys lie.

    `queries` are packed token numbers, padded by repeating the last one; `outputs` those that are real. Keys are the
    slots from `first_slot` on, `num_keys` of them (padded); query i sees those up to its own position.
    """

    queries: Int[Tensor, " padded"]
    outputs: Int[Tensor, " real"]
    positions: Int[Tensor, " padded"]
    first_slot: int
    num_keys: int
    copy: Copy | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Float[Tensor, "rows keys"]:
        """0 where a query sees a key, -inf elsewhere; one row per query of each head of a group. Made once a pass."""
        if window not in self.masks:
            key = torch.arange(self.num_keys)
            seen = key <= self.positions[:, None]
            if window is not None:
                seen &= key > self.positions[:, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            self.masks[window] = mask.repeat(group, 1)
        return self.masks[window]


def make_path(queries: list[int], positions: list[int], first_slot: int, copy: Copy | None = None) -> AttentionPath:
    """A path from its packed token numbers and their positions, ascending."""
    padding = -len(queries) % QUERY_PAD
    num_keys = -(-(positions[-1] + 1) // KEY_PAD) * KEY_PAD
    padded = torch.tensor(queries + queries[-1:] * padding)
    return AttentionPath(
        queries=padded,
        outputs=padded[: len(queries)],
        positions=torch.tensor(positions + positions[-1:] * padding),
        first_slot=first_slot,
        num_keys=num_keys,
        copy=copy,
    )


def attend(
    q: Float[Tensor, "total heads head_dim"],
    keys: Float[Tensor, "kv_heads slots head_dim"],
    values: Float[Tensor, "kv_heads slots head_dim"],
    paths: list[AttentionPath],
    window: int | None,
) -> Float[Tensor, "total heads head_dim"]:
    """Each query's weighted sum of the values it sees; keys and values of all queries are in the cache already.

    Writes the copies that paths ask for into the cache, so the paths of a sequence must be in order.
    """
    out = torch.empty_like(q)
    for path in paths:
        if path.copy is not None:
            end = path.copy.first + len(path.copy.source)
            keys[:, path.copy.first : end] = keys[:, path.copy.source]
            values[:, path.copy.first : end] = values[:, path.copy.source]
        view = slice(path.first_slot, path.first_slot + path.num_keys)
        attended = attend_path(q[path.queries], keys[:, view], values[:, view], path, window)
        out[path.outputs] = attended[: len(path.outputs)]
    return out


def attend_path(
    q: Float[Tensor, "padded heads head_dim"],
    keys: Float[Tensor, "kv_heads keys head_dim"],
    values: Float[Tensor, "kv_heads keys head_dim"],
    path: AttentionPath,
    window: int | None,
) -> Float[Tensor, "padded heads head_dim"]:
    """One path: the query heads that share a key head are laid out as further rows, so keys are read once."""
    rows, heads, head_dim = q.shape
    kv_heads = len(keys)
    group = heads // kv_heads
    grouped = q.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
    mask = path.mask(window, group, q.dtype)
    out = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask[None, None])
    return out.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)

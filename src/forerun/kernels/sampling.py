"""The Python interface to the compiled parts of a round: draws, places in trees, verdicts, and the check of trees.

This file decides how tensors and host numbers become pointers. Each function gives exactly the result of the tensor
code that defines it, or reports that it cannot, so tokens do not depend on whether the kernels are available.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.kernels.build import NoKernels
from forerun.kernels.library import library, warn_of_torch

SLACK = 2.0**-14  # more than the kernels' noise can differ from torch's


@dataclass(frozen=True, slots=True)
class PlainLaws:
    """How rows draw where temperature is all there is: the key of each row's noise (uint64), and its temperature.

    Temperatures are float32, 0 where the row is greedy. Ids from `num_ids` on do not exist. A draw whose two best
    scores are closer than `slack`, and the rounding of scores, is not certain.
    """

    keys: array[int]
    temperatures: array[float]
    num_ids: int
    slack: float = SLACK

    def of(self, rows: Sequence[int]) -> PlainLaws:
        """Those of some rows."""
        if rows == list(range(len(self.keys))):
            return self
        keys = array("Q", [self.keys[row] for row in rows])
        return replace(self, keys=keys, temperatures=array("f", [self.temperatures[row] for row in rows]))


@dataclass(frozen=True, slots=True)
class OfferedGuesses:
    """Guesses and their survival by node, -1 and 0 where there are fewer; and the nodes of which it is not certain."""

    tokens: list[list[int]]
    survival: list[list[float]]
    undecided: list[int]


class SamplingKernels:
    """The library, opened. All tensors are contiguous and on the CPU; integers are int64.

    `slack` is that of all laws. Tests make it larger, so that uncertain draws become common; that changes how many
    draws torch decides, and no token.
    """

    slack: ClassVar[float] = SLACK

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        lib.forerun_choose.restype = lib.forerun_places.restype = c_int64
        lib.forerun_judge.restype = lib.forerun_clean.restype = c_int64
        n, p, f = c_int64, c_void_p, c_float
        lib.forerun_choose.argtypes = [p, n, n, n, p, p, p, p, f, p, n]
        lib.forerun_offer.restype = c_int64
        lib.forerun_offer.argtypes = [p, n, n, n, p, p, p, p, f, n, p, p, p, n]
        lib.forerun_places.argtypes = [p, p, n, n, p, p, p]
        lib.forerun_follow.argtypes = [p, p, n, n, p, n, p]
        lib.forerun_judge.argtypes = [p, p, n, n, p, p, n, n, n, p, p, f, n, p, n]
        lib.forerun_clean.argtypes = [p, p, n, n, p, p, n, n, n, p]

    def choose(
        self,
        logits: Float[Tensor, "nodes vocab"],
        rows: Sequence[int],
        positions: Sequence[int],
        laws: PlainLaws,
    ) -> Sequence[int] | None:
        """Each node's first largest of logits / temperature + noise, or of logits where the row's temperature is 0.

        Noise is keyed by the row's key and the node's position. None where a winner is not finite, or not certain.
        """
        own_rows, own_positions, found = as_array(rows), as_array(positions), zeros(len(rows))
        undecided = self.lib.forerun_choose(
            logits.data_ptr(),
            logits.shape[1],
            laws.num_ids,
            len(found),
            address(own_rows),
            address(own_positions),
            address(laws.keys),
            address(laws.temperatures),
            laws.slack,
            address(found),
            torch.get_num_threads(),
        )
        return None if undecided else found

    def offer(
        self,
        logits: Float[Tensor, "nodes vocab"],
        rows: Sequence[int],
        positions: Sequence[int],
        laws: PlainLaws,
        width: int,
    ) -> OfferedGuesses:
        """Each node's `width` largest of what `choose` takes the largest of, and their share of all, by softmax."""
        count = len(rows)
        own_rows, own_positions, tokens = as_array(rows), as_array(positions), zeros(count * width)
        survival, undecided = array("f", bytes(4 * count * width)), zeros(count)
        num_undecided = self.lib.forerun_offer(
            logits.data_ptr(),
            logits.shape[1],
            laws.num_ids,
            count,
            address(own_rows),
            address(own_positions),
            address(laws.keys),
            address(laws.temperatures),
            laws.slack,
            width,
            address(tokens),
            address(survival),
            address(undecided),
            torch.get_num_threads(),
        )
        starts = range(0, count * width, width)
        return OfferedGuesses(
            [tokens[start : start + width].tolist() for start in starts],
            [survival[start : start + width].tolist() for start in starts],
            [i for i, unsure in enumerate(undecided) if unsure] if num_undecided else [],
        )

    def places(
        self, tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"], roots: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """(row, position of the token drawn there) of each valid node; `roots` are the roots' positions."""
        batch, columns = tokens.shape
        own_roots, rows, positions = as_array(roots), zeros(batch * columns), zeros(batch * columns)
        tree = tokens.data_ptr(), parents.data_ptr(), batch, columns
        count = self.lib.forerun_places(*tree, address(own_roots), address(rows), address(positions))
        return rows[:count], positions[:count]

    def follow(
        self,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "batch nodes"],
        drawn: Sequence[int],
        depth: int,
    ) -> Int[Tensor, "batch verdict"]:
        """Per row: accepted length, next token, then the path, root first; `drawn` are the valid nodes' tokens."""
        batch, columns = tokens.shape
        verdict = torch.empty(batch, depth + 3, dtype=torch.int64)
        own_drawn, tree = as_array(drawn), (tokens.data_ptr(), parents.data_ptr(), batch, columns)
        self.lib.forerun_follow(*tree, address(own_drawn), depth, verdict.data_ptr())
        return verdict

    def judge(
        self,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "batch nodes"],
        roots: Sequence[int],
        logits: Float[Tensor, "rows vocab"],
        laws: PlainLaws,
        depth: int,
    ) -> Int[Tensor, "batch verdict"] | None:
        """`places`, `choose` and `follow` at once; None where a draw on an accepted path is not certain."""
        (batch, columns), own_roots = tokens.shape, as_array(roots)
        verdict = torch.empty(batch, depth + 3, dtype=torch.int64)
        undecided = self.lib.forerun_judge(
            tokens.data_ptr(),
            parents.data_ptr(),
            batch,
            columns,
            address(own_roots),
            logits.data_ptr(),
            *logits.shape,
            laws.num_ids,
            address(laws.keys),
            address(laws.temperatures),
            laws.slack,
            depth,
            verdict.data_ptr(),
            torch.get_num_threads(),
        )
        assert undecided >= 0, f"{len(logits)} rows of logits for a tree of {int((tokens >= 0).sum())} nodes"
        return None if undecided else verdict

    def clean(
        self,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "batch nodes"],
        roots: Int[Tensor, " batch"],
        limits: Sequence[tuple[int, int, int]],
        bounds: tuple[int, int, int],
    ) -> Iterator[list[list[int]]] | None:
        """Valid nodes, their parents and tokens by row, if all rows are trees within their limits; else None.

        A limit is depth, width and nodes. `bounds`, depth, width and vocabulary, hold for all rows.
        """
        batch, columns = tokens.shape
        flat, stride = array("q", [number for limit in limits for number in limit]), 1 + 3 * columns
        seen = zeros(batch * stride)
        tree = tokens.data_ptr(), parents.data_ptr(), batch, columns, roots.data_ptr()
        if not self.lib.forerun_clean(*tree, address(flat), *bounds, address(seen)):
            return None
        ends = [(first, first + seen[first - 1]) for first in range(1, len(seen), stride)]
        return ([seen[i + skip : end + skip].tolist() for i, end in ends] for skip in (0, columns, 2 * columns))


@cache
def opened(lib: ctypes.CDLL) -> SamplingKernels:
    """The library's face, made once."""
    return SamplingKernels(lib)


def find_sampling_kernels() -> SamplingKernels | None:
    """The kernels, compiled if need be; None, with a warning, where that is not possible."""
    try:
        return opened(library())
    except NoKernels as error:
        warn_of_torch(str(error))
        return None


def as_array(numbers: Sequence[int]) -> array[int]:
    """Host integers where C finds them."""
    return numbers if isinstance(numbers, array) else array("q", numbers)


def zeros(count: int) -> array[int]:
    """So many, for C to fill."""
    return array("q", bytes(8 * count))


def address(numbers: array[int] | array[float]) -> int:
    """Where an array's numbers lie, as long as somebody holds it."""
    return numbers.buffer_info()[0]

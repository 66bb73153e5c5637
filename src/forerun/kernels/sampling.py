"""SamplingKernels: the Python interface to the compiled functions that sample, verify, rank and check drafts.

This file passes distributions (laws), tensors and numbers to C and keeps their memory alive; `sampling/transforms.py`
defines the fields of a law. Each function gives exactly the result of the tensor code that defines it, or reports that
it cannot. So tokens do not depend on whether the kernels are available.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.kernels.build import NoKernels
from forerun.kernels.library import library, warn_of_torch
from forerun.kernels.threads import num_threads

UNKNOWN, UNDECIDED = -2, -3  # in place of a sampled token, as in sampling.cpp; -1 is torch's result without a law
SLACK = 2.0**-14  # an upper bound of the difference between the kernels' noise and torch's


class CRowLaw(Structure):
    """`RowLaw` in laws.hpp."""

    _fields_: ClassVar = [
        ("key", c_uint64),
        *((name, c_int64) for name in ("root", "torch_decides", "top_k")),
        *((name, c_float) for name in ("temperature", "min_p", "top_p", "repetition", "frequency", "presence")),
        *((name, c_int64) for name in ("ends_from", "num_fixed", "num_ends", "num_counted", "num_words", "num_ending")),
        *((name, c_void_p) for name in ("fixed", "ends", "counted", "added", "times", "words", "lengths", "ending")),
    ]

    def point_to(self, tables: Mapping[str, array[int] | array[float]]) -> None:
        """Set the pointers to these lists, which the caller keeps alive, and the numbers of their items."""
        for name, table in tables.items():
            setattr(self, name, address(table))
        for name in ("fixed", "ends", "counted", "ending"):
            setattr(self, f"num_{name}", len(tables[name]))
        self.num_words = len(tables["lengths"])


@dataclass(frozen=True, slots=True)
class RowLaws:
    """The laws of a round's rows. Ids from `num_ids` on are padding.

    `kept` owns the memory that `rows` point to. The kernels leave a sample to torch if its two best scores differ by
    less than `slack`, a bound of the difference between their noise and torch's. If rows are `constrained` by grammars,
    sampling needs masks of the nodes.
    """

    rows: Array[CRowLaw]
    kept: Sequence[object]
    num_ids: int
    slack: float
    constrained: bool = False

    @property
    def kernels_suffice(self) -> bool:
        """Whether the kernels can sample all rows without torch and without grammar masks."""
        return not self.constrained and not any(row.torch_decides for row in self.rows)

    def select(self, rows: Sequence[int]) -> RowLaws:
        """The laws of these rows, in this order."""
        if rows == list(range(len(self.rows))):
            return self
        return replace(self, rows=(CRowLaw * len(rows))(*(self.rows[row] for row in rows)))

    def call_arguments(
        self, logits: Float[Tensor, "nodes vocab"], masks: Int[Tensor, "nodes words"] | None = None
    ) -> tuple[int, float, int, int, int, int, int]:
        """The first arguments of the C functions that sample: laws, slack, logits, sizes, and grammar masks.

        Logits and masks must be contiguous; a mask has one bit for each logit, in int32 words.
        """
        count, vocab = logits.shape
        assert masks is not None or not self.constrained, "rows with grammars are sampled with masks"
        if masks is not None:
            assert masks.shape == (count, -(-vocab // 32)), (
                f"masks of {tuple(masks.shape)} for {count} x {vocab} logits"
            )
        num_ids = self.num_ids if self.num_ids < vocab else vocab
        allowed = 0 if masks is None else masks.data_ptr()
        return addressof(self.rows), self.slack, logits.data_ptr(), vocab, num_ids, count, allowed


@dataclass(frozen=True, slots=True)
class OfferedTokens:
    """Possible draft tokens after each node and their probabilities, padded with -1 and 0; and nodes left to torch."""

    tokens: list[list[int]]
    survival: list[list[float]]
    undecided: list[int]


class SamplingKernels:
    """The sampling functions of the library. All tensors must be contiguous and on the CPU, and integers int64.

    `slack` is used for all laws. Tests increase it so that torch decides more samples, which never changes a token.
    """

    slack: ClassVar[float] = SLACK

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        n, p = c_int64, c_void_p
        drawn_from: list[Any] = [p, c_float, p, n, n, n, p]
        lib.forerun_choose.restype = None
        lib.forerun_rank.restype = c_int64
        lib.forerun_rank.argtypes = [p, n, n, p, n, p, p, n]
        lib.forerun_offer.restype = lib.forerun_judge.restype = lib.forerun_clean.restype = c_int64
        lib.forerun_choose.argtypes = [*drawn_from, p, p, n]
        lib.forerun_offer.argtypes = [*drawn_from, p, n, p, p, p, n]
        lib.forerun_judge.argtypes = [*drawn_from, p, p, n, n, n, p, p, n]
        lib.forerun_clean.argtypes = [p, p, n, n, p, p, n, n, n, p]

    def choose(
        self,
        logits: Float[Tensor, "nodes vocab"],
        rows: Sequence[int],
        paths: Sequence[Sequence[int]],
        laws: RowLaws,
        masks: Int[Tensor, "nodes words"] | None = None,
    ) -> array[int]:
        """The token after each node: the lowest id with the largest score, as in `offer`; -1 if torch must decide."""
        at, chosen = places(rows, paths), zeros(len(rows))
        self.lib.forerun_choose(*laws.call_arguments(logits, masks), address(at), address(chosen), num_threads())
        return chosen

    def offer(
        self,
        logits: Float[Tensor, "nodes vocab"],
        rows: Sequence[int],
        paths: Sequence[Sequence[int]],
        laws: RowLaws,
        width: int,
        masks: Int[Tensor, "nodes words"] | None = None,
    ) -> OfferedTokens:
        """The ids of each node's `width` largest scores (the lowest ids first among equals), and their softmax.

        A node is given by its row and the draft tokens from the root to it. Its scores are the logits after the row's
        transforms, plus the noise of its position unless the row is greedy; -inf for ids that its mask excludes. The
        softmax, over all scores, is approximate: ids at the edge of a nucleus count as inside.
        """
        count = len(rows)
        tokens, undecided, survival = zeros(count * width), zeros(count), array("f", bytes(4 * count * width))
        at, out = places(rows, paths), (address(tokens), address(survival), address(undecided))
        threads = num_threads()
        num_undecided = self.lib.forerun_offer(*laws.call_arguments(logits, masks), address(at), width, *out, threads)
        starts = range(0, count * width, width)
        return OfferedTokens(
            [tokens[start : start + width].tolist() for start in starts],
            [survival[start : start + width].tolist() for start in starts],
            [i for i, is_undecided in enumerate(undecided) if is_undecided] if num_undecided else [],
        )

    def judge(
        self,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "batch nodes"],
        logits: Float[Tensor, "rows vocab"],
        laws: RowLaws,
        depth: int,
        drawn: array[int],
        masks: Int[Tensor, "rows words"] | None = None,
    ) -> Int[Tensor, "batch verdict"] | None:
        """The verdict by coupled sampling: for each row the accepted length, the next token, then the path, root first.

        Only nodes on accepted paths are sampled. `drawn` has an entry for every node, padding included: the token that
        was sampled after it already, or UNKNOWN; it receives the new samples. A sample that torch must decide becomes
        UNDECIDED there, and the result is None.
        """
        batch, columns = tokens.shape
        verdict = torch.empty(batch, depth + 3, dtype=torch.int64)
        tree = tokens.data_ptr(), parents.data_ptr(), batch, columns
        out = address(drawn), verdict.data_ptr()
        undecided = self.lib.forerun_judge(*laws.call_arguments(logits, masks), *tree, depth, *out, num_threads())
        assert undecided >= 0, f"{len(logits)} rows of logits for a tree of {int((tokens >= 0).sum())} nodes"
        return None if undecided else verdict

    def rank(
        self, values: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"], top: int
    ) -> tuple[Int[Tensor, " rows"], Int[Tensor, "rows {top}"]] | None:
        """The rank of each token among its row's values, from 1, and the ids of the `top` largest values; the lowest id
        comes first among equals. None if a row contains NaN, or fewer than `top` values above -inf."""
        count, vocab = values.shape
        ranks, ids = torch.empty(count, dtype=torch.int64), torch.empty(count, top, dtype=torch.int64)
        out, threads = (ranks.data_ptr(), ids.data_ptr()), num_threads()
        failed = self.lib.forerun_rank(values.data_ptr(), count, vocab, tokens.data_ptr(), top, *out, threads)
        return None if failed else (ranks, ids)

    def clean(
        self,
        tokens: Int[Tensor, "batch nodes"],
        parents: Int[Tensor, "batch nodes"],
        roots: Int[Tensor, " batch"],
        limits: Sequence[tuple[int, int, int]],
        bounds: tuple[int, int, int],
    ) -> Iterator[list[list[int]]] | None:
        """The valid nodes, their parents and their tokens by row, if all rows are trees within their limits; else None.

        `limits` are (depth, width, nodes) of each row, and `bounds` (depth, width, vocabulary) of all rows.
        """
        batch, columns = tokens.shape
        flat, stride = array("q", [number for limit in limits for number in limit]), 1 + 3 * columns
        seen = zeros(batch * stride)
        tree = tokens.data_ptr(), parents.data_ptr(), batch, columns, roots.data_ptr()
        if not self.lib.forerun_clean(*tree, address(flat), *bounds, address(seen)):
            return None
        ends = [(first, first + seen[first - 1]) for first in range(1, len(seen), stride)]
        return ([seen[i + skip : end + skip].tolist() for i, end in ends] for skip in (0, columns, 2 * columns))


def places(rows: Sequence[int], paths: Sequence[Sequence[int]]) -> array[int]:
    """Nodes, given by their rows and their paths of draft tokens, packed for the C functions."""
    return array("q", [*rows, *map(len, paths), *itertools.chain(*paths)])


def zeros(count: int) -> array[int]:
    """An array of `count` zeros, for C to fill."""
    return array("q", bytes(8 * count))


def address(numbers: array[int] | array[float]) -> int:
    """The address of an array's numbers, valid as long as the array exists and keeps its length."""
    return numbers.buffer_info()[0]


@cache
def opened(lib: ctypes.CDLL) -> SamplingKernels:
    """The SamplingKernels of a library, one object for each."""
    return SamplingKernels(lib)


def find_sampling_kernels() -> SamplingKernels | None:
    """The sampling kernels, compiled if needed; None, with a warning, if there are none."""
    try:
        return opened(library())
    except NoKernels as error:
        warn_of_torch(str(error))
        return None

"""The Python interface to the compiled parts of a round: draws, verdicts, ranks, and the check of drafts.

This file decides how rows' laws, tensors and host numbers lie in memory, and keeps that memory alive. What the numbers
of a law say of logits is defined in `sampling/transforms.py`. Each function gives exactly the result of the tensor code
that defines it, or reports that it cannot, so tokens do not depend on whether the kernels are available.
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

UNKNOWN, UNDECIDED = -2, -3  # in the place of a drawn token, as in sampling.cpp; -1 is what torch draws without a law
SLACK = 2.0**-14  # more than the kernels' noise can differ from torch's


class CRowLaw(Structure):
    """`RowLaw` in laws.hpp."""

    _fields_: ClassVar = [
        ("key", c_uint64),
        *((name, c_int64) for name in ("root", "torch_decides", "top_k")),
        *((name, c_float) for name in ("temperature", "min_p", "top_p", "repetition", "frequency", "presence")),
        *((name, c_int64) for name in ("ends_from", "num_fixed", "num_ends", "num_counted", "num_words", "num_said")),
        *((name, c_void_p) for name in ("fixed", "ends", "counted", "added", "times", "words", "lengths", "said")),
    ]

    def point_to(self, tables: Mapping[str, array[int] | array[float]]) -> None:
        """Point to these lists, which the caller keeps alive; those of one length have one count."""
        for name, table in tables.items():
            setattr(self, name, address(table))
        for name in ("fixed", "ends", "counted", "said"):
            setattr(self, f"num_{name}", len(tables[name]))
        self.num_words = len(tables["lengths"])


@dataclass(frozen=True, slots=True)
class RowLaws:
    """The laws of a round's rows. Ids from `num_ids` on do not exist.

    `kept` owns the memory that `rows` point to. Kernels leave to torch what they cannot be certain of by `slack`, which
    is more than their noise can differ from torch's. Where rows are `constrained` by grammars, a draw needs the masks
    of its nodes.
    """

    rows: Array[CRowLaw]
    kept: Sequence[object]
    num_ids: int
    slack: float
    constrained: bool = False

    @property
    def compiled(self) -> bool:
        """Whether kernels draw for every row by themselves; else torch draws for some, or Python makes masks."""
        return not self.constrained and not any(row.torch_decides for row in self.rows)

    def some(self, rows: Sequence[int]) -> RowLaws:
        """Those of some rows, in the order asked for."""
        if rows == list(range(len(self.rows))):
            return self
        return replace(self, rows=(CRowLaw * len(rows))(*(self.rows[row] for row in rows)))

    def of(
        self, logits: Float[Tensor, "nodes vocab"], masks: Int[Tensor, "nodes words"] | None = None
    ) -> tuple[int, float, int, int, int, int, int]:
        """What a draw from these logits is told first: laws, slack, logits, their numbers, and the masks of grammars.

        Logits and masks are contiguous; a mask has a bit for each logit, in int32.
        """
        count, vocab = logits.shape
        assert masks is not None or not self.constrained, "a round with grammars draws with masks"
        if masks is not None:
            assert masks.shape == (count, -(-vocab // 32)), (
                f"masks of {tuple(masks.shape)} for {count} x {vocab} logits"
            )
        num_ids = self.num_ids if self.num_ids < vocab else vocab
        allowed = 0 if masks is None else masks.data_ptr()
        return addressof(self.rows), self.slack, logits.data_ptr(), vocab, num_ids, count, allowed


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
        """The first largest score of each node, -1 where it is not certain; `offer` says what scores are."""
        at, chosen = places(rows, paths), zeros(len(rows))
        self.lib.forerun_choose(*laws.of(logits, masks), address(at), address(chosen), num_threads())
        return chosen

    def offer(
        self,
        logits: Float[Tensor, "nodes vocab"],
        rows: Sequence[int],
        paths: Sequence[Sequence[int]],
        laws: RowLaws,
        width: int,
        masks: Int[Tensor, "nodes words"] | None = None,
    ) -> OfferedGuesses:
        """Each node's `width` first largest scores, and their share of all, by softmax.

        A node is a row and the guesses behind its root. Its scores are its logits by the row's law plus the noise of
        its position, or without noise where the row is greedy; -inf for ids whose bit in its mask is not set. A share
        is near the exact one: what may be outside of a nucleus counts as inside.
        """
        count = len(rows)
        tokens, undecided, survival = zeros(count * width), zeros(count), array("f", bytes(4 * count * width))
        at, out = places(rows, paths), (address(tokens), address(survival), address(undecided))
        threads = num_threads()
        num_undecided = self.lib.forerun_offer(*laws.of(logits, masks), address(at), width, *out, threads)
        starts = range(0, count * width, width)
        return OfferedGuesses(
            [tokens[start : start + width].tolist() for start in starts],
            [survival[start : start + width].tolist() for start in starts],
            [i for i, unsure in enumerate(undecided) if unsure] if num_undecided else [],
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
        """Per row the accepted length, the next token, then the path, root first, by the target's own draws.

        Only draws on accepted paths are made. `drawn` has a place for every node, padding included: it holds tokens
        that are drawn already, UNKNOWN elsewhere, and gets what is drawn here. A draw that is not certain is marked
        UNDECIDED, and there is no verdict, None.
        """
        batch, columns = tokens.shape
        verdict = torch.empty(batch, depth + 3, dtype=torch.int64)
        tree = tokens.data_ptr(), parents.data_ptr(), batch, columns
        out = address(drawn), verdict.data_ptr()
        undecided = self.lib.forerun_judge(*laws.of(logits, masks), *tree, depth, *out, num_threads())
        assert undecided >= 0, f"{len(logits)} rows of logits for a tree of {int((tokens >= 0).sum())} nodes"
        return None if undecided else verdict

    def rank(
        self, values: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"], top: int
    ) -> tuple[Int[Tensor, " rows"], Int[Tensor, "rows {top}"]] | None:
        """Each token's rank among its row's values, from 1, and the `top` largest; the lowest id first among equals.

        None where a row has NaN, or fewer values above -inf.
        """
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


def places(rows: Sequence[int], paths: Sequence[Sequence[int]]) -> array[int]:
    """Nodes behind these guesses of these rows, as `forerun_choose` reads them."""
    return array("q", [*rows, *map(len, paths), *itertools.chain(*paths)])


def zeros(count: int) -> array[int]:
    """So many integers, for C to fill."""
    return array("q", bytes(8 * count))


def address(numbers: array[int] | array[float]) -> int:
    """Where an array's numbers lie, as long as somebody holds it."""
    return numbers.buffer_info()[0]


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

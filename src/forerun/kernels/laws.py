"""How rows draw, as compiled kernels read it: the laws of a round's rows, and the places at which they draw.

This file decides how these lie in memory, and keeps that memory alive. What the numbers say of logits is defined in
`sampling/transforms.py`; `sampling/row_laws.py` takes them from requests and texts.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from forerun.annotations import Float, Int

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


def places(rows: Sequence[int], paths: Sequence[Sequence[int]]) -> array[int]:
    """Nodes behind these guesses of these rows, as `forerun_choose` reads them."""
    return array("q", [*rows, *map(len, paths), *itertools.chain(*paths)])


def zeros(count: int) -> array[int]:
    """So many integers, for C to fill."""
    return array("q", bytes(8 * count))


def address(numbers: array[int] | array[float]) -> int:
    """Where an array's numbers lie, as long as somebody holds it."""
    return numbers.buffer_info()[0]

"""Row laws: the parameters, text and noise of a round's rows, as compiled kernels read them.

This file decides which number of a request becomes which of a `RowLaw`; all are float32, as in `transforms.py`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from forerun.kernels.laws import CRowLaw, RowLaws, address
from forerun.sampling.edits import TextEdits
from forerun.sampling.transforms import RowSampling


def row_laws(rows: Sequence[RowSampling], keys: Sequence[int], num_ids: int, slack: float) -> RowLaws:
    """How these rows draw. `keys` are those of their noise, of 64 bits, with the position still to be absorbed."""
    kept: list[object] = []
    laws = [row_law(row, key, kept) for row, key in zip(rows, keys, strict=True)]
    constrained = any(row.constraint is not None for row in rows)
    return RowLaws((CRowLaw * len(laws))(*laws), kept, num_ids, slack, constrained)


def row_law(row: RowSampling, key: int, kept: list[object]) -> CRowLaw:
    """How one row draws; what it points to is added to `kept`. Only torch can call a request's own processors."""
    p = row.params
    law = CRowLaw(
        key,
        len(row.tokens) - 1,
        bool(p.logits_processors),
        max(p.top_k, 0),
        0.0 if p.greedy else p.temperature,
        math.log(p.min_p) if p.min_p else -math.inf,
        p.top_p if p.top_p < 1 else math.inf,
        p.repetition_penalty,
        p.frequency_penalty,
        p.presence_penalty,
    )
    edits = row.edits or TextEdits.of(p, row.tokens, row.num_prompt, row.eos_ids, row.bad_words)
    if edits.any:
        add_tables(law, edits.at(row.tokens).tables(row.tokens), kept)
        law.ends_from = edits.ends_from
    return law


def add_tables(law: CRowLaw, tables: Mapping[str, array[int] | array[float]], kept: list[object]) -> None:
    """Point to these lists; those of one length have one count."""
    for name, table in tables.items():
        setattr(law, name, address(table))
    for name in ("fixed", "ends", "counted", "said"):
        setattr(law, f"num_{name}", len(tables[name]))
    law.num_words = len(tables["lengths"])
    kept.append(tables)

"""Saved costs: a controller's measurements on disk, for the next start.

This module decides the file format. A file that cannot be read, or belongs to other drafters, is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun.control.costs import CostTable, Curve, Kind
from forerun.control.drafters import MeasuredDrafter
from forerun.control.measured import MeasuredDepth
from forerun.economy import MOST, Acceptance
from forerun.store import cache_folder, replace_file

SEEN = 2  # measurements that a saved cost counts as
VERSION = 3
LARGEST = 1e15  # of measurements: larger ones are damage, and their products may overflow


def as_json(controller: MeasuredDepth) -> dict[str, Any]:
    """The controller's measurements, as `from_json` reads them."""
    drafters = [
        {
            "drafts": rows_of(record.costs),
            "offered": [n / record.acceptance.unit for n in record.acceptance.offered],
            "accepted": [n / record.acceptance.unit for n in record.acceptance.accepted],
            "covered": record.covered,
            "trust": [record.predicted, record.accepted],
            "reading_s": record.reading_s,
        }
        for record in controller.drafters.all
    ]
    names = controller.drafters.names
    return {"version": VERSION, "names": names, "passes": rows_of(controller.costs), "drafters": drafters}


def rows_of(costs: CostTable) -> list[dict[str, Any]]:
    """The present costs by kind of round and size."""
    return [
        {"kind": list(kind), "sizes": {str(size): costs.expect(kind, size) for size in curve.seen}}
        for kind, curve in costs.kinds.items()
    ]


def from_json(found: Any, names: Sequence[str]) -> MeasuredDepth:
    """A controller with saved measurements. Raises ValueError, TypeError or LookupError if the data are invalid."""
    if found["version"] != VERSION or found["names"] != (list(names) if len(names) > 1 else [""]):
        raise ValueError("it is of other drafters")
    controller = MeasuredDepth()
    fill(controller.costs, found["passes"])
    controller.drafters.names = found["names"]
    controller.drafters.all = [record_of(entry) for entry in found["drafters"]]
    if len(controller.drafters.all) != len(found["names"]) or not controller.costs.kinds:
        raise ValueError("it is not whole")
    controller.begin()
    return controller


def fill(costs: CostTable, entries: Any) -> None:
    """Add the costs that `rows_of` returned."""
    for entry in entries:
        rows, context, merged = entry["kind"]
        curve = costs.kinds[Kind(int(number(rows)), int(number(context)), bool(merged))] = Curve(costs.flat)
        for size, usual_s in entry["sizes"].items():
            if not 1 <= int(size) <= LARGEST:
                raise ValueError(f"no round has the size {size}")
            for _ in range(SEEN):
                curve.record(int(size), number(usual_s))


def record_of(entry: Any) -> MeasuredDrafter:
    """The measurements of one drafter in the file."""
    offered, right = ([number(value) for value in entry[name]] for name in ("offered", "accepted"))
    if len(offered) != MOST or len(right) != MOST:
        raise ValueError("it has other depths")
    predicted, accepted = (number(value) for value in entry["trust"])
    counts = Acceptance(offered, right), Acceptance([*offered], [*right])
    record = MeasuredDrafter(*counts, predicted=predicted, accepted=accepted)
    fill(record.costs, entry["drafts"])
    record.reading_s, record.covered = number(entry["reading_s"]), number(entry["covered"])
    return record


def number(value: Any) -> float:
    """A number from 0 to LARGEST. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is no measurement")
    return float(value)


def kept_file(key: str) -> Path:
    """The file for this key. Raises OSError if there is no home folder."""
    return cache_folder("times") / f"rounds-{sha256(key.encode()).hexdigest()[:24]}.json"


def read_kept(key: str, names: Sequence[str]) -> MeasuredDepth | None:
    """The saved controller for this key and these drafters; None if there is none."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return from_json(json.loads(kept_file(key).read_text(encoding="utf-8")), names)
    return None


def keep(key: str, found: Mapping[str, Any]) -> None:
    """Write the file atomically. Errors are ignored: the next start then measures again."""
    with suppress(OSError):
        path = kept_file(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({**found, "of": key}).encode())

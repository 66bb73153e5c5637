"""Costs that are kept on disk: what a controller knows of rounds and drafters, for the next start.

This file decides the form of the file. Whatever cannot be read or is of something else counts as not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun.control.drafters import MeasuredDrafter
from forerun.control.measured import MeasuredDepth
from forerun.control.pass_costs import Kind, PassCost
from forerun.economy import MOST, Acceptance, LinearCost
from forerun.store import cache_folder, replace_file

SEEN = 2  # passes of a size that what was kept of it counts as
VERSION = 2


def as_json(controller: MeasuredDepth) -> dict[str, Any]:
    """What the controller knows, for `from_json`."""
    passes = [
        {"kind": list(kind), "sizes": {str(size): cost.expect(size) for size in cost.sizes}}
        for kind, cost in controller.costs.kinds.items()
    ]
    drafters = [
        {
            "drafts": {str(rows): asdict(line) for rows, line in record.drafts.items()},
            "offered": [n / record.acceptance.unit for n in record.acceptance.offered],
            "accepted": [n / record.acceptance.unit for n in record.acceptance.accepted],
            "covered": record.covered,
            "trust": [record.promised, record.accepted],
            "reading_s": record.reading_s,
        }
        for record in controller.drafters.all
    ]
    return {"version": VERSION, "names": controller.drafters.names, "passes": passes, "arms": drafters}


def from_json(found: Any, names: Sequence[str]) -> MeasuredDepth:
    """The controller of an earlier start. Raises ValueError, TypeError or LookupError for anything else."""
    if found["version"] != VERSION or found["names"] != (list(names) if len(names) > 1 else [""]):
        raise ValueError("it is of other drafters")
    controller = MeasuredDepth()
    for entry in found["passes"]:
        rows, context, merged = entry["kind"]
        cost = PassCost(level=controller.costs.level)
        for size, usual_s in entry["sizes"].items():
            cost.record(int(size), number(usual_s))
            cost.sizes[int(size)].num_seen = SEEN
        controller.costs.kinds[Kind(int(number(rows)), int(number(context)), bool(merged))] = cost
    controller.drafters.names = found["names"]
    controller.drafters.all = [record_of(entry) for entry in found["arms"]]
    if len(controller.drafters.all) != len(found["names"]) or not controller.costs.kinds:
        raise ValueError("it is not whole")
    controller.begin()
    return controller


def record_of(entry: Any) -> MeasuredDrafter:
    """One drafter of the file."""
    names = [field.name for field in fields(LinearCost) if field.name != "flat"]
    lines = {int(n): LinearCost(False, *(number(line[name]) for name in names)) for n, line in entry["drafts"].items()}
    offered, right = ([number(value) for value in entry[name]] for name in ("offered", "accepted"))
    if len(offered) != MOST or len(right) != MOST:
        raise ValueError("it has other depths")
    promised, accepted = (number(value) for value in entry["trust"])
    counts = Acceptance(offered, right), Acceptance([*offered], [*right])
    record = MeasuredDrafter(*counts, promised=promised, accepted=accepted, drafts=lines)
    record.reading_s, record.covered = number(entry["reading_s"]), number(entry["covered"])
    return record


def number(value: Any) -> float:
    """A number of the file: not below 0, and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no measurement")
    return float(value)


def kept_file(key: str) -> Path:
    """Where what belongs to this key is kept. Raises OSError where there is no home folder."""
    return cache_folder("times") / f"rounds-{sha256(key.encode()).hexdigest()[:24]}.json"


def read_kept(key: str, names: Sequence[str]) -> MeasuredDepth | None:
    """What was kept, if it can be used."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return from_json(json.loads(kept_file(key).read_text(encoding="utf-8")), names)
    return None


def keep(key: str, found: Mapping[str, Any]) -> None:
    """Write the file as a whole; where that is not possible, every start measures again."""
    with suppress(OSError):
        path = kept_file(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps({**found, "of": key}).encode())

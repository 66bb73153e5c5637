"""Saved costs are those of the controller that was saved."""

import json

import pytest

from control.worlds import World, calibrated, simulate
from forerun.control.costs import Kind
from forerun.control.kept_costs import as_json, from_json
from forerun.control.measured import MeasuredDepth


@pytest.mark.parametrize("rates", [(0.8,), (0.5, 0.6)])
def test_a_saved_controller_expects_what_it_did_after_its_calibration(rates: tuple[float, ...]) -> None:
    """Also if the level has changed since, and if a drafter covers a part of the rows."""
    world = World(rates, [0.002, 0.01][: len(rates)], lambda n: 0.1 + 0.004 * n, merged_rate=0.7)
    before = calibrated(world, 4)
    list(simulate(before, world, 100, 4))
    before.costs.level.factor = 1.3
    for number, record in enumerate(before.drafters.all):
        record.covered, record.reading_s = 0.5 + 0.1 * number, 0.001
    after = from_json(json.loads(json.dumps(as_json(before))), before.drafters.names)
    before.begin()
    assert expectations(after) == pytest.approx(expectations(before))


def expectations(controller: MeasuredDepth) -> list[float]:
    """Measured costs of passes and drafts, and what is known of each drafter."""
    tables = [(controller.costs, False), (controller.costs, True)]
    tables += [(record.costs, False) for record in controller.drafters.all]
    kinds = [(table, Kind.of(rows, 0, merged)) for table, merged in tables for rows in (1, 4)]
    costs = [table.expect(kind, size) for table, kind in kinds for size in (1, 4, 20)]
    for record in controller.drafters.all:
        weight = sum(record.acceptance.offered) / record.acceptance.unit
        costs += [record.covered, record.trust, record.reading_s, weight, *record.acceptance.rates()]
    return costs

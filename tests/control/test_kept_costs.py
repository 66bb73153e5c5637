"""Saved costs are those of the controller that was saved, and files that are not whole are refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from control.worlds import World, calibrated, simulate
from forerun.control.costs import Kind
from forerun.control.kept_costs import LARGEST, VERSION, as_json, from_json, keep, kept_file, read_kept
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


LONE = calibrated(World([0.8], [0.002]), 1)
SIZES = {"kind": [1, 0, False], "sizes": {"4": 0.1}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"names": ["suffix"]},
        {"drafters": []},
        {"drafters": as_json(LONE)["drafters"] * 2},
        {"passes": []},
        *({"passes": [{**SIZES, "sizes": {size: 0.1}}]} for size in ("0", "-1", "1.5", f"{LARGEST + 1:.0f}")),
        *({"passes": [{**SIZES, "kind": [rows, 0, False]}]} for rows in (True, -1, "1", LARGEST * 2)),
        *({"passes": [{**SIZES, "sizes": {"4": taken_s}}]} for taken_s in (True, -0.1, "1", LARGEST * 2, float("nan"))),
        *(
            {"drafters": [{**as_json(LONE)["drafters"][0], name: [1.0] * num}]}
            for name in ("offered", "accepted")
            for num in (15, 17)
        ),
    ],
)
def test_a_file_of_other_drafters_or_that_is_not_whole_is_refused(change: Mapping[str, object]) -> None:
    whole = json.loads(json.dumps(as_json(LONE)))
    assert expectations(from_json({**whole, "passes": [SIZES]}, ("ngram",)))
    with pytest.raises(ValueError, match=r"other|whole|size|no measurement|invalid literal"):
        from_json({**whole, **change}, ("ngram",))
    with pytest.raises(ValueError, match="other drafters"):
        from_json(whole, ("a", "b"))


def test_a_file_is_read_for_its_key_and_written_if_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is the user's alone. Without a place for the file, and with a damaged one, there is no controller."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        keep("one", as_json(LONE))
        read = read_kept("one", ("ngram",))
        assert read is not None
        assert as_json(read)["passes"] == as_json(LONE)["passes"]
    assert kept_file("one").parent.stat().st_mode & 0o777 == 0o700
    assert (read_kept("two", ("ngram",)), read_kept("one", ("a", "b"))) == (None, None)
    for damaged in (
        b"{",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'"x"',
        b"3",
        b"\xff",
        b'{"version": %d, "names": 3}' % VERSION,
    ):
        kept_file("one").write_bytes(damaged)
        assert read_kept("one", ("ngram",)) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept_file("one")))
    keep("one", as_json(LONE))
    assert read_kept("one", ("ngram",)) is None

"""What rounds take: rounds of every size are made by the engine, and ratios to plain ones are kept."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count

import pytest

from forerun import LLM
from forerun.bench.material import Item, Workload
from forerun.bench.plan import Group
from forerun.bench.run import BenchSetup
from forerun.errors import DraftError
from forerun.tune.passes import PassMeter, PassTable, RowCosts, rows_of, sizes_at
from forerun.tune.predict import RoundShape
from kit.checkpoints import SMALL, TARGET
from kit.unchecked import unchecked
from models.damage import ABSENT, VALUES


@pytest.fixture(scope="module", params=["ngram", "suffix", f"model:{SMALL}"], ids=["ngram", "suffix", "model"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with unchecked():
        llm = LLM(str(TARGET), request.param, dtype="float32", max_model_len=128, max_num_seqs=3)
        yield llm
        llm.close()


def meter(llm: LLM, rows: int, num_tokens: int = 30) -> PassMeter:
    """On three stories, with a clock that goes on by one second whenever it is read."""
    assert llm.tokenizer is not None
    items = tuple(Item(tuple(llm.tokenizer.encode(story)), None, "") for story in ("Once upon", "One day", "Tom ran"))
    ticks = count()
    stage = BenchSetup(llm, {"tales": Workload("tales", items)}, num_tokens, clock=lambda: float(next(ticks)))
    return PassMeter(stage, Group("tales", rows, 0.0), None, 8, 2)


@pytest.mark.short("ngram-1", "suffix-3", "model-3")
@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_of_every_size_are_made_whatever_the_drafter_drafts(llm: LLM, rows: int) -> None:
    own, sizes = meter(llm, rows), range(rows + 1, 9 * rows + 1)
    found = own.measure(sizes, lambda *_: None)
    assert sorted(own.ratios) == list(sizes)
    assert all(len(seen) == 2 for seen in own.ratios.values())
    assert set(found.passes) == {rows, *sizes}
    assert all(0 < sum(ratios) <= 1.01 for seen in own.ratios.values() for _, *ratios in seen)  # each takes one tick
    assert not llm.engine.has_work


def test_sizes_that_do_not_fit_are_left_out(llm: LLM) -> None:
    own = meter(llm, 1, num_tokens=2)
    own.deepest = 200
    found = own.measure([2, 150], lambda *_: None)
    assert set(found.passes) == {1, 2}


def test_where_no_round_fits_there_are_no_costs(llm: LLM) -> None:
    """The prompt leaves room for a token or two."""
    own = meter(llm, 1)
    longest = Workload("tales", (Item((5,) * (llm.plan.max_model_len - 4), None, ""),))
    own.setup = replace(own.setup, workloads={"tales": longest})
    with pytest.raises(DraftError, match="shorter prompts"):
        own.measure([2, 5], lambda *_: None)
    assert not llm.engine.has_work


def costs(rows: int) -> RowCosts:
    """A pass costs 1 and 0.1 for each token, of one row less and of more rows more."""
    return RowCosts(1.0, {n: 1 + 0.1 * n + 0.01 * rows for n in sizes_at(rows, (0, 1, 2, 4, 8))}, {1: 0.1, 4: 0.4}, 0.5)


def test_unmeasured_sizes_are_interpolated() -> None:
    assert rows_of(8) == [1, 4, 8]
    assert rows_of(1) == [1]
    assert rows_of(2) == [1, 2]
    table = PassTable({"": {rows: costs(rows) for rows in rows_of(8)}})
    for rows, tokens in ((1, 3), (4, 20), (6, 24), (8, 48)):
        assert table.pass_s("", rows, tokens) == pytest.approx(1 + 0.1 * tokens + 0.01 * rows)
    assert table.draft_s("", 8, 2) == pytest.approx(0.2)
    assert table.draft_s("", 8, 0) == table.draft_s("", 0, 4) == 0
    assert table.round_s("", RoundShape(8, 24, 2, 8, 3)) == pytest.approx(1 + 2.4 + 0.08 + 0.2 + 1.5)
    assert table.pass_s("", 1, 18) == pytest.approx(2.81, rel=0.02)  # beyond all that was measured of one row


def test_costs_measured_with_the_runs_replace_earlier_ones() -> None:
    """By their mean; steps stay steps, and reading the JSON restores the costs."""
    first = RowCosts.from_json(json.loads(json.dumps(asdict(costs(1)))))
    assert first == costs(1)
    of_runs = [RowCosts(9.0, {1: 1.0, 3: ratio}, {2: ratio / 10}) for ratio in (2.0, 4.0)]
    newer = first.newer(of_runs)
    assert newer.plain_s == first.plain_s
    assert newer.pass_s(3) == 3.0
    assert newer.draft_s(2) == pytest.approx(0.3)
    assert newer.pass_s(5) == first.pass_s(5)
    assert first.newer([RowCosts(3.0, {3: 2.0, 4: 2.0}, {})]).pass_s(4) == 2.0
    assert first.newer([]) == first


# A missing key, if the field has a default, and empty or unknown values where they are possible.
HARMLESS = {
    ("reading_s", "absent"),
    ("num_busy", "absent"),
    ("num_busy", "null"),
    ("drafts", "object"),
    ("unknown", "absent"),
}


def test_damaged_costs_are_refused() -> None:
    """Any value in place of any part, as the files of tune and train may have it after damage."""
    whole = json.loads(json.dumps(asdict(RowCosts(0.5, {1: 1.0, 3: 1.25}, {2: 0.5}, 0.25, 1.5))))
    for name in (*whole, "unknown"):
        for kind, value in VALUES.items():
            entry = whole | {name: value}
            if value is ABSENT:
                entry.pop(name)
            with suppress(ValueError):
                costs = RowCosts.from_json(entry)
                assert (name, kind) in HARMLESS or value in (0, 1, 10**9, 2**31), (name, kind)
                assert costs.round_ratio(2) > 0
    for name in ("passes", "drafts"):
        for key, ratio in [
            ("x", 1.0),
            ("-1", 1.0),
            ("1" * 20, 1.0),
            *(("2", v) for v in (-1, math.nan, "1", [], None)),
        ]:
            with pytest.raises(ValueError, match=name):
                RowCosts.from_json(whole | {name: {"1": 1.0, key: ratio}})
    for nothing in (None, [], "text", 5, {}):
        with pytest.raises(ValueError, match="it"):
            RowCosts.from_json(nothing)

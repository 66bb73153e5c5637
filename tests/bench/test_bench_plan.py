"""Which runs a benchmark makes, and that their order favours no depth."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.bench.plan import Selection
from forerun.bench.run import waves
from forerun.errors import InvalidRequest

DEPTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(tuple)


@settings(deadline=None)
@given(DEPTHS, st.integers(1, 3))
def test_every_depth_stands_at_every_place_equally_often(depths: tuple[int, ...], rounds: int) -> None:
    wanted = {0, *depths}
    turns = Selection(depths=depths, repeats=rounds * len(wanted)).turns()
    assert [t.repetition for t in turns] == sorted(t.repetition for t in turns)
    places = Counter((t.depth, i % len(wanted)) for i, t in enumerate(turns))
    assert places == dict.fromkeys(((depth, place) for depth in wanted for place in range(len(wanted))), rounds)


@settings(deadline=None)
@given(DEPTHS, st.integers(1, 7))
def test_every_repetition_has_every_depth_once(depths: tuple[int, ...], repeats: int) -> None:
    turns = Selection(depths=depths, repeats=repeats).turns()
    assert Counter((t.repetition, t.depth) for t in turns) == dict.fromkeys(
        ((r, depth) for r in range(repeats) for depth in {0, *depths}), 1
    )


def test_groups_are_all_combinations_and_a_replay_has_no_temperature() -> None:
    selection = Selection(batches=(1, 4), temperatures=(0.0, 1.0, 0.5))
    groups = selection.groups({"code": False, "edits": True})
    assert len(groups) == len(set(groups)) == 2 * 3 + 2
    assert {g.temperature for g in groups if g.workload == "edits"} == {0.0}


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 20))
def test_waves_are_full_and_reach_every_item(num_items: int, batch: int) -> None:
    found = list(waves(num_items, batch))
    assert all(len(wave) == batch for wave in found)
    numbers = [number for wave in found for number in wave]
    assert numbers == list(range(len(numbers)))
    assert num_items <= len(numbers) < num_items + batch or len(numbers) == batch


@pytest.mark.parametrize(
    ("field", "values"),
    [("batches", (0,)), ("depths", (-2,)), ("batches", ()), ("temperatures", (1.0, 1.0)), ("repeats", 0)],
)
def test_an_invalid_selection_is_refused_by_name(field: str, values: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Selection(**{field: values})  # type: ignore[arg-type]
    assert caught.value.field == {"batches": "batch", "repeats": "repeats"}.get(field, field.removesuffix("s"))

"""`FixedDepth` gives each request its requested depth within all limits; what a drafter's estimates count as."""

from hypothesis import given
from hypothesis import strategies as st

from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import FixedDepth, Load, slots_of
from forerun.control.drafters import MeasuredDrafter, MeasuredDrafters
from forerun.draft.base import NO_DRAFT, Budget, Outlook

SPECULATIONS = st.builds(
    Speculation, depth=st.integers(0, 9), width=st.integers(1, 4), nodes=st.none() | st.integers(1, 40)
)
Row = tuple[Speculation, int, int]  # the request's setting, its room, and the drafter's limit
ROWS = st.lists(st.tuples(SPECULATIONS, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8)


BLOCK_SIZE = 8
FREE_SLOTS = st.lists(st.integers(0, BLOCK_SIZE - 1), min_size=8, max_size=8)  # in each sequence's last cache block


def fixed_budgets(rows: list[Row], free_slots: list[int], num_blocks: int) -> list[Budget]:
    """The budgets of `FixedDepth` for sequences with these free cache slots, and so many free blocks for all."""
    speculations, rooms, limits = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    spare = Spare(dict(enumerate(free_slots)), num_blocks, BLOCK_SIZE)
    load = Load(list(range(len(rows))), speculations, rooms, 0)
    outlook = Outlook([0] * len(rows), limits)
    return list(FixedDepth().budgets(load, outlook, spare))


@given(rows=ROWS, free_slots=FREE_SLOTS, num_blocks=st.integers(0, 15))
def test_fixed_budgets_have_the_requested_depth_or_none_and_fit_into_the_cache(
    rows: list[Row], free_slots: list[int], num_blocks: int
) -> None:
    """The requested depth is cut to the room, to the drafter's limit and to the requested number of nodes."""
    budgets = fixed_budgets(rows, free_slots, num_blocks)
    beyond = [max(0, slots_of(budget) - num_free) for budget, num_free in zip(budgets, free_slots, strict=False)]
    assert sum(len(range(0, slots, BLOCK_SIZE)) for slots in beyond) <= num_blocks
    for budget, (speculation, room, limit) in zip(budgets, rows, strict=True):
        most = 99 if speculation.nodes is None else speculation.nodes
        assert budget.depth in (0, min(speculation.depth, room, limit, most))
        assert budget.width == (speculation.width if budget.depth else 1)
        assert budget.depth <= budget.nodes
        assert budget.nodes <= most


@given(rows=ROWS, free_slots=FREE_SLOTS, num_blocks=st.integers(0, 15))
def test_fixed_budgets_do_not_depend_on_younger_sequences(
    rows: list[Row], free_slots: list[int], num_blocks: int
) -> None:
    """The first rows, the oldest ones, get the same budgets without the others; with ample blocks, so does each row."""
    budgets = fixed_budgets(rows, free_slots, num_blocks)
    for count in range(1, len(rows)):
        assert fixed_budgets(rows[:count], free_slots, num_blocks) == budgets[:count]
    ample = fixed_budgets(rows, free_slots, 10**6)
    alone = [fixed_budgets([row], free_slots, 10**6)[0] for row in rows]
    assert [budget for budget in ample if budget.depth] == [budget for budget in alone if budget.depth]


def test_slots_of_a_chain_are_its_depth_and_a_tree_needs_its_longest_path_again() -> None:
    """The accepted path of a tree is copied into slots of its own, the root's included."""
    assert slots_of(NO_DRAFT) == 0
    assert slots_of(Budget(4)) == 4
    assert slots_of(Budget(4, 2, 7)) == 7 + 5


def test_trust_in_estimates_recovers_soon_after_a_calibration_with_few_accepted_tokens() -> None:
    """Of 100 tokens predicted in a calibration 10 were accepted; afterwards 8 of 8 are.

    The trust rises above 0.6, and an option's survival is the drafter's own estimate times the trust.
    """
    drafters = MeasuredDrafters([MeasuredDrafter(predicted=100.0, accepted=10.0)], [""])
    outlook = Outlook([0], [3], lambda i, least: [0.5, 0.4, 0.2])
    speculation = Speculation(16, auto=True)
    assert drafters.options(0, 0, speculation, 99, outlook)[0].predicted == [0.5, 0.4, 0.2]
    assert drafters.all[0].trust < 0.2
    drafters.begin()
    assert drafters.all[0].trust < 0.6
    drafters.all[0].predicted, drafters.all[0].accepted = drafters.all[0].predicted + 8, drafters.all[0].accepted + 8
    option = drafters.options(0, 0, speculation, 99, outlook)[0]
    assert drafters.all[0].trust > 0.6
    assert list(option.survival) == [drafters.all[0].trust * chance for chance in (0.5, 0.4, 0.2)]

"""A fixed depth is the wish, cut to what can be said, drafted and stored, the youngest first; and what is promised."""

from hypothesis import given
from hypothesis import strategies as st

from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import FixedDepth, Load, slots_of
from forerun.control.drafters import MeasuredDrafter, MeasuredDrafters
from forerun.draft.base import NO_DRAFT, Budget, Outlook

WISHES = st.builds(Speculation, depth=st.integers(0, 9), width=st.integers(1, 4), nodes=st.none() | st.integers(1, 40))
ROWS = st.lists(st.tuples(WISHES, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8)


SIZE = 8
OWN = st.lists(st.integers(0, SIZE - 1), min_size=8, max_size=8)


def budgets(rows: list[tuple[Speculation, int, int]], own: list[int], num_blocks: int) -> list[Budget]:
    wishes, rooms, limits = ([row[i] for row in rows] for i in range(3))
    spare = Spare(dict(enumerate(own)), num_blocks, SIZE)
    load = Load(list(range(len(rows))), wishes, rooms, 0)
    outlook = Outlook([0] * len(rows), limits)
    return list(FixedDepth().budgets(load, outlook, spare))


@given(rows=ROWS, own=OWN, num_blocks=st.integers(0, 15))
def test_budgets_keep_to_every_limit(rows: list[tuple[Speculation, int, int]], own: list[int], num_blocks: int) -> None:
    found = budgets(rows, own, num_blocks)
    beyond = [max(0, slots_of(budget) - has) for budget, has in zip(found, own, strict=False)]
    assert sum(len(range(0, slots, SIZE)) for slots in beyond) <= num_blocks
    for budget, (wish, room, limit) in zip(found, rows, strict=True):
        most = 99 if wish.nodes is None else wish.nodes
        assert budget.depth in (0, min(wish.depth, room, limit, most))
        assert budget.width == (wish.width if budget.depth else 1)
        assert budget.depth <= budget.nodes
        assert budget.nodes <= most


@given(rows=ROWS, own=OWN, num_blocks=st.integers(0, 15))
def test_the_younger_take_nothing_from_the_older(
    rows: list[tuple[Speculation, int, int]], own: list[int], num_blocks: int
) -> None:
    found = budgets(rows, own, num_blocks)
    for count in range(1, len(rows)):
        assert budgets(rows[:count], own, num_blocks) == found[:count]
    ample = budgets(rows, own, 10**6)
    assert [b for b in ample if b.depth] == [b for b in (budgets([row], own, 10**6)[0] for row in rows) if b.depth]


def test_slots_are_those_a_tail_takes() -> None:
    """A chain takes its guesses; a tree also the chain on which its paths are laid, the root's place included."""
    assert slots_of(NO_DRAFT) == 0
    assert slots_of(Budget(4)) == 4
    assert slots_of(Budget(4, 2, 7)) == 7 + 5


def test_what_a_drafter_says_of_each_guess_counts_and_a_bad_calibration_is_soon_made_up_for() -> None:
    """It promised much of sample texts and little came true; then eight guesses do."""
    drafters = MeasuredDrafters([MeasuredDrafter(promised=100.0, accepted=10.0)], [""])
    told = Outlook([0], [3], lambda i, least: [0.5, 0.4, 0.2])
    wish = Speculation(16, auto=True)
    assert drafters.options(0, 0, wish, 99, told)[0].promised == [0.5, 0.4, 0.2]
    assert drafters.all[0].trust < 0.2
    drafters.begin()
    assert drafters.all[0].trust < 0.6
    drafters.all[0].promised, drafters.all[0].accepted = drafters.all[0].promised + 8, drafters.all[0].accepted + 8
    option = drafters.options(0, 0, wish, 99, told)[0]
    assert drafters.all[0].trust > 0.6
    assert list(option.survival) == [drafters.all[0].trust * chance for chance in (0.5, 0.4, 0.2)]

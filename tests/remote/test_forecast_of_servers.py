"""The forecast from measured blocks to other depths and loads, on blocks with known costs."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from forerun.economy import expected_tokens
from forerun.remote.counters import SpeculationCounts
from forerun.remote.depths import LIKELY
from forerun.remote.dialects import dialect_of
from forerun.remote.forecast import ServedCell, advice_of, cell_of, predicted_slower_from, slower_from
from forerun.remote.measure import PLAIN, SPECULATING, ServedBlock, ServerPlan
from forerun.remote.tuning import ServerTuning
from forerun.traffic.client import TimedAnswer
from forerun.traffic.figures import TrafficBlock
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficTurn

RATES, DEPTH, PLAIN_S, NUM_ROUNDS = [0.8, 0.7, 0.5, 0.3], 4, 0.01, 1000


def block(
    contender: str, clients: int, repetition: int, token_s: float, counts: SpeculationCounts, mode: str = ""
) -> ServedBlock:
    """A block whose answers have a token each `token_s`."""
    turn = TrafficTurn(ServerLoad("concurrency", float(clients)), repetition, SpeculationMode(mode))
    answers = tuple(
        TimedAnswer(i, 0.0, 0.0, first_s=1.0, last_s=1.0 + 100 * token_s, num_tokens=101, digest=str(i))
        for i in range(8)
    )
    return ServedBlock(contender, TrafficBlock(turn, answers, 10.0), counts, None)


def counts_of(depth: int, rates: Sequence[float]) -> SpeculationCounts:
    """What 800 tokens behind the first of each answer leave in the counters."""
    reached, at_depth = 1.0, []
    for rate in rates[:depth]:
        reached *= rate
        at_depth.append(reached)
    rounds = 800 / expected_tokens(rates, depth)
    return SpeculationCounts(
        rounds, depth * rounds, 800 - rounds, accepted_at_depth=tuple(rounds * each for each in at_depth)
    )


def pair(clients: int, cost: float, repetition: int = 0, noise: float = 1.0) -> list[ServedBlock]:
    """Both contenders where rounds of DEPTH draft tokens cost so many plain ones."""
    token_s = noise * PLAIN_S * cost / expected_tokens(RATES, DEPTH)
    return [
        block(SPECULATING, clients, repetition, token_s, counts_of(DEPTH, RATES)),
        block(PLAIN, clients, repetition, PLAIN_S, SpeculationCounts()),
    ]


def cell(clients: int, cost: float) -> ServedCell:
    """What three repetitions say, the second of which was slow."""
    blocks = [b for r, noise in enumerate((1.0, 1.2, 0.99)) for b in pair(clients, cost, r, noise)]
    return cell_of(clients, blocks)


def test_costs_and_speed_ups_are_those_of_the_economy() -> None:
    found = cell(1, 1.8)
    assert found.cost is not None
    assert found.speed_up is not None
    assert found.cost.median == pytest.approx(1.8)
    assert found.speed_up.median == pytest.approx(expected_tokens(RATES, DEPTH) / 1.8)
    assert found.speed_up.low < found.speed_up.median < found.speed_up.high
    assert found.served_depth == DEPTH
    assert [each.depth for each in found.by_depth if each.measured] == [0, DEPTH]
    assert (found.num_compared, found.num_differing) == (24, 0)


def test_one_measured_depth_leaves_what_others_cost_between_two_bounds() -> None:
    """Without noise: no less than a shallower round, no more for each draft token."""
    found = cell_of(1, pair(1, 2.0))
    for depth in (1, 2, 3):
        tokens, least = expected_tokens(RATES, depth), max(1.0, 2.0 * depth / DEPTH)
        assert found.by_depth[depth].low == pytest.approx(tokens / 2.0)
        assert found.by_depth[depth].high == pytest.approx(tokens / least)
    tokens, last = expected_tokens(RATES, DEPTH), math.prod(RATES)
    deepest = found.by_depth[2 * DEPTH]
    assert len(found.by_depth) == 2 * DEPTH + 1
    assert deepest.low == pytest.approx(tokens / 4.0)
    assert deepest.high == pytest.approx((tokens + DEPTH * last) / 2.0)
    assert found.by_depth[DEPTH].low == found.by_depth[DEPTH].high == pytest.approx(tokens / 2.0)


def test_rounds_measured_cheaper_than_plain_ones_do_not_raise_the_forecast() -> None:
    found = cell_of(1, pair(1, 0.6))
    for depth in range(1, DEPTH):
        tokens = expected_tokens(RATES, depth)
        assert (found.by_depth[depth].low, found.by_depth[depth].high) == (pytest.approx(tokens / 0.6),) * 2
    assert found.by_depth[2 * DEPTH].low == pytest.approx(expected_tokens(RATES, DEPTH) / 1.2)


Costs = Callable[[int], float]


def random_costs(noise: random.Random) -> Costs:
    """What rounds of a server cost: drafting at all, each draft token, and passes that are free up to some size."""
    drafting, draft_token, free = noise.choice([0.0, 0.5]), noise.uniform(0.0, 0.3), noise.choice([1, 2, 5, 30])
    return lambda depth: max(1.0, (1 + depth) / free if free > 1 else 1.0) + drafting + draft_token * depth


def seen(costs: Costs, rates: Sequence[float], depths: Sequence[int], noise: random.Random) -> ServedCell:
    """Three repetitions of such a server, whose times differ by a tenth; several depths are asked for by requests."""
    blocks = []
    for repetition in range(3):
        for depth in depths:
            token_s = PLAIN_S * costs(depth) / expected_tokens(rates, depth) * math.exp(noise.gauss(0, 0.1))
            name, mode = (f"depth {depth}", str(depth)) if len(depths) > 1 else (SPECULATING, "")
            blocks.append(block(name, 1, repetition, token_s, counts_of(depth, rates), mode))
        plain_s = PLAIN_S * math.exp(noise.gauss(0, 0.03))
        blocks.append(block(PLAIN, 1, repetition, plain_s, SpeculationCounts()))
    return cell_of(1, blocks)


@pytest.mark.parametrize("depths", [(1,), (4,), (1, 4), (2, 3)], ids=str)
def test_ranges_cover_the_truth_at_the_stated_rate_and_no_depth_is_advised_that_may_be_slower(
    depths: tuple[int, ...],
) -> None:
    noise, inside, asked, misled = random.Random(str(depths)), dict[int, int](), 300, 0
    for _ in range(asked):
        costs = random_costs(noise)
        rates = [noise.uniform(0.2, 0.95) for _ in range(10)]
        found = seen(costs, rates, depths, noise)
        truth = [expected_tokens(rates, depth) / costs(depth) for depth in range(9)]
        for each in found.by_depth[1:]:
            inside[each.depth] = inside.get(each.depth, 0) + (each.low <= truth[each.depth] <= each.high)
        advice = advice_of(found) if len(depths) == 1 else None
        trial = advice and advice.trial
        assert not (advice and advice.trial and advice.open_depth)
        misled += bool(trial and truth[trial.depth] < 1)
    chance = 3 * math.sqrt(asked * LIKELY * (1 - LIKELY))
    assert len(inside) == 2 * max(depths)
    assert all(count > LIKELY * asked - chance for count in inside.values()), inside
    assert misled < (1 - LIKELY) / 2 * asked


def test_two_measured_depths_leave_less_open_than_one() -> None:
    noise = random.Random(0)
    costs: Costs = lambda depth: 1.4 + 0.1 * depth  # noqa: E731
    one, both = (seen(costs, RATES, depths, noise) for depths in ((4,), (1, 4)))
    width = [math.log(each.by_depth[2].high / each.by_depth[2].low) for each in (one, both)]
    assert width[1] < 0.7 * width[0]


def test_drafts_in_a_part_of_the_rounds_are_worth_less() -> None:
    """Half of the rounds draft nothing and take as long as plain ones."""
    both, tokens = pair(1, 1.8), expected_tokens(RATES, DEPTH)
    rounds = 800 / (1 + (tokens - 1) / 2)
    counts = SpeculationCounts(
        rounds / 2,
        DEPTH * rounds / 2,
        800 - rounds,
        accepted_at_depth=tuple(rounds / 2 * each for each in (0.8, 0.56, 0.28, 0.084)),
    )
    token_s = PLAIN_S * 1.4 * rounds / 800
    found = cell_of(1, [block(SPECULATING, 1, 0, token_s, counts), both[1]])
    assert found.cost is not None
    assert found.cost.median == pytest.approx(1.4)
    assert found.by_depth[2].low == pytest.approx((1 + 0.5 * 1.36) / 1.4)


def test_slower_from_is_the_least_load_from_which_all_are_slower() -> None:
    gives = expected_tokens(RATES, DEPTH)
    costs = {1: 1.5, 4: 1.1 * gives, 8: 0.9 * gives, 16: 1.2 * gives, 32: 2 * gives}
    cells = [cell(clients, cost) for clients, cost in costs.items()]
    found = slower_from(cells)
    assert found is not None
    assert found.clients == 16
    assert slower_from(cells[:1]) is None
    assert slower_from(cells[1:2]) is cells[1]


def test_the_line_through_costs_is_drawn_as_far_as_four_times_the_heaviest_load() -> None:
    gives = expected_tokens(RATES, DEPTH)
    line = [cell(n, 1 + (gives - 1) * n / 40) for n in (1, 4, 16)]
    assert predicted_slower_from(line) == pytest.approx(40)
    assert predicted_slower_from([cell(n, 1 + (gives - 1) * n / 90) for n in (1, 4, 16)]) is None
    assert predicted_slower_from([cell(1, 1.5), cell(16, 1.5)]) is None
    assert predicted_slower_from([cell(1, 1.5), cell(16, 2 * gives)]) is None  # measured already
    bent = [cell(1, 1.0), cell(8, 0.98 * gives), cell(16, 0.98 * gives)]
    assert predicted_slower_from(bent) is None, "all measured loads are faster, also where the line is above them"


def tuning(*cells: ServedCell) -> ServerTuning:
    """A tuning of these cells."""
    plan = ServerPlan(tuple(each.clients for each in cells))
    return ServerTuning("http://s", "m", dialect_of("vllm", None), "http://p", plan, cells, None)


def steady(cost: float) -> ServedCell:
    """What two repetitions without noise say."""
    return cell_of(1, [*pair(1, cost), *pair(1, cost, 1)])


def test_one_repetition_advises_nothing() -> None:
    assert advice_of(cell_of(1, pair(1, 1.05))) is None
    assert advice_of(steady(1.05)) is not None


def test_only_depths_whose_lower_end_is_at_least_1_are_advised() -> None:
    """One measured depth once advised another that was slower: rounds cost much, and most of it to draft at all."""
    steep = advice_of(steady(3.0))
    assert steep is not None
    assert (steep.depth, steep.clear, steep.trial) == (0, True, None)
    assert steep.open_depth is not None
    assert steep.open_depth.low < 1 < steep.open_depth.high
    good = advice_of(steady(1.05))
    assert good is not None
    assert (good.depth, good.clear) == (None, True)
    unsure = advice_of(cell(1, expected_tokens(RATES, DEPTH) / 1.03))
    assert unsure is not None
    assert (unsure.depth, unsure.clear) == (0, False)


@pytest.mark.parametrize(("gain", "advised"), [(1.02, None), (1.04, 1)])
def test_another_depth_is_advised_only_if_it_is_worth_the_change(gain: float, advised: int | None) -> None:
    token_s = PLAIN_S * 1.5 / expected_tokens(RATES, DEPTH) / gain
    blocks = [block("depth 1", 1, repetition, token_s, counts_of(1, RATES), "1") for repetition in (0, 1)]
    advice = advice_of(cell_of(1, [*pair(1, 1.5), *pair(1, 1.5, 1), *blocks]))
    assert advice is not None
    assert advice.depth == advised


def test_of_depths_that_requests_chose_the_fastest_is_advised() -> None:
    costs, blocks = {1: 1.1, 4: 2.4}, []
    for depth, cost in costs.items():
        token_s = PLAIN_S * cost / expected_tokens(RATES, depth)
        blocks += [
            block(f"depth {depth}", 1, repetition, token_s, counts_of(depth, RATES), str(depth))
            for repetition in (0, 1)
        ]
    found = cell_of(1, [*pair(1, 2.4), *pair(1, 2.4, 1), *blocks])
    advice = advice_of(found)
    assert advice is not None
    assert (advice.depth, advice.clear) == (1, True)
    assert found.speed_up is not None
    assert found.by_depth[1].middle == pytest.approx(1.8 / 1.1)
    assert found.speed_up.high == pytest.approx(expected_tokens(RATES, DEPTH) / 2.4), "that of the server's setting"
    assert '"speculation": 1' in str(replace(tuning(found), dialect=dialect_of("forerun", None)).as_object())
    assert tuning(found).as_object()["cells"][0]["advice"]["depth"] == 1


def test_one_server_alone_leaves_the_speed_up_open() -> None:
    alone = cell_of(1, [pair(1, 1.8)[0]])
    assert (alone.plain, alone.speed_up, alone.cost, alone.by_depth) == (None, None, None, ())
    found = replace(tuning(alone), against=None)
    assert found.acceptance is not None
    assert any("--against" in sentence for sentence in found.unknown)
    assert advice_of(alone) is None


def test_a_server_without_counters_leaves_acceptance_open() -> None:
    first, second = pair(1, 1.8)
    silent = cell_of(1, [replace(first, counts=SpeculationCounts()), second])
    assert silent.speed_up is not None
    assert silent.by_depth == ()
    assert any("does not report its draft tokens" in sentence for sentence in tuning(silent).unknown)


def test_answers_that_differ_are_counted() -> None:
    first, second = pair(1, 1.8)
    answers = list(second.block.answers)
    answers[3] = replace(answers[3], digest="another")
    other = replace(second, block=replace(second.block, answers=tuple(answers)))
    assert cell_of(1, [first, other]).num_differing == 1

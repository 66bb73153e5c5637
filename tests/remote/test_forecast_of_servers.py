"""What measured blocks say of other depths and loads, on blocks that a known economy made."""

from dataclasses import replace

import pytest

from forerun.economy import expected_tokens
from forerun.remote.counters import SpeculationCounts
from forerun.remote.dialects import dialect_of
from forerun.remote.forecast import ServedCell, cell_of, expected_to_hurt_from, hurts_from, range_at
from forerun.remote.measure import PLAIN, SPECULATING, ServedBlock, ServerPlan
from forerun.remote.tuning import ServerTuning
from forerun.traffic.client import TimedAnswer
from forerun.traffic.figures import TrafficBlock
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficTurn

RATES, DEPTH, PLAIN_S, NUM_ROUNDS = [0.8, 0.7, 0.5, 0.3], 4, 0.01, 1000


def block(contender: str, clients: int, repetition: int, token_s: float, counts: SpeculationCounts) -> ServedBlock:
    """A block whose answers have a token each `token_s`."""
    turn = TrafficTurn(ServerLoad("concurrency", float(clients)), repetition, SpeculationMode())
    answers = tuple(
        TimedAnswer(i, 0.0, 0.0, first_s=1.0, last_s=1.0 + 100 * token_s, num_tokens=101, digest=str(i))
        for i in range(8)
    )
    return ServedBlock(contender, TrafficBlock(turn, answers, 10.0), counts, None)


def pair(clients: int, cost: float, repetition: int = 0, noise: float = 1.0) -> list[ServedBlock]:
    """Both contenders where rounds of DEPTH guesses cost so many plain ones."""
    tokens = expected_tokens(RATES, DEPTH)
    reached, at_depth = 1.0, []
    for rate in RATES:
        reached *= rate
        at_depth.append(reached)
    rounds = 800 / tokens
    counts = SpeculationCounts(
        rounds, DEPTH * rounds, 800 - rounds, accepted_at_depth=tuple(rounds * each for each in at_depth)
    )
    token_s = noise * PLAIN_S * cost / tokens
    return [
        block(SPECULATING, clients, repetition, token_s, counts),
        block(PLAIN, clients, repetition, PLAIN_S, SpeculationCounts()),
    ]


def cell(clients: int, cost: float) -> ServedCell:
    """What three repetitions say, the second of which was slow."""
    blocks = [b for r, noise in enumerate((1.0, 1.2, 0.99)) for b in pair(clients, cost, r, noise)]
    return cell_of(clients, blocks)


def test_costs_and_speed_ups_of_all_depths_are_those_of_the_economy() -> None:
    found = cell(1, 1.8)
    assert found.cost is not None
    assert found.speed_up is not None
    assert found.cost.median == pytest.approx(1.8)
    assert found.speed_up.median == pytest.approx(expected_tokens(RATES, DEPTH) / 1.8)
    assert found.speed_up.low < found.speed_up.median < found.speed_up.high
    for depth, spread in enumerate(found.by_depth[: DEPTH + 1]):
        assert spread.median == pytest.approx(expected_tokens(RATES, depth) / (1 + 0.8 * depth / DEPTH))
    best = max(range(DEPTH + 1), key=lambda depth: expected_tokens(RATES, depth) / (1 + 0.8 * depth / DEPTH))
    assert found.best_depth == best
    assert (found.num_compared, found.num_differing) == (24, 0)


def test_rounds_that_seem_to_cost_less_than_plain_ones_give_no_wonders() -> None:
    found = cell(1, 0.6)
    tokens = [expected_tokens([*RATES, *[RATES[-1]] * 4], depth) for depth in range(9)]
    assert [each.median for each in found.by_depth][DEPTH:] == [pytest.approx(each / 0.6) for each in tokens[DEPTH:]]
    assert all(each.median > 0 for each in found.by_depth)


def test_a_forecast_lies_between_costs_of_guesses_alone_and_of_drafting_alone() -> None:
    found = cell(1, 2.0)
    for depth in (1, 2, 3):
        low, high = range_at(found, depth)
        tokens = expected_tokens(RATES, depth)
        assert (low, high) == (pytest.approx(tokens / 2), pytest.approx(tokens / (1 + depth / DEPTH)))
    low, high = range_at(found, 2 * DEPTH)
    assert (low, high) == (pytest.approx(found.by_depth[8].median), pytest.approx(found.by_depth[8].median * 3 / 2))
    assert range_at(found, DEPTH)[0] == pytest.approx(range_at(found, DEPTH)[1])


def test_drafts_in_a_part_of_the_rounds_are_worth_less() -> None:
    """Half of the rounds guess nothing and take as long as plain ones."""
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
    assert found.by_depth[2].median == pytest.approx((1 + 0.5 * 1.36) / (1 + 0.4 * 2 / DEPTH))


def test_it_hurts_from_where_it_is_slower_at_that_load_and_all_above() -> None:
    gives = expected_tokens(RATES, DEPTH)
    costs = {1: 1.5, 4: 1.1 * gives, 8: 0.9 * gives, 16: 1.2 * gives, 32: 2 * gives}
    cells = [cell(clients, cost) for clients, cost in costs.items()]
    found = hurts_from(cells)
    assert found is not None
    assert found.clients == 16
    assert hurts_from(cells[:1]) is None
    assert hurts_from(cells[1:2]) is cells[1]


def test_the_line_through_costs_is_drawn_as_far_as_four_times_the_heaviest_load() -> None:
    gives = expected_tokens(RATES, DEPTH)
    line = [cell(n, 1 + (gives - 1) * n / 40) for n in (1, 4, 16)]
    assert expected_to_hurt_from(line) == pytest.approx(40)
    assert expected_to_hurt_from([cell(n, 1 + (gives - 1) * n / 90) for n in (1, 4, 16)]) is None
    assert expected_to_hurt_from([cell(1, 1.5), cell(16, 1.5)]) is None
    assert expected_to_hurt_from([cell(1, 1.5), cell(16, 2 * gives)]) is None  # measured already


def tuning(*cells: ServedCell) -> ServerTuning:
    """A tuning of these cells."""
    plan = ServerPlan(tuple(each.clients for each in cells))
    return ServerTuning("http://s", "m", dialect_of("vllm", None), "http://p", plan, cells, None)


def test_another_depth_is_advised_where_it_is_clearly_faster() -> None:
    steep = cell(1, 3.0)
    found = tuning(steep)
    assert found.served_depth(steep) == DEPTH
    assert found.advised_depth(steep) == steep.best_depth != DEPTH
    assert "num_speculative_tokens" in str(found.as_object()["cells"][0]["options"])
    cheap = cell(1, 1.05)
    assert tuning(cheap).advised_depth(cheap) in (DEPTH, cheap.best_depth)
    even = replace(steep, by_depth=tuple(replace(each, median=1.0) for each in steep.by_depth))
    assert even.speed_up is not None
    assert tuning(even).advised_depth(even) == (0 if 1.03 * even.speed_up.median <= 1.0 else DEPTH)


def test_one_server_alone_leaves_the_speed_up_open() -> None:
    alone = cell_of(1, [pair(1, 1.8)[0]])
    assert (alone.plain, alone.speed_up, alone.cost, alone.by_depth) == (None, None, None, ())
    found = replace(tuning(alone), against=None)
    assert found.acceptance is not None
    assert any("--against" in sentence for sentence in found.unknown)
    assert found.advised_depth(alone) is None


def test_a_server_without_counters_leaves_acceptance_open() -> None:
    first, second = pair(1, 1.8)
    silent = cell_of(1, [replace(first, counts=SpeculationCounts()), second])
    assert silent.speed_up is not None
    assert silent.by_depth == ()
    assert any("counts no guesses" in sentence for sentence in tuning(silent).unknown)


def test_answers_that_differ_are_counted() -> None:
    first, second = pair(1, 1.8)
    answers = list(second.block.answers)
    answers[3] = replace(answers[3], digest="another")
    other = replace(second, block=replace(second.block, answers=tuple(answers)))
    assert cell_of(1, [first, other]).num_differing == 1

"""Counters of draft tokens in each engine's format, and the acceptance computed from them."""

from dataclasses import replace

import pytest

from forerun.remote.counters import SpeculationCounts, acceptance_of, counts_of, counts_of_answers, even_chain
from forerun.remote.dialects import DIALECTS, UNKNOWN, dialect_of
from kit.standins import DialectName, StandIn

# llama-server b1-0c1e570 with ngram-simple of 5, after one request
LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 21
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 9
# HELP llamacpp:spec_decode_num_accepted_tokens_total Speculative: Total draft tokens accepted by the target model
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 9
# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 2
# HELP llamacpp:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="3"} 2
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="4"} 1
"""
VLLM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 80.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 36.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 24.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 12.0
"""

PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ODD = ("", '{a="b"}', '{position=""}', '{position="x"}', '{position="-1"}', '{position="99999999999999"}')


def test_llama_servers_own_text_is_read() -> None:
    counts = counts_of(LLAMA_CPP, "llamacpp:")
    assert counts == SpeculationCounts(2.0, 9.0, 9.0, accepted_at_depth=(2.0, 2.0, 2.0, 2.0, 1.0))
    acceptance = acceptance_of(counts, 11)
    assert acceptance is not None
    assert acceptance.tokens_per_round == 11 / 2
    assert (acceptance.covered, acceptance.depth, acceptance.acceptance_rate) == (1.0, 4.5, 1.0)
    assert acceptance.at_depth == [1, 1, 1, 1, 0.5]


def test_gauges_of_several_engines_are_a_mean_and_no_sum() -> None:
    engines = (("0", 40, 3.0), ("1", 20, 2.0), ("2", 0, 0.0))
    text = "".join(
        f'sglang:spec_verify_calls_total{{dp_rank="{rank}"}} {calls}\n'
        f'sglang:spec_accept_length{{dp_rank="{rank}"}} {tokens}\n'
        f'sglang:spec_num_steps{{dp_rank="{rank}"}} 3\n'
        for rank, calls, tokens in engines
    )
    assert counts_of(text, "sglang:") == SpeculationCounts(num_rounds=60.0, accept_length=2.5, depth=3.0)
    earlier = SpeculationCounts(num_rounds=20.0, accept_length=2.0, depth=3.0)
    assert counts_of(text, "sglang:").since(earlier) == replace(earlier, num_rounds=40.0, accept_length=2.5)
    assert counts_of("sglang:spec_accept_length 0\n", "sglang:").accept_length == 0
    low = 'sglang:spec_accept_length{dp_rank="0"} 1\nsglang:spec_accept_length{dp_rank="1"} 3\n'
    assert counts_of(low, "sglang:").accept_length == 2


def test_vllms_engines_are_added_up_and_dates_are_no_counts() -> None:
    counts = counts_of(VLLM, "vllm:")
    assert counts == SpeculationCounts(40.0, 80.0, 36.0, accepted_at_depth=(24.0, 12.0))
    acceptance = acceptance_of(counts, 36 + 50)
    assert acceptance is not None
    assert (acceptance.covered, acceptance.depth) == (0.8, 2.0)
    assert acceptance.at_depth == [0.6, 0.5]


@pytest.mark.parametrize("name", ["forerun", "vllm", "llamacpp"])
def test_two_readings_give_what_came_between(name: DialectName) -> None:
    standin, dialect = StandIn(name, depth=3), dialect_of(name, None)
    list(standin.rounds({"prompt": "x", "seed": 1, "max_tokens": 40}))
    before = counts_of(standin.metrics(), dialect.prefix)
    first = replace(standin, at_depth=standin.at_depth[:])
    list(standin.rounds({"prompt": "y", "seed": 2, "max_tokens": 60}))
    between = counts_of(standin.metrics(), dialect.prefix).since(before)
    assert between.num_drafts == standin.num_drafts - first.num_drafts > 0
    assert between.num_drafted == standin.num_drafted - first.num_drafted
    assert between.num_accepted == standin.num_accepted - first.num_accepted
    assert list(between.accepted_at_depth) == [a - b for a, b in zip(standin.at_depth, first.at_depth, strict=True)][:3]


def test_sglangs_verifications_and_gauges_give_a_chain_of_equal_chances() -> None:
    standin = StandIn("sglang", depth=3)
    words = sum(len(each.words) for each in standin.rounds({"prompt": "x", "seed": 1, "max_tokens": 200})) - 1
    counts = counts_of(standin.metrics(), "sglang:").since(SpeculationCounts())
    acceptance = acceptance_of(counts, words)
    assert acceptance is not None
    assert acceptance.tokens_per_round == words / standin.num_rounds
    assert (acceptance.depth, acceptance.covered) == (3, 1.0)
    assert acceptance.reached is not None
    assert 1 + sum(acceptance.reached) == pytest.approx(acceptance.tokens_per_round)
    assert len({round(rate, 6) for rate in acceptance.at_depth}) == 1
    only_gauge = SpeculationCounts(accept_length=2.5)
    older = acceptance_of(only_gauge, 100)
    assert older is not None
    assert older.tokens_per_round == pytest.approx(2.5)
    assert older.reached is None


def test_missing_counters_give_no_acceptance() -> None:
    assert not counts_of(None, "vllm:").known
    for text in ("<html>", "\n {,\t=N{ Y", '<div class="a" style={b}>', *(f"{PER_POSITION}{each} 1" for each in ODD)):
        assert not counts_of(text, "vllm:").known
    assert not counts_of(VLLM, UNKNOWN.prefix).known
    for prefix in ("vllm:", UNKNOWN.prefix):
        assert not counts_of("spec_decode_num_drafts_total 3\n", prefix).known
    assert acceptance_of(SpeculationCounts(), 100) is None
    assert acceptance_of(SpeculationCounts(5.0, 9.0, 3.0), 0) is None
    for undetermined in (
        SpeculationCounts(0.0, 0.0, 0.0),  # nothing was drafted, so whether each token took a round is unknown
        SpeculationCounts(num_drafted=100.0, num_accepted=100.0),  # more accepted tokens than rounds could have emitted
        SpeculationCounts(num_rounds=0.0),
        SpeculationCounts(num_rounds=-1.0),
        SpeculationCounts(num_drafts=4.0),
    ):
        assert acceptance_of(undetermined, 100) is None
    assert not counts_of_answers([]).known


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300"])
def test_values_that_are_no_counts_are_left_out(value: str) -> None:
    broken = VLLM.replace(" 80.0", f" {value}").replace(" 12.0", f" {value}")
    assert counts_of(broken, "vllm:") == SpeculationCounts(40.0, None, 36.0, accepted_at_depth=(24.0,))


def test_counters_that_have_decreased_are_of_another_server() -> None:
    before = counts_of(VLLM, "vllm:")
    for lower in (replace(before, num_drafts=39.0), replace(before, accepted_at_depth=(24.0, 11.0))):
        assert not lower.since(before).known
        assert before.since(lower).known


def test_draft_tokens_beyond_the_end_of_an_answer_make_no_round_longer() -> None:
    """vLLM counted 9 of 9 draft tokens as accepted in an answer of 12 tokens, the first from the prompt."""
    acceptance = acceptance_of(SpeculationCounts(3.0, 9.0, 9.0, accepted_at_depth=(3.0, 3.0, 3.0)), 11)
    assert acceptance is not None
    assert acceptance.tokens_per_round == 11 / 3
    assert acceptance.covered == 1.0


def test_counts_in_answers_are_used_where_metrics_have_none() -> None:
    counts = counts_of_answers([{"num_drafted": 9, "num_accepted": 4, "num_rounds": 6}, {"num_drafted": 3}])
    acceptance = acceptance_of(counts, 10)
    assert acceptance is not None
    assert acceptance.tokens_per_round == 10 / 6
    assert acceptance.acceptance_rate == 4 / 12
    assert acceptance.reached is None


def test_rounds_without_drafts_have_a_token_each_and_the_others_share_the_accepted_ones() -> None:
    none = acceptance_of(SpeculationCounts(num_drafted=0.0, num_rounds=10.0), 10)
    assert none is not None
    assert none.tokens_per_round == 1
    assert acceptance_of(SpeculationCounts(num_drafted=0.0), 10) is None
    half = acceptance_of(SpeculationCounts(num_drafts=50.0, num_drafted=150.0, num_accepted=60.0), 160)
    assert half is not None
    assert (half.covered, half.tokens_per_round, half.full_depth) == (0.5, 1.6, 3)
    assert sum(half.reached or ()) == pytest.approx(60 / 50)
    assert replace(half, reached=(0.5, 0.6, 0.0)).at_depth == [0.5, 1.0, 0.0]  # read while a round was counted
    assert replace(half, reached=(0.5, 0.0, 0.0)).full_depth == 3


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (SpeculationCounts(1.0, 3.0, 2.0), (3.0, 1.0, 3.0)),
        (SpeculationCounts(num_accepted=2.0), (3.0, None, None)),
        (SpeculationCounts(num_drafts=1.0, num_accepted=2.0, depth=4.0), (3.0, 1.0, 4.0)),
        (SpeculationCounts(num_drafts=3.0, num_rounds=2.0), (1.5, 1.0, None)),
        (SpeculationCounts(num_drafts=1.0, num_rounds=2.0), (1.5, 0.5, None)),
        (SpeculationCounts(num_drafts=0.0, num_rounds=3.0, depth=4.0, accepted_at_depth=(0.0,)), (1.0, 0.0, 4.0)),
        (SpeculationCounts(num_rounds=2.0), (1.5, None, None)),
        (SpeculationCounts(num_rounds=2.0, depth=4.0), (1.5, 1.0, 4.0)),
    ],
)
def test_what_a_server_does_not_report_is_unknown(
    counts: SpeculationCounts, expected: tuple[float, float | None, float | None]
) -> None:
    """Of three tokens. The gauge of the accepted length is used only if nothing else tells the number of rounds."""
    acceptance = acceptance_of(counts, 3)
    assert acceptance is not None
    assert (acceptance.tokens_per_round, acceptance.covered, acceptance.depth) == expected
    assert acceptance_of(replace(counts, accept_length=9.0), 3) == acceptance
    assert (acceptance.reached is None) == (not acceptance.depth or not acceptance.covered)
    assert counts.since(SpeculationCounts()) == counts


def test_full_drafts_are_as_long_as_the_mean_or_the_longest_accepted_one() -> None:
    acceptance = acceptance_of(SpeculationCounts(num_rounds=2.0), 3)
    assert acceptance is not None
    assert (acceptance.full_depth, acceptance.at_depth) == (None, [])
    for reached, depth, full in (
        ((0.5, 0.3, 0.2, 0.01), 2.2, 4),
        ((0.5, 0.3, 0.0, 0.0), None, 2),
        ((0.5, 0.3), 2.6, 3),
        (None, 2.6, 3),
    ):
        assert replace(acceptance, reached=reached, depth=depth).full_depth == full
    assert replace(acceptance, reached=(0.5, 0.0, 0.0)).at_depth == [0.5, 0.0, 0.0]


def test_an_even_chain_has_the_tokens_that_were_counted() -> None:
    assert sum(even_chain(2.5, 4)) == pytest.approx(1.5)
    assert even_chain(1.0, 3) == pytest.approx((0, 0, 0), abs=1e-9)


def test_an_engine_is_known_by_its_models_or_behind_a_gateway_by_its_metrics() -> None:
    for dialect in DIALECTS:
        assert dialect_of(dialect.owner, None) is dialect
        assert dialect_of("gateway", f"# HELP x y\n{dialect.prefix}num 1\n") is dialect
    assert dialect_of("gateway", None) is UNKNOWN
    assert len({dialect.prefix for dialect in DIALECTS}) == len(DIALECTS)
    for dialect in DIALECTS:
        assert "4" in str(dialect.options(4))
    assert UNKNOWN.options(4) is None

"""Figures of a load test, against definitions: percentiles, goodput, what an agreement allows, and ratios."""

import io
import json
import math
import statistics
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forerun.errors import InvalidRequest
from forerun.traffic.client import ServedModel, TimedAnswer
from forerun.traffic.figures import (
    ServiceLevel,
    TimeFigures,
    TrafficBlock,
    TrafficReport,
    capacity,
    differences,
    percentile,
    requests_of_block,
    traffic_figures,
)
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan
from forerun.traffic.show import picture as draw_traffic
from forerun.traffic.show import traffic_card

OFF, AUTO = SpeculationMode("off"), SpeculationMode("auto")
RATES = tuple(ServerLoad("rate", rate) for rate in (1.0, 2.0, 4.0))


def answer(index: int, between_s: float, first_s: float = 0.1, num: int = 11, error: str = "") -> TimedAnswer:
    """An answer of so many tokens that was due at 0."""
    last_s = first_s + between_s * (num - 1)
    return TimedAnswer(index, 0.0, 0.0, first_s, last_s, num, between_s, f"text {index}", error=error)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0.1, 100))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    def enough(value: float) -> bool:
        return sum(each <= value for each in values) >= len(values) * share / 100 - 1e-9

    assert percentile(values, share) == min(value for value in values if enough(value))


def test_arrivals_are_those_of_a_poisson_process_at_exactly_the_rate() -> None:
    plan = TrafficPlan(RATES, (OFF,), num_requests=2000)
    times = plan.arrivals_s(RATES[2], 0)
    assert list(times) == sorted(times)
    assert 0 <= times[0] <= times[-1] <= plan.span_s(RATES[2]) == 500
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1)  # an exponential's is its mean; even gaps have none
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.04)
    assert times == plan.arrivals_s(RATES[2], 0) != plan.arrivals_s(RATES[2], 1)


def blocks(between: dict[tuple[float, str], float]) -> tuple[TrafficPlan, list[TrafficBlock]]:
    """Blocks of twenty answers, of which one in twenty takes ten times as long between tokens."""
    modes = tuple(dict.fromkeys(SpeculationMode(mode) for _, mode in between))
    plan = TrafficPlan(RATES, modes, num_requests=20, repeats=2)
    found = []
    for turn in plan.turns():
        each = between[turn.load.value, turn.mode.name]
        answers = tuple(answer(index, each * (10 if index == 7 else 1)) for index in range(20))
        found.append(TrafficBlock(turn, answers, 20 / turn.load.value * (1 if turn.repetition else 2)))
    return plan, found


PACES = {(1.0, "off"): 0.04, (2.0, "off"): 0.06, (4.0, "off"): 0.2}
PACES |= {(1.0, "auto"): 0.02, (2.0, "auto"): 0.03, (4.0, "auto"): 0.07}


def report_of(agreement: ServiceLevel) -> TrafficReport:
    plan, ran = blocks(PACES)
    figures = traffic_figures(plan, ran, agreement, lambda repetition, index: "ab"[index % 2])
    model = ServedModel("m", True)
    return TrafficReport("http://x", model, plan, agreement, 20, figures, ran, differences(plan, ran))


def test_the_agreement_is_answered_by_the_heaviest_load_that_keeps_it() -> None:
    report = report_of(ServiceLevel(between_s=0.05))
    best, broken = capacity(report.figures, OFF)
    assert best is not None
    assert (best.load.value, broken) == (1.0, True)
    best, broken = capacity(report.figures, AUTO)
    assert best is not None
    assert (best.load.value, broken, best.kept) == (2.0, True, 0.95)
    stricter = report_of(ServiceLevel(between_s=0.05, percentile=96.0))
    assert capacity(stricter.figures, AUTO) == (None, True)
    assert capacity(report_of(ServiceLevel(between_s=5.0)).figures, OFF)[1] is False


def test_goodput_counts_requests_within_both_limits() -> None:
    figures = report_of(ServiceLevel(between_s=0.05, first_s=0.1)).figures[1]
    assert (figures.load.value, figures.mode, figures.kept) == (1.0, AUTO, 0.95)
    assert figures.goodput_per_s is not None
    assert figures.goodput_per_s.median == pytest.approx((19 / 20 + 19 / 40) / 2)
    for level in (ServiceLevel(between_s=0.05, first_s=0.099), ServiceLevel(first_s=0.099)):
        late = report_of(level).figures[1]
        assert (late.kept, late.holds) == (0, False)
    assert ServiceLevel(between_s=1.0).is_met_by(answer(0, 1.0))
    assert ServiceLevel(between_s=1.0).is_met_by(answer(0, 1.0, num=1))


def test_a_failed_request_has_no_times_and_keeps_no_limit() -> None:
    """Half of the requests fail; of the others one in ten is too slow. The share is that of all requests."""
    plan, ran = blocks(PACES)
    failed = tuple(answer(index, 0.0, error="no") for index in range(10, 20))
    ran = [replace(block, answers=block.answers[:10] + failed) for block in ran]
    figures = traffic_figures(plan, ran, ServiceLevel(between_s=0.05, percentile=90.0))[1]
    assert (figures.kept, figures.holds, figures.num_requests) == (0.45, False, 40)
    assert (figures.times.num_answers, figures.errors) == (20, {"no": 20})
    assert figures.by_category == {}
    complete, error = requests_of_block(ran[0])[9:11]
    assert (complete["error"], complete["total_s"]) == (None, ran[0].answers[9].total_s)
    assert (error["error"], "total_s" in error) == ("no", False)
    assert (
        traffic_figures(plan, ran, ServiceLevel())[1].kept
        is traffic_figures(plan, ran, ServiceLevel())[1].holds
        is None
    )
    assert figures.goodput_per_s is not None
    assert figures.requests_per_s is not None
    assert figures.goodput_per_s.median == pytest.approx(0.9 * figures.requests_per_s.median)


def test_ratios_are_formed_within_a_repetition() -> None:
    """Blocks of the first repetition took twice as long: ratios between repetitions would be 2 or a half."""
    for figures in report_of(ServiceLevel()).figures:
        assert figures.speed_up is not None
        assert (figures.speed_up.low, figures.speed_up.median, figures.speed_up.high) == (1, 1, 1)


def test_counts_of_speculation_are_summed_over_answers_and_delays_are_the_longest() -> None:
    """An answer without such counts, or with one missing, adds nothing to them; the lateness is that of sending."""
    plan, ran = blocks({(rate.value, "off"): 0.1 for rate in RATES})
    counts: list[dict[str, int | None] | None] = [
        {"num_drafted": 6, "num_accepted": 3, "num_rounds": 4},
        {"num_drafted": 2, "num_rounds": None},
        None,
    ]
    some = [
        replace(ran[0].answers[i], speculation=each, due_s=1.0, sent_s=1.0 + 0.1 * i, counted=i != 1)
        for i, each in enumerate(counts)
    ]
    ran[0] = replace(ran[0], answers=(*some, *ran[0].answers[3:]))
    first, second, _ = traffic_figures(plan, ran, ServiceLevel())
    assert (first.acceptance_rate, first.tokens_per_round, first.counted) == (3 / 8, 7 / 4, False)
    assert (second.acceptance_rate, second.tokens_per_round, second.counted) == (None, None, True)
    assert (first.late_s, second.late_s) == (pytest.approx(0.2), 0.0)
    assert first.tokens_per_s is not None
    assert first.tokens_per_s.median == pytest.approx((20 * 11 / 20 + 20 * 11 / 40) / 2)


def test_the_capacity_is_that_of_rates_if_there_are_any_in_their_order() -> None:
    loads = (RATES[2], ServerLoad("concurrency", 8.0), RATES[0], ServerLoad("concurrency", 2.0))
    plan = TrafficPlan(loads, (OFF,), num_requests=4, repeats=1)
    ran = [TrafficBlock(turn, tuple(answer(i, turn.load.value) for i in range(4)), 1.0) for turn in plan.turns()]
    figures = traffic_figures(plan, ran, ServiceLevel(between_s=2.0))
    for kind, best in (("rate", 1.0), ("concurrency", 2.0)):
        of_kind = [each for each in figures if kind == "rate" or each.load.kind == kind]
        found, violated = capacity(of_kind, OFF)
        assert found is not None
        assert (found.load.kind, found.load.value, violated) == (kind, best, True)


def test_requests_of_a_closed_loop_are_all_due_at_once() -> None:
    load = ServerLoad("concurrency", 4.0)
    plan = TrafficPlan((load,), (OFF,), num_requests=3)
    assert (plan.arrivals_s(load, 0), plan.span_s(load)) == ([0.0] * 3, 0.0)


def test_percentiles_are_over_requests() -> None:
    times = TimeFigures.of([answer(i, 0.001 * (i + 1)) for i in range(100)] + [answer(0, 9.0, error="no")])
    assert times.num_answers == 100
    assert times.between_tokens_s is not None
    for share in (50, 90, 95, 99):
        assert times.between_tokens_s[f"p{share}"] == pytest.approx(share / 1000)
    assert TimeFigures.of([answer(0, 1.0, error="no")]).first_token_s is None
    alone, several = (TimeFigures.of([replace(answer(0, 1.0, num=num), longest_gap_s=3.0)]) for num in (1, 2))
    assert (alone.between_tokens_s, alone.longest_gap_s) == (None, None)
    assert several.longest_gap_s == dict.fromkeys(("p50", "p90", "p95", "p99"), 3.0)


def test_the_report_is_json_and_is_shown_whole() -> None:
    report = report_of(ServiceLevel(between_s=0.05))
    as_object = json.loads(json.dumps(report.as_object(), allow_nan=False))
    assert [each["load"]["value"] for each in as_object["capacity"]] == [1.0, 2.0]
    assert as_object["cells"][1]["times"]["between_tokens_s"]["p95"] == pytest.approx(0.02)
    assert set(as_object["cells"][0]["by_category"]) == {"a", "b"}
    assert len(as_object["requests"]) == 3 * 2 * 2 * 20
    asked = ("url", "num_prompts", "same_answers", "differences")
    assert [as_object[name] for name in asked] == ["http://x", 20, True, []]
    assert [as_object[name] for name in ("model", "plan", "agreement")] == [
        json.loads(json.dumps(asdict(each))) for each in (report.model, report.plan, report.agreement)
    ]
    assert [each["requests_per_s"] for each in as_object["capacity"]] == pytest.approx([0.75, 1.5])
    assert report_of(ServiceLevel()).as_object()["capacity"] is None
    assert replace(report, model=ServedModel("m", False)).same_answers is None
    assert replace(report, plan=replace(report.plan, modes=(OFF,))).same_answers is None
    assert {each.mode for each in report.of(AUTO)} == {AUTO}
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(traffic_card(report))
    text = console.export_text()
    assert "off: 1 requests/s" in text
    assert "auto: 2 requests/s" in text
    assert "Every mode gave the same answers." in text
    assert "by category" in text


def test_the_picture_has_a_row_of_panels_for_each_kind_of_load_and_a_line_for_each_mode() -> None:
    picture = ElementTree.fromstring(draw_traffic(report_of(ServiceLevel(between_s=0.05))))
    panels = picture.findall("{*}g")
    assert len(panels) == 3
    assert all(len(panel.findall("{*}polyline")) == 2 for panel in panels)
    assert [len(panel.findall("{*}line[@class='l']")) for panel in panels] == [0, 0, 1]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ServerLoad("rate", 0.0), "rate"),
        (lambda: ServerLoad("concurrency", 1.5), "concurrency"),
        (lambda: ServerLoad("rate", math.nan), "rate"),
        (lambda: SpeculationMode("fast"), "speculation"),
        (lambda: SpeculationMode("9" * 5000), "speculation"),
        (lambda: TrafficPlan((RATES[0], RATES[0]), (OFF,)), "rate"),
        (lambda: TrafficPlan(RATES, (OFF, OFF)), "speculation"),
        (lambda: TrafficPlan(RATES, (OFF,), max_tokens=1), "max_tokens"),
        (lambda: TrafficPlan(()), "rate"),
        (lambda: ServiceLevel(between_s=0.0), "sla_between_ms"),
        (lambda: ServiceLevel(percentile=0.0), "sla_percentile"),
        (lambda: ServiceLevel(percentile=100.5), "sla_percentile"),
        (lambda: ServiceLevel(first_s=math.inf), "sla_first_ms"),
        (lambda: ServerLoad("concurrency", 0.0), "concurrency"),
        (lambda: ServerLoad("rate", math.inf), "rate"),
        (lambda: TrafficPlan(RATES, (OFF,), temperature=-1.0), "temperature"),
    ],
)
def test_mistakes_name_their_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        make()

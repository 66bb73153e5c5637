"""Figures of a load test, against definitions: percentiles, goodput, what an agreement allows, and ratios."""

import io
import json
import math
import statistics
from dataclasses import replace
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
    late = report_of(ServiceLevel(between_s=0.05, first_s=0.099)).figures[1]
    assert late.kept == 0


def test_a_failed_request_has_no_times_and_keeps_no_limit() -> None:
    """Half of the requests fail; of the others one in ten is too slow. The share is that of all requests."""
    plan, ran = blocks(PACES)
    failed = tuple(answer(index, 0.0, error="no") for index in range(10, 20))
    ran = [replace(block, answers=block.answers[:10] + failed) for block in ran]
    figures = traffic_figures(plan, ran, ServiceLevel(between_s=0.05, percentile=90.0))[1]
    assert (figures.kept, figures.holds, figures.num_requests) == (0.45, False, 40)
    assert (figures.times.num_answers, figures.errors) == (20, {"no": 20})
    assert figures.goodput_per_s is not None
    assert figures.requests_per_s is not None
    assert figures.goodput_per_s.median == pytest.approx(0.9 * figures.requests_per_s.median)


def test_ratios_are_formed_within_a_repetition() -> None:
    """Blocks of the first repetition took twice as long: ratios between repetitions would be 2 or a half."""
    for figures in report_of(ServiceLevel()).figures:
        assert figures.speed_up is not None
        assert (figures.speed_up.low, figures.speed_up.median, figures.speed_up.high) == (1, 1, 1)


def test_percentiles_are_over_requests() -> None:
    times = TimeFigures.of([answer(i, 0.001 * (i + 1)) for i in range(100)] + [answer(0, 9.0, error="no")])
    assert times.num_answers == 100
    assert times.between_tokens_s is not None
    for share in (50, 90, 95, 99):
        assert times.between_tokens_s[f"p{share}"] == pytest.approx(share / 1000)
    assert TimeFigures.of([answer(0, 1.0, error="no")]).first_token_s is None
    assert TimeFigures.of([answer(0, 1.0, num=1)]).between_tokens_s is None


def test_the_report_is_json_and_is_shown_whole() -> None:
    report = report_of(ServiceLevel(between_s=0.05))
    as_object = json.loads(json.dumps(report.as_object(), allow_nan=False))
    assert [each["load"]["value"] for each in as_object["capacity"]] == [1.0, 2.0]
    assert as_object["cells"][1]["times"]["between_tokens_s"]["p95"] == pytest.approx(0.02)
    assert set(as_object["cells"][0]["by_category"]) == {"a", "b"}
    assert len(as_object["requests"]) == 3 * 2 * 2 * 20
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
    ],
)
def test_mistakes_name_their_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        make()

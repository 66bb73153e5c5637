"""What `forerun tune` says where its own figures are no evidence: "undecided", why, and what to do, but no setting.

A drafter's name is the same in all rows of its tables.
"""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from forerun import machine
from forerun.bench.figures import group_figures
from forerun.bench.measure import Measurements
from forerun.bench.plan import CHOSEN, Group, Selection
from forerun.tune.page import html_page
from forerun.tune.passes import RowCosts
from forerun.tune.predict import Expected
from forerun.tune.report import TuneReport
from forerun.tune.show import tune_card
from forerun.tune.study import CONTRADICTION, Studied, TuneCell
from forerun.tune.trial import Candidate
from kit.bench_runs import run_of

BUSY, DISTURBING = 1.5, 0.2
ABOUT = {
    "model": {"target": "toy", "given_as": "toy", "format": "float32", "kernels": "torch", "fingerprint": "0"},
    "machine": {"processor": "x86", "num_threads": 1},
    "prompts": {"num_prompts": 4, "digest": "0", "template": None, "replayed": False},
}


@pytest.fixture(autouse=True)
def measurements_can_be_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISTURBING", DISTURBING)


def studied(
    draft: str, measured: float, predicted: float, busy: float = 0.0, batch: int = 1, costs_busy: float = 0.0
) -> Studied:
    """A candidate whose runs at depth 3 and at chosen depths have this speed-up."""
    group = Group("tune", batch, 0.0)
    runs = [run_of(0, 1.0, busy), run_of(3, 1 / measured, 0.0), run_of(CHOSEN, 1 / measured, 0.0)]
    expected = Expected("", 3, predicted, (predicted,) * 3, (0.9 * predicted, 1.1 * predicted), costs_busy)
    return Studied(Candidate(draft, "early-exit:auto"), cells=(TuneCell(group, expected, group_figures(group, runs)),))


def report_of(*candidates: Studied) -> TuneReport:
    return TuneReport(ABOUT, {}, Selection((1,)), (0.0,), candidates)


def printed(report: TuneReport) -> str:
    file = io.StringIO()
    Console(width=200, file=file).print(tune_card(report))
    return file.getvalue()


DISTURBED = studied("ngram", 1.3, 1.2, busy=BUSY)
COSTS_DISTURBED = studied("ngram", 1.3, 1.2, costs_busy=BUSY)
CONTRADICTORY = studied("ngram", 1.26, 0.27)
FLATTERED = studied("ngram", 0.8, 1.3)


@pytest.mark.parametrize("doubtful", [DISTURBED, COSTS_DISTURBED, CONTRADICTORY, FLATTERED])
def test_no_setting_is_named_on_figures_that_are_no_evidence(doubtful: Studied) -> None:
    report = report_of(doubtful)
    (cell,) = doubtful.cells
    assert cell.undecided
    found = report.as_object()
    assert found["pick"] is None
    assert found["choices"] == found["translations"] == []
    assert found["best_exits"] == {}
    assert found["plain_from_batch"] == [{"temperature": 0.0, "batch": None}]
    (entry,) = found["undecided"]
    assert entry["reason"] == found["candidates"][0]["cells"][0]["undecided"] == cell.undecided
    assert (entry["batch"], entry["temperature"], entry["draft"]) == (1, 0.0, "ngram")
    assert found["candidates"][0]["cells"][0]["likely_on_other_prompts"] is None
    for shown in (" ".join(printed(report).split()), html_page(report)):
        assert "Undecided at batch 1, temperature 0: no setting is recommended." in shown
        assert cell.undecided in shown
        assert entry["advice"] in shown
        assert "←" not in shown
        for word in ("Use ngram", "is fastest", "On other prompts", "--config forerun.toml"):
            assert word not in shown
    rows = [line for line in printed(report).splitlines() if line.strip().startswith("ngram ")]
    assert [row.count("undecided") for row in rows[:2]] == [1, 1]


def test_the_reason_and_the_advice_are_those_of_the_case() -> None:
    busy, contradictory = (report_of(each).as_object()["undecided"][0] for each in (DISTURBED, CONTRADICTORY))
    assert busy["reason"].startswith("disturbed: other programs kept 1.5 of")
    assert "the same command" in busy["advice"]
    assert contradictory["reason"] == "×0.27 predicted and ×1.26 measured contradict each other"
    assert "--fresh" in contradictory["advice"]


@pytest.mark.parametrize("predicted", [1.26 * 0.99 * CONTRADICTION, 1.26 / CONTRADICTION * 1.01])
def test_errors_of_usual_predictions_are_no_contradiction(predicted: float) -> None:
    report = report_of(studied("ngram", 1.26, predicted))
    assert report.as_object()["undecided"] == []
    assert report.pick is not None
    assert report.pick.draft == "ngram"


def test_a_certain_candidate_is_recommended_despite_an_uncertain_one_but_plain_decoding_is_not() -> None:
    faster = report_of(DISTURBED, studied("suffix", 1.1, 1.1))
    assert faster.pick is not None
    assert (faster.pick.draft, faster.pick.speed_up) == ("suffix", pytest.approx(1.1))
    assert "Use suffix" in printed(faster)
    assert "ngram, batch 1, temperature 0, is undecided: disturbed" in " ".join(printed(faster).split())
    slower = report_of(DISTURBED, studied("suffix", 0.9, 0.9))
    assert slower.pick is None
    assert slower.plain_from(0.0) is None
    assert "Undecided at batch 1" in printed(slower)


def test_costs_keep_the_greatest_disturbance_of_their_parts_and_disturbed_ones_are_measured_again(
    tmp_path: Path,
) -> None:
    quiet, busy = (RowCosts(1.0, {1: 1.0}, {1: 0.1}, num_busy=num_busy) for num_busy in (0.0, BUSY))
    assert quiet.newer([busy]).num_busy == busy.newer([quiet]).num_busy == BUSY
    assert replace(quiet, num_busy=None).newer([replace(quiet, num_busy=None)]).num_busy is None
    kept = Measurements.open(tmp_path / "m.jsonl", {}, "tuning", "out", "folder")
    for name, costs in (("quiet", quiet), ("busy", busy)):
        kept.add(name, json.loads(json.dumps({"rows": [[1, asdict(costs)]], "num_busy": costs.num_busy})))
    assert [kept.holds(name) for name in ("quiet", "busy")] == [True, False]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_long_name_is_shortened_alike_in_the_marked_row_and_in_others(width: int) -> None:
    file = io.StringIO()
    draft = f"suffix:/home/someone/{'drafters/' * 4}of-my-model/ngrams"
    Console(width=width, file=file).print(tune_card(report_of(studied(draft, 1.5, 1.5))))
    names = [line.split()[0] for line in file.getvalue().split("Acceptance")[0].splitlines() if "ngrams" in line]
    assert len(names) >= 2
    assert len(set(names)) == 1
    assert names[0].endswith("ngrams")

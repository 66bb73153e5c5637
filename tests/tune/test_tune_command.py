"""`forerun tune` from end to end, on the stories pair: what it writes, what it refuses, and how it goes on."""

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console
from typer.testing import Result

from forerun.bench.figures import Spread
from forerun.bench.run import BenchSetup
from forerun.commands.tune import settings_of
from forerun.engine import calibration
from forerun.settings_file import read_settings
from forerun.tune import study
from forerun.tune import trial as tune_settings
from forerun.tune.page import html_page
from forerun.tune.report import TunedChoice, TuneReport
from forerun.tune.show import tune_card
from forerun.tune.translate import translations
from forerun.tune.trial import Candidate, candidates_of
from kit.checkpoints import DATA
from kit.command import assert_progress_only, command, refusal

STORIES = ["Once upon a time", "Lily had a red ball", "Tom and his dog", "One day, a <b>bird</b>"]
MEASURED = ("memory", "names", "pilot", "passes", "run")  # kinds of measurements, as their names begin
QUICK = ["--max-tokens", "12", "--repeats", "2", "--threads", "1"]
FETCHES = re.compile(r"""(src|href)\s*=\s*["'](?!#)|@import|url\(\s*["']?(?!#)|(?<!xmlns=")https?://""")


@pytest.fixture(scope="module")
def pair() -> list[str]:
    root = DATA
    return ["--model", str(root / "stories260k"), "--drafts", "ngram", f"model:{root / 'stories280k'}"]


def tune(arguments: list[str]) -> Result:
    return command("tune", *arguments, *QUICK, COLUMNS="120")


@pytest.fixture(autouse=True, scope="module")
def quick_costs() -> object:
    """No limit on the engine's measurements at its start: these tests are not about time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(calibration, "LIMIT_S", 1e6)
    patch.setattr(study, "CONTRADICTION", math.inf)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def tuned(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, list[str]]:
    """A finished tuning: its folder, what was printed, and its arguments."""
    folder = tmp_path_factory.mktemp("tuned")
    prompts = folder / "tales.jsonl"
    lines = [{"prompt": story, "category": "ab"[i % 2]} for i, story in enumerate(STORIES)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [*pair, "--prompts", str(prompts), "--batch", "1,2", "--out", str(folder / "out")]
    return folder, tune(arguments), arguments


def test_the_recommendation_is_printed_and_written(tuned: tuple[Path, Result, list[str]]) -> None:
    folder, result, _ = tuned
    assert result.exit_code == 0, result.output
    assert_progress_only(result.stderr)
    for line in (
        "plain",
        "ngram",
        "stories280k",
        "pre-",
        "dicted",
        "accepted",
        "no chat template",
        "4, both to predict",
    ):
        assert line in result.stdout
    report = json.loads((folder / "out/tune.json").read_text())
    assert report["complete"]
    assert report["same_tokens"]
    assert [len(each["cells"]) for each in report["candidates"]] == [2, 2]
    for each in report["candidates"]:
        assert {line["category"] for line in each["acceptance_at_depth"]} == {None, "a", "b"}
        assert {line["batch"] for line in each["costs"]} == {1, 2}
        for cell in each["cells"]:
            by_depth = cell["predicted_speed_up_by_depth"]
            assert by_depth[cell["depth"] - 1] == max(by_depth)
            assert cell["predicted_speed_up"] > 0
            assert cell["measured_speed_up"]["median"] > 0
            error = cell["predicted_speed_up"] / cell["measured_speed_up"]["median"] - 1
            assert cell["prediction_error"] == pytest.approx(error)
            assert cell["template"] is None
    memory = [each["memory"] for each in report["candidates"]]
    assert memory[0]["weights_bytes"] == memory[0]["cache_bytes"] == 0
    assert memory[1]["weights_bytes"] > 1_000_000
    assert memory[1]["cache_bytes"] > 0


def test_the_page_needs_nothing_from_elsewhere_and_suits_light_and_dark(tuned: tuple[Path, Result, list[str]]) -> None:
    page = (tuned[0] / "out/tune.html").read_text()
    assert not FETCHES.search(page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 3
    assert "<script" not in page


def test_the_settings_are_read_by_other_commands(tuned: tuple[Path, Result, list[str]]) -> None:
    path = tuned[0] / "out/forerun.toml"
    found = read_settings(path, ["model", "draft", "depth", "verification", "threads"])
    assert found["threads"] == "1"
    line = ["--config", str(path), "-n", "4", "--seed", "1", "--json", "Once upon"]
    answer = command("generate", *line)
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["draft"] == found.get("draft")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Records everything that is measured."""
    noted, real = list[object](), BenchSetup.run
    monkeypatch.setattr(BenchSetup, "run", lambda self, *what: noted.append(what) or real(self, *what))
    return noted


def test_the_same_command_measures_nothing_again(tuned: tuple[Path, Result, list[str]], made: list[object]) -> None:
    folder, first, arguments = tuned
    before = json.loads((folder / "out/tune.json").read_text())
    again = tune(arguments)
    assert not made
    assert again.stdout == first.stdout
    assert "measurements exist already" in again.stderr
    assert json.loads((folder / "out/tune.json").read_text()) == before
    other = tune([*arguments, "--seed", "5"])
    assert other.exit_code == 2
    assert "settings.seed" in other.stderr


def test_an_undecided_tuning_names_the_settings_of_an_earlier_one(
    tuned: tuple[Path, Result, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = shutil.copytree(tuned[0] / "out", tmp_path / "out") / "forerun.toml"
    before = settings.read_text()
    monkeypatch.setattr(study, "CONTRADICTION", 0.5)  # now everything contradicts
    result = tune([*tuned[2], "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "Undecided at batch 1, temperature 0: no setting is recommended." in result.stdout
    assert f"{settings} is of an earlier tuning" in " ".join(result.stderr.split())
    assert settings.read_text() == before
    assert "forerun.toml" not in result.stdout


def test_a_damaged_measurement_is_refused_by_its_line(tuned: tuple[Path, Result, list[str]], tmp_path: Path) -> None:
    """Of each kind; the file stays as it is, and without this line the tuning goes on."""
    folder, first, arguments = tuned
    kept = shutil.copytree(folder / "out", tmp_path / "out") / "measurements.jsonl"
    lines = kept.read_text().splitlines(keepends=True)
    kinds: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=1):
        kinds.setdefault(next(kind for kind in MEASURED if f" {kind}" in json.loads(line)["of"]), number)
    assert len(kinds) == len(MEASURED)
    for kind, number in kinds.items():
        entry = json.loads(lines[number])
        for value in (
            [],
            {},
            None,
            "NaN",
            [[4, 10**9, []]],
            [[4, 1, [[[10**9, 0]]]]],
            {"rows": [[1, {"plain_s": -1}]]},
        ):
            if value == [] and kind in ("names", "pilot"):
                continue
            damaged = [*lines[:number], json.dumps(entry | {"value": value}) + "\n", *lines[number + 1 :]]
            kept.write_text("".join(damaged))
            result = tune([*arguments, "--out", str(tmp_path / "out")])
            assert result.exit_code == 2, (kind, value, result.output)
            assert f"error: out: {kept}:{number + 1} is damaged" in " ".join(result.stderr.split())
            assert kept.read_text() == "".join(damaged)
    memory = kinds["memory"]
    kept.write_text("".join([*lines[:memory], *lines[memory + 1 :]]))
    assert tune([*arguments, "--out", str(tmp_path / "out")]).stdout.splitlines()[0] == first.stdout.splitlines()[0]


def test_the_settings_file_never_names_a_python_file_but_says_how_to(tmp_path: Path) -> None:
    """Such a file may be passed on, and a drafter in a Python file is executed."""
    pick = TunedChoice(1, 0.0, "mix[ngram,python:mine.py:Mine]", 2, 1.5)
    report = SimpleNamespace(pick=pick, about={"model": {"given_as": "stdlib"}}, model_options={})
    (text,) = settings_of(cast(TuneReport, report)).values()
    (tmp_path / "forerun.toml").write_text(text)
    known = {"model", "draft", "depth", "verification"}
    values = {"model": "stdlib", "depth": "2", "verification": "coupled"}
    assert read_settings(tmp_path / "forerun.toml", known) == values
    assert "# Use it with --config FILE --draft 'mix[ngram,python:mine.py:Mine]'\n" in text


@pytest.mark.full
def test_a_new_candidate_is_measured_alone(tuned: tuple[Path, Result, list[str]], made: list[object]) -> None:
    folder, _, arguments = tuned
    before = json.loads((folder / "out/tune.json").read_text())
    more = tune([*arguments, "--drafts", "early-exit:auto"])
    assert more.exit_code == 0, more.output
    after = json.loads((folder / "out/tune.json").read_text())
    own = {each["draft"]: each for each in after["candidates"]}
    assert all(own[each["draft"]] == each for each in before["candidates"])
    exits = [draft for draft in own if draft.startswith("early-exit")]
    assert exits == ["early-exit:1", "early-exit:2"]
    assert after["best_exits"]["early-exit:auto"] in exits
    assert len(made) == 2 * 2 * 2 * 3  # exits, batches, repetitions, ways: plain, at a depth, at chosen ones


def test_without_time_nothing_is_measured_and_the_report_says_so(pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "tales.txt").write_text("\n".join(STORIES))
    where = ["--prompts", str(tmp_path / "tales.txt"), "--out", str(tmp_path / "out")]
    result = tune([*pair, "auto", *where, "--time-limit", "0.001"])
    assert result.exit_code == 0, result.output
    assert "not reached within --time-limit" in result.stdout
    assert not (tmp_path / "out/forerun.toml").exists()
    drafts = [each["draft"] for each in json.loads((tmp_path / "out/tune.json").read_text())["candidates"]]
    assert drafts == [*pair[3:], "suffix"], "auto is the drafter that it chooses"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "drafts: there is no drafter to measure"),
        (["--drafts", "ngramm"], "there is no drafter 'ngramm': did you mean ngram?"),
        (["--drafts", "ngram,"], "position 6"),
        (["--drafts", "ngram", "--batch", "0"], "batch: 0 must be"),
        (["--drafts", "ngram", "--batch", "2,2"], "batch: (2, 2) must be different values"),
        (["--drafts", "ngram", "--temperature", "-1"], "temperature"),
        (["--drafts", "ngram", "--time-limit", "-2"], "--time-limit"),
        (["--drafts", "ngram", "--prompts", "none.jsonl"], "none.jsonl: it cannot be read"),
        (["--drafts", "ngram", "--template-options", "{"], "template_options: '{' is not JSON"),
        (["--drafts", "ngram", "--out", "/proc/none"], "out: /proc/none cannot be written"),
        (["--drafts", "ngram", "--num-prompts", "2", "--max-tokens", "5000"], "and the context has"),
    ],
)
def test_mistakes_are_one_line_and_status_2_and_load_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.bench.measure.LLM", None)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert message in refusal("tune", "--model", "stdlib", *arguments, *out)


def test_exits_are_a_few_of_the_layers_each_once() -> None:
    assert tune_settings.exits_of(32) == ["early-exit:4", "early-exit:8", "early-exit:16"]
    assert tune_settings.exits_of(2) == ["early-exit:1"]
    found = candidates_of(["ngram", "early-exit:auto", "ngram", "early-exit:8"], 32)
    assert [each.draft for each in found] == ["ngram", *tune_settings.exits_of(32)]


def made_report(tuned_report: TuneReport, *speeds: float) -> TuneReport:
    """The same report with other measured speeds, by candidate."""
    studied = []
    for each, speed in zip(tuned_report.studied, speeds, strict=True):
        cells = []
        for cell in each.cells:
            assert cell.figures is not None
            drafted = replace(cell.figures.cells[-1], speed_up=Spread(speed, speed, speed))
            cells.append(replace(cell, figures=replace(cell.figures, cells=(cell.figures.cells[0], drafted))))
        studied.append(replace(each, cells=tuple(cells)))
    return replace(tuned_report, studied=tuple(studied))


@pytest.mark.full
def test_the_pick_has_the_highest_measured_speed(
    tuned: tuple[Path, Result, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TuneReport] = []
    monkeypatch.setattr("forerun.tune.page.html_page", lambda report: seen.append(report) or html_page(report))
    tune(tuned[2])
    (report,) = seen
    (bracketed,) = (replace(each, candidate=Candidate("mix[a,b]", "mix[a,b]")) for each in report.studied[:1])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tune_card(replace(report, studied=(bracketed,))))
    assert console.export_text().count("mix[a,b]") >= 4
    for speeds, best in (((1.2, 1.5), 1), ((1.5, 1.2), 0), ((0.9, 0.8), None), ((1.0, 0.8), None)):
        made = made_report(report, *speeds)
        assert made.pick is not None
        assert made.pick.draft == (None if best is None else report.studied[best].candidate.draft)
        assert made.pick.speed_up == (1.0 if best is None else max(speeds))
        assert made.plain_from(0.0) == (1 if best is None else None)
        assert bool(made.translated()) == (best is not None)
        assert "Use" in html_page(made) if best is not None else "Plain decoding is fastest" in html_page(made)


def test_settings_for_other_engines_use_their_options_and_only_their_methods() -> None:
    ngram = {each.engine: each.options for each in translations("ngram:3", 5)}
    config = json.loads(ngram["vLLM"].partition(" ")[2].strip("'"))
    assert config == {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    model = {each.engine: each.options for each in translations("model:a b", 4)}
    assert "STANDALONE" in model["SGLang"]
    assert "'a b'" in model["SGLang"]
    assert model["llama.cpp"] == "--model-draft 'a b.gguf' --draft-max 4"
    for draft in ("early-exit:2", "mix[ngram,suffix]"):
        assert all(not each.options and "it has no" in each.note for each in translations(draft, 4))


@pytest.mark.full
def test_drafters_are_tried_even_if_the_calibration_has_no_time(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LIMIT_S", 0.0)
    prompts = tmp_path / "tales.txt"
    prompts.write_text("Once upon a time\n")
    mix = f"mix[{','.join(pair[3:])}]"
    result = tune([*pair[:4], mix, "--prompts", str(prompts), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out/tune.json").read_text())
    assert report["complete"]
    assert len(report["candidates"]) == 2


class ReportingTrial:
    """A trial that reports parts of its work and measures nothing."""

    def __init__(self, draft: str) -> None:
        self.candidate = Candidate(draft, draft)
        self.report: Callable[[str, float], None] = lambda _what, _done: None
        self.deadline_s = math.inf


def test_all_parts_of_a_study_are_one_stage_that_names_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = list[tuple[str, float, str]]()

    def reported(trial: ReportingTrial) -> study.Studied:
        trial.report("measuring rounds, batch 1", 0.5)
        return study.Studied(trial.candidate)

    monkeypatch.setattr(study, "study", reported)
    trials = [ReportingTrial("ngram"), ReportingTrial("suffix")]
    study.study_all(trials, 0.0, lambda *report: reports.append(report))  # type: ignore[arg-type]
    assert reports == [
        ("tuning", 0.0, "ngram, measuring rounds, batch 1 50%"),
        ("tuning", 0.5, "suffix, measuring rounds, batch 1 50%"),
    ]

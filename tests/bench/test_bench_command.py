"""`forerun bench` from end to end, on the stories pair: card, JSON, picture, exit status, and what it refuses."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import Result

from bench.synthetic import GROUP, even, taped
from forerun.bench import measure
from forerun.bench.figures import Bandwidth, BenchReport, GroupFigures, Mismatch, group_figures
from forerun.bench.plan import Turn
from forerun.bench.run import BenchSetup
from forerun.bench.show import bench_card
from forerun.device import Placement
from forerun.sampling.recorded import Recorded
from kit.checkpoints import SMALL, TARGET
from kit.command import assert_progress_only, command, refusal

MODELS = ["--model", str(TARGET), "--draft", f"model:{SMALL}"]
QUICK = ["--max-tokens", "12", "--repeats", "2", "--num-prompts", "2", "--depth", "2,3"]
STORIES = ["Once upon a time", "Lily had a red ball", "Tom and his dog"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with prompts, and with recorded answers to them."""
    (tmp_path / "tales.txt").write_text("\n".join(STORIES) + "\n")
    entries = [{"prompt": story, "answer": f" {story}. {story}, {story}"} for story in STORIES]
    (tmp_path / "recorded.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return tmp_path


@pytest.fixture
def run(files: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command on the stories pair, its cache in the files' folder, with a bandwidth that takes no time."""
    monkeypatch.setattr(measure, "bandwidth_bytes_per_s", lambda device: 1e9)

    cache = str(files / "cache")
    return lambda *words: command("bench", *MODELS, *QUICK, *words, COLUMNS="80", XDG_CACHE_HOME=cache)


def numbers_of(value: object) -> list[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        return [n for each in value.values() for n in numbers_of(each)]
    if isinstance(value, list):
        return [n for each in value for n in numbers_of(each)]
    return [value] if isinstance(value, int | float) else []


def test_one_line_of_json_has_every_cell(run: Callable[..., Result], files: Path) -> None:
    result = run("--prompts", str(files / "tales.txt"), "--batch", "1,3", "--temperature", "0,0.8", "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert {"forerun", "models", "settings", "machine", "workloads", "bandwidth_bytes_per_s"} <= set(report)
    cells = {(c["workload"], c["batch"], c["temperature"], c["depth"]): c for c in report["cells"]}
    assert set(cells) == {("tales", b, t, d) for b in (1, 3) for t in (0.0, 0.8) for d in (0, 2, 3)}
    assert len(report["cells"]) == len(cells)
    assert all(math.isfinite(number) for number in numbers_of(report))
    assert report["same_tokens"]
    for cell in report["cells"]:
        assert cell["tokens_per_s"]["low"] <= cell["tokens_per_s"]["median"] <= cell["tokens_per_s"]["high"]
        assert cell["engine_s"]["median"] > 0
        if cell["depth"]:
            assert len(cell["acceptance_at_depth"]) <= cell["depth"]
            assert 1 <= cell["tokens_per_round"] <= 1 + cell["depth"]
            assert cell["predicted"]["median"] > 0
        else:
            assert cell["speed_up"]["median"] == cell["pass_ratio"]["median"] == cell["tokens_per_round"] == 1
            assert cell["acceptance_rate"] is None
    for group in report["groups"]:
        assert group["same_tokens"]
        assert 0 < group["distinct_8grams"] <= 1
        assert group["memory_limit_share"] == pytest.approx(
            report["weights_bytes_per_pass"] / 1e9 / group["plain_pass_s"]
        )


def test_a_replay_runs_at_one_temperature_only(run: Callable[..., Result], files: Path) -> None:
    goal = files / "out.json"
    result = run("--replay", str(files / "recorded.jsonl"), "--draft", "ngram", "--output", str(goal))
    assert result.exit_code == 0, result.output
    assert_progress_only(result.stderr)
    report = json.loads(goal.read_text())
    assert [c["temperature"] for c in report["cells"]] == [0.0] * 3
    assert report["cells"][-1]["tokens_per_round"] > 1.5  # its texts repeat themselves
    assert "recorded, batch 1, temperature 0" in result.stdout


def test_a_tree_is_cut_to_each_depth_and_no_deeper_than_itself(run: Callable[..., Result], files: Path) -> None:
    for paths, depths in (("[[0], [1], [0, 0], [0, 0, 0]]", {0, 2, 3}), ("[[0], [1], [2], [1, 0]]", {0, 2})):
        (files / "tree.json").write_text(paths)
        where = ["--prompts", str(files / "tales.txt"), "--output", str(files / "report.json")]
        result = run(*where, "--temperature", "1", "--tree", str(files / "tree.json"))
        assert result.exit_code == 0, result.output
        report = json.loads((files / "report.json").read_text())
        assert report["same_tokens"]
        assert {cell["depth"] for cell in report["cells"]} == depths
        assert report["settings"]["tree"]["paths"] == json.loads(paths)
        for cell in report["cells"][1:]:
            num_drafted = sum(len(path) <= cell["depth"] for path in json.loads(paths))
            assert cell["tokens_per_round"] == pytest.approx(1 + cell["acceptance_rate"] * num_drafted, rel=0.2)
            assert cell["pass_ratio"] is not None, "rounds that were drafted in full"
        assert "one shape" in result.stdout
    (files / "tree.json").write_text("[[0, 1]]")
    assert "add [0]" in refusal("bench", *MODELS, *QUICK, "--tree", str(files / "tree.json"))


def test_a_token_that_is_not_the_recorded_one_fails_the_command(
    run: Callable[..., Result], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Recorded.recorded_token

    def wrong(self: Recorded, row: int, position: int) -> int:
        return real(self, row, position) ^ (position == 15)

    monkeypatch.setattr(Recorded, "recorded_token", wrong)
    result = run("--replay", str(files / "recorded.jsonl"), "--output", str(files / "report.json"))
    assert result.exit_code == 1
    report = json.loads((files / "report.json").read_text())
    assert not report["same_tokens"]
    (group,) = report["groups"]
    assert {d["prompt"] for d in group["differences"]} == {f"{files}/recorded.jsonl:{i}" for i in (1, 2)}
    assert len(group["differences"]) == 2 * 3 * 2  # prompts, depths, repetitions
    assert "same tokens: NO" in result.stdout
    assert "FAULT" in result.stdout
    assert f"{files}/recorded.jsonl:" in "".join(result.stdout.split())


def test_an_interrupted_benchmark_says_how_to_continue_and_continues(
    run: Callable[..., Result], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = BenchSetup.run, list[tuple[object, ...]]()

    def counting(self: BenchSetup, *what: object) -> object:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(what)
        return real(self, *what)  # type: ignore[arg-type]

    arguments = ["--prompts", str(files / "tales.txt"), "--temperature", "0", "--json"]
    monkeypatch.setattr(BenchSetup, "run", counting)
    stopped = run(*arguments)
    assert stopped.exit_code == 130
    assert stopped.stdout == ""
    (state,) = (files / "cache/forerun/bench").iterdir()
    assert "resumes after 2 measurements" in stopped.stderr
    assert str(state) in stopped.stderr
    made.clear()
    monkeypatch.setattr(BenchSetup, "run", lambda self, *what: made.append(what) or real(self, *what))
    ended = run(*arguments)
    assert ended.exit_code == 0, ended.output
    assert len(made) == 2 * 3 - 2
    again = run(*arguments)
    assert "6 measurements exist already" in again.stderr
    assert len(made) == 4
    assert json.loads(again.stdout)["cells"] == json.loads(ended.stdout)["cells"]
    assert run(*arguments, "--fresh").exit_code == 0
    assert len(made) == 4 + 6


def test_a_state_of_other_settings_is_refused(run: Callable[..., Result], files: Path) -> None:
    arguments = ["--prompts", str(files / "tales.txt"), "--temperature", "0", "--state", str(files / "mine.jsonl")]
    assert run(*arguments).exit_code == 0
    assert "settings.seed" in refusal("bench", *MODELS, *QUICK, *arguments, "--seed", "5")
    assert run(*arguments, "--seed", "5", "--fresh").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "batch: '1,x' must be numbers"),
        (["--batch", "0"], "batch: 0 must be"),
        (["--depth", "2,2"], "depth: (2, 2) must be different values"),
        (["--workload", "novels"], "workload: 'novels' is not bundled"),
        (["--workload", "code", "--replay", "a.jsonl"], "replay: it cannot be combined with --workload"),
        (["--replay", "none.jsonl"], "none.jsonl: it cannot be read"),
        (["--widen"], "widen: "),
        (["--max-tokens", "5000"], "5004 tokens, and the context has 512"),
        (["--picture", "out.png"], "picture: out.png must be a .svg"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_mistakes_are_one_line_and_status_2(files: Path, arguments: list[str], message: str) -> None:
    prompts = [] if {"--workload", "--replay"} & set(arguments) else ["--prompts", f"{files}/tales.txt"]
    assert message in refusal("bench", *MODELS, *QUICK, *prompts, *arguments)


def test_too_little_memory_is_reported(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.memory.available_bytes", lambda: 8_000_000)
    given = ["--prompts", str(files / "tales.txt"), "--batch", "64", "--max-tokens", "200"]
    assert "batch 64 does not fit" in refusal("bench", *MODELS, *QUICK, *given)


def test_the_picture_has_two_panels_with_a_line_for_each_group(run: Callable[..., Result], files: Path) -> None:
    arguments = ["--prompts", str(files / "tales.txt"), "--batch", "1,2", "--picture", str(files / "out.svg")]
    assert run(*arguments).exit_code == 0
    panels = ElementTree.fromstring((files / "out.svg").read_text()).findall("{*}g")
    assert [len(panel.findall("{*}polyline")) for panel in panels] == [4, 4]


def made_report(figures: GroupFigures) -> BenchReport:
    about = {
        "forerun": "0",
        "models": {
            "target": "a-target-of-a-long-name " * 4,
            "draft": "model:b",
            "format": "bfloat16",
            "kernels": "I",
            "kernels_measured": "measured here: 1.2 times as fast as torch's operators, float32",
        },
        "machine": {"processor": "P", "num_threads": 2, "torch": "2", "python": "3"},
        "settings": {"repeats": 3, "num_tokens": 48},
    }
    return BenchReport(about, Bandwidth(1e10, 2e10), 2 * 10**9, {"code": ["a.py", "b.py"]}, (figures,))


def shown(report: BenchReport, width: int = 80) -> str:
    """The card."""
    file = io.StringIO()
    Console(file=file, width=width).print(bench_card(report))
    return file.getvalue()


def test_the_card_fits_80_columns_and_prints_the_figures() -> None:
    """With numbers of every possible length, without colours."""
    runs = [
        taped(even(depth, 6, depth, 1024.0 if depth else 512.0, 64.0, rest_s=8.0), GROUP, Turn(r, depth), [[1] * 9])
        for r in range(3)
        for depth in (0, 12)
    ]
    figures = group_figures(GROUP, runs)
    text = shown(made_report(figures))
    assert "\x1b" not in text
    assert "…" not in text.replace("1, 2, …", "")
    cell = figures.cells[1]
    assert cell.speed_up is not None
    assert cell.predicted is not None
    line = next(line.split() for line in text.splitlines() if line.strip().startswith("12 "))
    assert f"×{cell.speed_up.median:.2f}" in line
    assert f"×{cell.predicted.median:.2f}" in line
    assert "2.00" in line  # v(k)
    assert "13.00" in line  # tokens per round
    assert "100%" in line
    assert "50% of the 8-grams" in text
    assert "same tokens: yes" in text
    assert "before the runs, 20.0 GB/s after" in text


def test_a_difference_is_printed_with_its_prompt() -> None:
    plain, drafted = (taped(even(d, 2, 0, 1.0, 0.0), GROUP, Turn(0, d), [[1], [d]]) for d in (0, 3))
    report = made_report(group_figures(GROUP, [plain, drafted]))
    assert report.groups[0].differences == (Mismatch(3, 0, 1),)
    text = shown(report)
    assert "same tokens: NO (1 answers)" in text
    assert "depth 3, repetition 1: b.py" in text
    assert "FAULT" in text


@pytest.mark.parametrize("one_gemm", [True, False])
def test_on_a_gpu_tokens_may_differ_unless_one_gemm_is_asked_for(
    one_gemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BenchReport, "peak_bytes", 10**9)
    plain, drafted = (taped(even(d, 2, 0, 1.0, 0.0), GROUP, Turn(0, d), [[1], [d]]) for d in (0, 3))
    gpu = Placement(torch.device("cuda", 0), fixed=True, one_gemm=one_gemm)
    text = shown(replace(made_report(group_figures(GROUP, [plain, drafted])), placement=gpu), 200)
    assert ("FAULT" in text) == one_gemm
    assert ("with --one-gemm it is not" in text) == (not one_gemm)
    assert ("peak memory" in text, "host memory" in text) == (False, True)


def test_a_missing_device_is_refused_by_name(
    run: Callable[..., Result], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    for name, message in (("cuda", "built without CUDA"), ("tpu", "'tpu' is not known: use auto, cpu, cuda")):
        result = run("--prompts", str(files / "tales.txt"), "--device", name)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr

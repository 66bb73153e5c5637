"""Finished runs are kept: cut the file anywhere, and the benchmark continues to the same result."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.bench import measure
from forerun.bench.figures import Bandwidth, BenchReport
from forerun.bench.material import Item, Workload
from forerun.bench.measure import Measurements, bench, default_path
from forerun.bench.plan import Group, Selection, Turn
from forerun.bench.run import BenchRun, BenchSetup
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from kit.checkpoints import SMALL, TARGET
from kit.unchecked import unchecked
from models.damage import ABSENT, VALUES

ABOUT = {"forerun": "0", "settings": {"depths": (0, 3)}, "machine": "this"}
SELECTION = Selection(batches=(2,), depths=(0, 2), temperatures=(0.0, 0.8), num_tokens=10, repeats=2)
PROMPTS = {"tales": "Once upon a time", "dogs": "Tom and his dog"}


ENTRIES = st.lists(st.tuples(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=9)), max_size=5)


def opened(path: Path, fresh: bool = False, **changes: Any) -> Measurements:
    return Measurements.open(path, ABOUT | changes, "benchmark", "state", "file", fresh)


@settings(deadline=None)
@given(ENTRIES, st.floats(0, 1), st.sampled_from([b"", b"\n", b"\x00\xff\n", b'{"a": \n']))
def test_measurements_go_on_wherever_their_file_was_cut(
    entries: list[tuple[str, object]], share: float, torn: bytes
) -> None:
    with TemporaryDirectory() as name:
        path = Path(name) / "below" / "journal"
        kept = opened(path)
        for entry in entries:
            kept.add(*entry)
        whole = path.read_bytes()
        cut = round(share * len(whole))
        num_whole = whole[:cut].count(b"\n")
        at_an_end = whole[cut : cut + 1] == b"\n"  # what is torn there would complete the line
        path.write_bytes(whole[:cut] + (torn if num_whole and not at_an_end else b""))
        again = opened(path)
        count = max(0, num_whole - 1)
        assert again.journal.entries[1:] == [{"of": of, "value": value} for of, value in entries[:count]]
        for entry in entries[count:]:
            again.add(*entry)
        assert path.read_bytes() == whole
        again.journal.keep(1)
        assert opened(path).values == {}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", ['{"some": "thing"}\n', "notes of mine", "notes\nof mine", "[1]\n"])
def test_what_is_no_journal_of_this_kind_is_refused_and_stays(text: str, fresh: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InvalidRequest, match=r"state: .*/file is not a journal of a benchmark: name another file"):
        opened(tmp_path / "file", fresh=fresh)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", text)]


@pytest.mark.parametrize(
    ("changes", "differing"),
    [({"settings": {"depths": (0, 4)}}, "settings.depths"), ({"machine": "that", "more": 1}, "machine, more")],
)
def test_a_run_with_other_settings_is_told_which_and_may_begin_anew(
    changes: dict[str, Any], differing: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    opened(path).add("a", 1)
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match=rf"of a benchmark with other settings \({differing}\): name another file"):
        opened(path, **changes)
    assert path.read_bytes() == before
    assert opened(path, fresh=True, **changes).values == opened(path, **changes).values == {}


def test_a_damaged_measurement_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    kept = opened(path)
    kept.add("a", {"counts": (1, 2)})
    kept.add("b", 2)
    assert opened(path).values == kept.values == {"a": {"counts": [1, 2]}, "b": 2}
    whole = path.read_bytes()
    changes = ((b'"of"', b'"off"'), (b'{"of": "a"', b'{"of": "a'), (b'"a"', b'["a"]'), (b"[1, 2]", b"[" * 9999))
    for damaged in (whole.replace(*change, 1) for change in changes):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequest, match=f"state: {path}:2 is damaged: start over with --fresh"):
            opened(path)
        assert path.read_bytes() == damaged
    assert opened(path, fresh=True).values == opened(path).values == {}


def test_a_file_of_an_older_form_is_started_over(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    path.write_text('{"forerun_bench": 2, "key": "1", "about": {}}\n{"workload": "code"}\n')
    with pytest.raises(InvalidRequest, match=r"of a benchmark with other settings .*, or start over with --fresh"):
        opened(path)
    assert opened(path, fresh=True).values == {}


def test_the_default_path_differs_with_every_setting_that_changes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [ABOUT | {name: "else"} for name in ABOUT]
    places = {default_path(about) for about in (ABOUT, *others)}
    assert len(places) == 1 + len(others)
    assert all(place.is_relative_to(tmp_path) for place in places)
    assert default_path(ABOUT) == default_path(json.loads(json.dumps(ABOUT)))


def test_an_unusable_path_is_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path):
        with pytest.raises(InvalidRequest, match=f"state: {path} cannot be used .*: name another file with --state"):
            opened(path)
    kept = opened(tmp_path / "state")
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()
    with pytest.raises(InvalidRequest, match=f"state: {tmp_path}/state cannot be used"):
        kept.add("a", 1)
    monkeypatch.setattr(measure, "cache_folder", lambda kind: (_ for _ in ()).throw(OSError("no home: set HOME")))
    with pytest.raises(InvalidRequest, match="state: no home: set HOME, or name a file with --state"):
        default_path(ABOUT)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}", speculation=2, max_num_seqs=2, max_model_len=64)


@pytest.fixture
def stage(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> BenchSetup:
    """On a clock that advances by the same step at every reading."""
    ticks: Iterator[int] = count()
    clock = lambda: next(ticks) / 1024  # noqa: E731
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("forerun.bench.run.peak_rss_bytes", lambda: 1000)
    monkeypatch.setattr("forerun.machine.Neighbours.num_busy", lambda _: None)  # disturbed runs are run again
    generated = [Item(tuple(llm.tokenizer.encode(text)), None, place) for place, text in PROMPTS.items()]
    replayed = [Item(item.prompt, tuple(range(5, 17)), item.place) for item in generated]
    workloads = {"stories": Workload("stories", tuple(generated)), "own": Workload("own", tuple(replayed))}
    return BenchSetup(llm, workloads, SELECTION.num_tokens, clock=clock)


def report_json(stage: BenchSetup, path: Path) -> str:
    """The final JSON."""
    with unchecked():
        groups = bench(stage, SELECTION, opened(path), lambda _what, _done: None)
    places = {name: list(PROMPTS) for name in stage.workloads}
    return json.dumps(BenchReport(ABOUT, Bandwidth(1e9, 2e9), 100, places, tuple(groups)).as_object())


@pytest.mark.short("1")
@pytest.mark.parametrize("first", range(4))
def test_a_benchmark_cut_off_at_any_line_ends_in_the_same_json(stage: BenchSetup, first: int, tmp_path: Path) -> None:
    """Here at every fourth one."""
    path = tmp_path / "state.jsonl"
    whole = report_json(stage, path)
    assert json.loads(whole)["same_tokens"]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 2 * 2
    for num_kept in range(first, len(lines), 4):
        path.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:40])
        assert report_json(stage, path) == whole
        assert path.read_bytes().splitlines(keepends=True) == lines


def test_finished_runs_are_not_repeated_and_progress_counts_the_remaining_ones(
    stage: BenchSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "state.jsonl", []
    report_json(stage, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    real = BenchSetup.run

    def noted(self: BenchSetup, group: Group, turn: Turn) -> BenchRun:
        ran.append((group, turn))
        return real(self, group, turn)

    monkeypatch.setattr(BenchSetup, "run", noted)
    shares: list[float] = []
    with unchecked():
        bench(stage, SELECTION, opened(path), lambda _what, done: shares.append(done))
    assert ran == [(Group("own", 2, 0.0), Turn(1, 2)), (Group("own", 2, 0.0), Turn(1, 0))]
    assert shares == [0.0, 0.0, 0.5]


def test_no_figure_is_computed_from_a_damaged_run(stage: BenchSetup, tmp_path: Path) -> None:
    """Any value in place of any part of a run: it is named by its line, or the report has numbers only."""
    path, damaged = tmp_path / "state.jsonl", tmp_path / "damaged.jsonl"
    report_json(stage, path)
    head, line, *others = path.read_bytes().splitlines(keepends=True)
    num_refused = 0
    for name in (*json.loads(line)["value"], "unknown"):
        for value in VALUES.values():
            entry = json.loads(line)
            entry["value"][name] = value
            if value is ABSENT:
                entry["value"].pop(name)
            damaged.write_bytes(head + json.dumps(entry).encode() + b"\n" + b"".join(others))
            before, problem = damaged.read_bytes(), ""
            try:
                report = json.loads(report_json(stage, damaged), parse_constant=lambda text: pytest.fail(text))
            except InvalidRequest as error:
                problem = str(error)
            if problem:
                num_refused += 1
                assert f"state: {damaged}:2 is damaged" in problem
                assert "delete this line" in problem
                assert damaged.read_bytes() == before
            else:
                assert len(report["cells"]) == 6
    assert num_refused > 400

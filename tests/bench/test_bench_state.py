"""Finished runs survive: cut the file anywhere, and the benchmark goes on to the same end."""

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from bench.synthetic import GROUP, random_rounds, taped
from forerun.bench import state as module
from forerun.bench.bench import bench
from forerun.bench.material import Item, Workload
from forerun.bench.plan import Group, Selection, Turn
from forerun.bench.report import Bandwidth, BenchReport
from forerun.bench.run import BenchRun, Stage
from forerun.bench.state import State, default_path, key_of
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from kit.checkpoints import SMALL, TARGET
from kit.unchecked import unchecked

ABOUT = {"forerun": "0", "settings": {"depths": (0, 3)}, "machine": "this"}
SELECTION = Selection(batches=(2,), depths=(0, 2), temperatures=(0.0, 0.8), num_tokens=10, repeats=2)
PROMPTS = {"tales": "Once upon a time", "dogs": "Tom and his dog"}


def some_runs() -> list[BenchRun]:
    rng = random.Random(4)
    turns = [Turn(r, depth) for r in range(3) for depth in (0, 3)]
    return [taped(random_rounds(rng, 1, turn.depth), GROUP, turn, [[1, 2, 3]]) for turn in turns]


def test_what_is_added_is_there_again_wherever_the_file_was_cut(tmp_path: Path) -> None:
    path, runs = tmp_path / "state.jsonl", some_runs()
    state = State.open(path, ABOUT)
    for run in runs:
        state.add(run)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, *(end + shift for end in ends for shift in (-20, -1, 0, 15)), len(whole)]:
        path.write_bytes(whole[: max(0, cut)])
        again = State.open(path, ABOUT)
        num_whole = sum(end <= cut for end in ends)
        assert list(again.runs.values()) == runs[: max(0, num_whole - 1)]
        for run in runs[max(0, num_whole - 1) :]:
            again.add(run)
        assert path.read_bytes() == whole


def test_a_torn_last_line_with_its_end_is_dropped_too(tmp_path: Path) -> None:
    path, runs = tmp_path / "state.jsonl", some_runs()
    state = State.open(path, ABOUT)
    for run in runs[:2]:
        state.add(run)
    good = path.read_bytes()
    path.write_bytes(good + b'{"workload": "co\x00\xff\n')
    assert list(State.open(path, ABOUT).runs.values()) == runs[:2]
    assert path.read_bytes() == good


def test_files_of_something_else_are_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    State.open(path, ABOUT).add(some_runs()[0])
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match=r"other settings \(machine\)") as caught:
        State.open(path, ABOUT | {"machine": "another"})
    assert str(path) in str(caught.value)
    assert caught.value.field == "state"
    with pytest.raises(InvalidRequest, match=r"other settings \(settings.depths\)"):
        State.open(path, ABOUT | {"settings": {"depths": (0, 4)}})
    assert path.read_bytes() == before
    for fresh in (False, True):
        for own in ('{"some": "thing"}\n', "notes of mine", "notes\nof mine", "[1]\n"):
            path.write_text(own)
            with pytest.raises(InvalidRequest, match="no state of a benchmark"):
                State.open(path, ABOUT, fresh)
            assert path.read_text() == own
    path.write_bytes(before.replace(b'"depth": 0', b'"depht": 0') + before.splitlines(keepends=True)[1])
    with pytest.raises(InvalidRequest, match=rf"{path}:2 is damaged"):
        State.open(path, ABOUT)
    assert State.open(path, ABOUT, fresh=True).runs == {}
    assert State.open(path, ABOUT).runs == {}


def test_the_default_place_differs_with_all_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [ABOUT | {name: "else"} for name in ABOUT]
    places = {default_path(key_of(about)) for about in (ABOUT, *others)}
    assert len(places) == 1 + len(others)
    assert all(place.is_relative_to(tmp_path) for place in places)
    assert key_of(ABOUT) == key_of(json.loads(json.dumps(ABOUT)))


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path):
        with pytest.raises(InvalidRequest, match=f"state: {path} cannot be used .*: name another file with --state"):
            State.open(path, ABOUT)
    state = State.open(tmp_path / "state", ABOUT)
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()
    with pytest.raises(InvalidRequest, match=f"state: {tmp_path}/state cannot be used"):
        state.add(some_runs()[0])
    monkeypatch.setattr(module, "cache_folder", lambda kind: (_ for _ in ()).throw(OSError("no home: set HOME")))
    with pytest.raises(InvalidRequest, match="state: no home: set HOME, or name a file with --state"):
        default_path("key")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}", speculation=2, max_num_seqs=2, max_model_len=64)


@pytest.fixture
def stage(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """On a clock that moves on by itself, as far at every look."""
    ticks: Iterator[int] = count()
    clock = lambda: next(ticks) / 1024  # noqa: E731
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("forerun.bench.run.peak_rss_bytes", lambda: 1000)
    generated = [Item(tuple(llm.tokenizer.encode(text)), None, place) for place, text in PROMPTS.items()]
    replayed = [Item(item.prompt, tuple(range(5, 17)), item.place) for item in generated]
    workloads = {"stories": Workload("stories", tuple(generated)), "own": Workload("own", tuple(replayed))}
    return Stage(llm, workloads, SELECTION.num_tokens, clock=clock)


def told(stage: Stage, path: Path) -> str:
    """The final JSON."""
    with unchecked():
        groups = bench(stage, SELECTION, State.open(path, ABOUT), lambda _what, _done: None)
    places = {name: list(PROMPTS) for name in stage.workloads}
    return json.dumps(BenchReport(ABOUT, Bandwidth(1e9, 2e9), 100, places, tuple(groups)).as_object())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(4))
def test_a_benchmark_cut_off_at_any_line_ends_in_the_same_json(stage: Stage, first: int, tmp_path: Path) -> None:
    """Here at every fourth one."""
    path = tmp_path / "state.jsonl"
    whole = told(stage, path)
    assert json.loads(whole)["same_tokens"]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 2 * 2
    for num_kept in range(first, len(lines), 4):
        path.write_bytes(b"".join(lines[:num_kept]) + lines[num_kept][:40])
        assert told(stage, path) == whole
        assert path.read_bytes().splitlines(keepends=True) == lines


def test_nothing_is_run_twice_and_what_is_left_is_told(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "state.jsonl", []
    told(stage, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    real = Stage.run

    def noted(self: Stage, group: Group, turn: Turn) -> BenchRun:
        ran.append((group, turn))
        return real(self, group, turn)

    monkeypatch.setattr(Stage, "run", noted)
    shares: list[float] = []
    with unchecked():
        bench(stage, SELECTION, State.open(path, ABOUT), lambda _what, done: shares.append(done))
    assert ran == [(Group("own", 2, 0.0), Turn(1, 2)), (Group("own", 2, 0.0), Turn(1, 0))]
    assert shares == [0.0, 0.0, 0.5]

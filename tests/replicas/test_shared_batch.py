"""A file that replicas answer: its answers are one engine's, whatever is lost, and it goes on where it was stopped."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from forerun.commands import batch
from forerun.llm import LLM
from forerun.replicas.replica import RemoteLLM, Replica
from forerun.replicas.shared_batch import SharedBatch
from forerun.sampling.params import SamplingParams
from kit.checkpoints import DATA
from kit.command import command, refusal
from kit.unchecked import unchecked
from replicas.local import LocalReplicas, copied

STORIES = [f"{who} {did}" for who in ("Lily", "Tom", "The dog") for did in ("ran", "saw a", "said")]
GIVEN = ["--max-tokens", "12", "--seed", "5", "--max-num-seqs", "2", "--temperature", "1"]


@pytest.fixture(scope="module")
def replicas() -> Iterator[LocalReplicas]:
    """Two of them."""
    with ExitStack() as stack, unchecked():
        draft, options = f"model:{DATA / 'stories280k'}", {"speculation": 3, "max_num_seqs": 2}
        made = [LLM(str(DATA / "stories260k"), draft, **options) for _ in range(2)]  # type: ignore[arg-type]
        there = {f"r{i}": Replica(llm, f"r{i}") for i, llm in enumerate(made)}
        for llm, replica in zip(made, there.values(), strict=True):
            stack.enter_context(llm)
            stack.callback(replica.front.close)
        yield LocalReplicas(there)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One engine of the same model, which does not draft."""
    with unchecked(), LLM(str(DATA / "stories260k"), max_num_seqs=2) as llm:
        yield llm


@pytest.fixture
def run(replicas: LocalReplicas, alone: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, with replicas that are there already, or with one engine of the same model."""
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in (*STORIES, 5)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    replicas.losses.clear()
    replicas.took.clear()

    @contextmanager
    def ray_replicas(_: Any, settings: Any, __: float, ___: str) -> Iterator[tuple[RemoteLLM, LocalReplicas]]:
        yield RemoteLLM(copied(replicas.there["r0"].description()), settings.most), replicas

    monkeypatch.setitem(sys.modules, "forerun.replicas.on_ray", SimpleNamespace(ray_replicas=ray_replicas))
    monkeypatch.setattr("forerun.commands.serve.require_ray", lambda: None)
    monkeypatch.setattr(batch, "build_llm", lambda *_: alone)

    def invoke(output: str, *more: str) -> Result:
        words = ["-m", "m", "-i", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / output), *GIVEN, *more]
        return command("generate", *words)

    return invoke


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("losses", [[], [0, 3, 1, 0, 2], [1] * 12], ids=str)
def test_answers_are_one_engines_in_the_order_of_the_input(
    losses: list[int], run: Callable[..., Result], replicas: LocalReplicas, alone: LLM, tmp_path: Path
) -> None:
    replicas.losses = list(losses)
    result = run("shared", "--replicas", "2", "--json")
    assert result.exit_code == 2, result.output  # for the line that holds no prompt
    assert "9 of 10 lines answered" in result.stderr
    assert {*replicas.took} == {"r0", "r1"}
    assert 9 + (losses != []) <= len(replicas.took) <= 9 + len(losses)  # what is lost behind an answer costs nothing
    answered = answers(tmp_path / "shared")
    assert [answer["line"] for answer in answered] == list(range(1, 10))
    for story, answer in zip(STORIES, answered, strict=True):
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=answer["seed"])
        with unchecked():
            (wanted,) = alone.generate(story, params, use_tqdm=False)
        assert (answer["token_ids"], answer["text"]) == (list(wanted.outputs[0].token_ids), wanted.outputs[0].text)
        assert answer["seed"] == 5 + STORIES.index(story)
    stats = json.loads(result.stdout)["stats"]
    assert stats["num_tokens"] == sum(len(answer["token_ids"]) for answer in answered)
    assert 0 < stats["num_accepted"] <= stats["num_drafted"]
    assert 0 < stats["num_rounds"] <= stats["num_tokens"]


def test_an_interrupted_file_goes_on_with_any_number_of_engines_to_the_same_answers(
    run: Callable[..., Result], replicas: LocalReplicas, tmp_path: Path
) -> None:
    run("whole")
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)
    for num_before, engines in ((3, ["--replicas", "2"]), (6, ["--replicas", "1:2"])):
        (tmp_path / "cut").write_bytes(b"".join(lines[:num_before]) + lines[num_before][:20])
        replicas.took.clear()
        assert f"{num_before} of them in earlier runs" in run("cut", *engines).stderr
        assert len(replicas.took) == 9 - num_before
        assert (tmp_path / "cut").read_bytes() == whole


def test_control_c_cancels_what_replicas_answer_and_the_same_command_goes_on(
    run: Callable[..., Result], replicas: LocalReplicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("whole")
    honest, num_steps = SharedBatch.step, 0

    def step(shared: SharedBatch) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)
        return honest(shared)

    monkeypatch.setattr(SharedBatch, "step", step)
    stopped = run("cut", "--replicas", "2")
    assert stopped.exit_code == 130
    assert "The same command resumes." in stopped.stderr
    assert not any(replicas.under_way.values())
    assert len((tmp_path / "cut").read_bytes().splitlines()) < len(STORIES)
    run("cut", "--replicas", "2")
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_request_that_ends_replicas_ends_the_command_and_keeps_the_answers(
    run: Callable[..., Result], replicas: LocalReplicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.replicas.front.RETRY_S", 0.0)
    replicas.losses = [0] * 99
    failed = run("cut", "--replicas", "2")
    assert failed.exit_code == 2
    assert "replicas in a row were lost" in failed.stderr
    replicas.losses.clear()
    run("cut", "--replicas", "2")
    run("whole")
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_replicas_of_another_fingerprint_are_refused(run: Callable[..., Result], replicas: LocalReplicas) -> None:
    other = replicas.there["r1"].llm
    kept, other.fingerprint = other.fingerprint, "another"
    try:
        failed = run("cut", "--replicas", "2")
    finally:
        other.fingerprint = kept
    assert failed.exit_code == 2
    assert "a replica has the fingerprint another" in failed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "2", "a prompt"], "replicas: it needs a file of prompts: name one with --input"),
        (["--ray", "auto", "--input", "x.jsonl"], "ray: auto needs --replicas"),
        (["--replicas", "2:1", "--input", "x.jsonl"], "replicas: 2:1 is not a valid range"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    assert message in refusal("generate", "-m", "m", *words)

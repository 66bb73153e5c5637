"""`forerun prove --server` from end to end, on stand-ins of other engines: exact ones hold, and faults are found."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kit.command import command, refusal
from kit.round_clock import RoundClock
from kit.standins import DialectName, StandIn
from kit.toy_model import ToyModel

PROMPTS = ["first", "second", "third of all", "and another one", "some text", "more of it"]
MODEL = ToyModel.random(3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


@contextmanager
def pair(speculating: StandIn, **plain: Any) -> Iterator[tuple[str, ...]]:
    """Options that name a server, and one of the same model and engine without speculation, which may differ."""
    other = replace(StandIn(speculating.dialect, speculating.model, likely=speculating.likely), **plain)
    with speculating.running(), other.running():
        yield ("--server", speculating.url, "--plain", other.url)


def prove(prompts: Path, *more: str, num_texts: int = 250) -> Result:
    fixed = ["--prompts", str(prompts), "--num-prompts", "6", "-n", "24", "--num-texts", str(num_texts)]
    return command("prove", *more, *fixed, COLUMNS="160")


@pytest.mark.short("llamacpp")
@pytest.mark.parametrize("dialect", ["vllm", "llamacpp", "sglang", "other"])
def test_exact_speculation_holds_in_every_dialect(dialect: DialectName, prompts: Path) -> None:
    with pair(StandIn(dialect, MODEL, depth=3)) as servers:
        result = prove(prompts, *servers)
    assert result.exit_code == 0, result.output
    assert "12 answers to 6 prompts, alone and with other requests, temperature 0: identical" in result.stdout
    assert "against the exact law" in result.stdout
    assert "Passed:" in result.stdout
    assert ("the server does not report its draft tokens" in result.stdout) == (dialect in ("other", "sglang"))


def test_draft_tokens_accepted_too_often_are_found_at_temperature_0(prompts: Path) -> None:
    with pair(StandIn("vllm", ToyModel.random(3, nearness=4.0), depth=3, rule="careless")) as servers:
        result = prove(prompts, *servers, "--json", num_texts=100)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["faulty"] is True
    faults = [each for each in found["equality"]["differences"] if each["meaning"] == "fault"]
    assert faults
    assert all(each["gap"] > found["equality"]["tolerance"] for each in faults)


@pytest.mark.full
def test_draft_tokens_accepted_greedily_are_found_at_temperature_1(prompts: Path) -> None:
    with pair(StandIn("llamacpp", MODEL, depth=3, rule="greedy")) as servers:
        result = prove(prompts, *servers, num_texts=1500)
    assert result.exit_code == 1, result.output
    assert "temperature 0: identical" in result.stdout
    assert "✗ after" in result.stdout
    assert "3,000 texts at temperature 1" in " ".join(result.stdout.split())
    assert "FAULT" in result.stdout


@pytest.mark.full
def test_a_forerun_server_is_compared_with_itself(prompts: Path) -> None:
    with StandIn("forerun", MODEL, depth=3).running() as server:
        result = prove(prompts, "--server", server.url)
        assert {body.get("speculation") for body in server.bodies} == {None, False}
    assert result.exit_code == 0, result.output
    assert "the same server without speculation" in result.stdout


@pytest.mark.full
def test_every_request_has_a_seed_of_its_own_and_no_filter(prompts: Path) -> None:
    server, plain = StandIn("vllm", MODEL, depth=3), StandIn("vllm", MODEL)
    with server.running(), plain.running():
        prove(prompts, "--server", server.url, "--plain", plain.url, num_texts=150)
    drawn = [body for body in (*server.bodies, *plain.bodies) if body["temperature"] == 1.0]
    seeds = [body["seed"] for body in drawn if body["max_tokens"] == 6]
    texts = [seed for seed in seeds if seed >= 150]  # those below choose the opening
    assert len(set(texts)) == len(texts) == 300
    assert all((body["top_p"], body["top_k"], body["min_p"]) == (1.0, -1, 0.0) for body in drawn)


@pytest.mark.full
def test_near_ties_and_unsteady_servers_are_no_fault(prompts: Path) -> None:
    """Logits shake by a thousandth from request to request, and the likeliest two of some words are as near as that."""
    logits = MODEL.logits.copy()
    for row in logits[::2]:
        row[int(row.argsort()[-2])] = row.max() - 1e-4
    shaky = StandIn("vllm", ToyModel(logits, MODEL.drafts), depth=3, jitter=1e-3)
    with pair(shaky, jitter=1e-3) as servers:
        result = prove(prompts, *servers)
    assert result.exit_code == 0, result.output
    assert "at a near tie" in result.stdout or "where plain answers differ too" in result.stdout
    assert "Passed: answers differ only at near ties" in result.stdout


@pytest.mark.full
def test_differences_without_log_probabilities_stay_undecided(prompts: Path) -> None:
    """The model behind the server is a little another one: that is seen, and how near the ties were is not."""
    other = ToyModel(MODEL.logits + 0.05 * ToyModel.random(9).logits, MODEL.drafts)
    server, plain = StandIn("other", other, likely=0), StandIn("other", MODEL, likely=0)
    with server.running(), plain.running():
        result = prove(prompts, "--server", server.url, "--plain", plain.url, num_texts=300)
    assert "no log-probabilities" in result.stdout
    assert "against the plain server's counts" in result.stdout
    if "identical" not in result.stdout:
        assert result.exit_code == 1
        assert "UNDECIDED" in result.stdout


@pytest.mark.full
def test_a_plain_server_that_filters_silently_is_noticed(prompts: Path) -> None:
    with pair(StandIn("vllm", MODEL, depth=3, filtered=True), filtered=True) as servers:
        result = prove(prompts, *servers, num_texts=600)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "the plain server does not sample from the log-probabilities that it reports" in shown
    assert "against the plain server's counts" in shown


@pytest.mark.full
def test_chats_are_asked_as_chats(prompts: Path) -> None:
    with pair(StandIn("vllm", MODEL, depth=3)) as servers:
        result = prove(prompts, *servers, "--chat")
    assert result.exit_code == 0, result.output
    assert "against the exact law" in result.stdout


@pytest.mark.full
def test_fewer_log_probabilities_do_where_there_are_no_more(prompts: Path) -> None:
    with pair(StandIn("other", MODEL, depth=3, likely=5)) as servers:
        result = prove(prompts, *servers, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["most_likely"] == 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> RoundClock:
    """The time of the servers' rounds is the only one that passes."""
    clock = RoundClock(monkeypatch)
    clock.of_timeouts(monkeypatch)
    return clock


def test_a_slow_server_is_judged_in_time_by_what_it_answered(prompts: Path, clock: RoundClock) -> None:
    """Rounds of 7 ms: all that is asked for would take minutes."""
    with pair(StandIn("vllm", MODEL, depth=3, round_s=0.007, clock=clock), round_s=0.007, clock=clock) as servers:
        result = prove(prompts, *servers, "--time-limit", "3.6", "--json", num_texts=20000)
    assert clock.now_s < 20
    found = json.loads(result.stdout)
    equality, (law,) = found["equality"], found["laws"]
    assert 0 < equality["num_prompts"] < equality["num_asked"] == 6
    assert equality["num_answers"] == 2 * equality["num_prompts"]
    assert law["num_texts"] < law["num_asked"] == 20000
    assert found["faulty"] is False
    assert any("3.6 seconds did not suffice" in sentence for sentence in found["undecided"])


def test_a_server_that_answers_nothing_in_time_is_undecided(prompts: Path, clock: RoundClock) -> None:
    with pair(StandIn("vllm", MODEL, depth=3, round_s=0.2, clock=clock), round_s=0.2, clock=clock) as servers:
        result = prove(prompts, *servers, "--time-limit", "2")
    assert result.exit_code == 1, result.output
    output = " ".join(result.stdout.split())
    assert "no prompt was answered in time by both servers" in output
    assert "UNDECIDED: 2 seconds did not suffice for the answers at temperature 0" in output
    assert "the same answers" not in output
    with pair(StandIn("vllm", MODEL, depth=3, round_s=2.0, clock=clock), round_s=2.0, clock=clock) as servers:
        assert "did not answer in time: allow more seconds" in refusal(
            "prove", "--prompts", str(prompts), *servers, "--time-limit", "1"
        )


def test_mistakes_are_named_with_their_cure(prompts: Path) -> None:
    with (
        StandIn("vllm", MODEL, key="secret").running() as locked,
        StandIn("vllm", MODEL, name="other").running() as other,
    ):
        dead = "http://127.0.0.1:9"
        assert "server: http://127.0.0.1:9 does not answer" in refusal(
            "prove", "--prompts", str(prompts), "--server", dead
        )
        assert "give its key with --api-key" in refusal("prove", "--prompts", str(prompts), "--server", locked.url)
        assert "--plain URL" in refusal("prove", "--prompts", str(prompts), "--server", other.url)
        assert "plain: http://127.0.0.1:9 does not answer" in refusal(
            "prove", "--prompts", str(prompts), "--server", other.url, "--plain", dead
        )
        both = ("--server", locked.url, "--plain", other.url, "--api-key", "secret")
        assert "serves 'other', not 'toy'" in refusal("prove", "--prompts", str(prompts), *both)
        assert "does not serve 'more'" in refusal(
            "prove", "--prompts", str(prompts), *both, "--served-model-name", "more"
        )
        assert "draft: it cannot be used with --server" in refusal(
            "prove", "--prompts", str(prompts), "--server", other.url, "--draft", "ngram"
        )
        assert "plain: 'x' needs --server" in refusal("prove", "--prompts", str(prompts), "--plain", "x")
        assert "plain_model: 'x' needs --server" in refusal("prove", "--prompts", str(prompts), "--plain-model", "x")
        assert "chat: True needs --server" in refusal("prove", "--prompts", str(prompts), "--chat")
        assert "model: it is missing" in refusal("prove", "--prompts", str(prompts))
        assert "time_limit: 5 needs --server" in refusal("prove", "--prompts", str(prompts), "--time-limit", "5")
        named = prove(prompts, *both, "--plain-model", "other", num_texts=100)
        assert named.exit_code == 0, named.output

"""`forerun tune --server` from end to end, on stand-ins of other engines whose costs and acceptance are known."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result
from typing_extensions import override

from forerun import cli, machine
from forerun.machine import Neighbours
from forerun.remote import measure
from forerun.remote.counters import SpeculationCounts
from forerun.traffic.figures import TrafficBlock
from forerun.traffic.plan import SpeculationMode, TrafficPlan, TrafficTurn
from kit.command import command, refusal
from kit.round_clock import RoundClock
from kit.standins import DialectName, StandIn
from kit.toy_model import ToyModel

ROUND_S, DEPTH = 0.004, 3
MODEL = ToyModel.random(3, nearness=0.5)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program is busy, and servers are idle at once."""
    monkeypatch.setattr(measure, "REST_S", machine.LEAST_S)
    looks = iter(range(10**6))
    quiet = lambda: Neighbours(clock=lambda: float(next(looks)), others_s=lambda: 0.0)  # noqa: E731
    monkeypatch.setattr(measure, "Neighbours", quiet)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> RoundClock:
    """The time of the servers' rounds is the only one that passes."""
    return RoundClock(monkeypatch)


def tune(*more: str) -> Result:
    return command("tune", *more, "--num-prompts", "4", "--repeats", "2", "-n", "32", COLUMNS="160")


def measured(dialect: DialectName, clock: RoundClock, *more: str, **options: Any) -> tuple[dict[str, Any], StandIn]:
    """What is found of a stand-in that speculates, against one that does not."""
    timed: dict[str, Any] = {"round_s": ROUND_S, "clock": clock}
    server = StandIn(dialect, MODEL, depth=DEPTH, **{**timed, "cost": 1.2, **options})
    plain = StandIn(dialect, MODEL, **timed)
    with server.running(), plain.running():
        result = tune("--server", server.url, "--against", plain.url, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), server


@pytest.mark.short("llamacpp")
@pytest.mark.parametrize("dialect", ["vllm", "llamacpp", "sglang"])
def test_every_dialects_counters_are_read_and_the_speed_up_is_measured(dialect: DialectName, clock: RoundClock) -> None:
    found, server = measured(dialect, clock, "--clients", "1")
    (cell,) = found["cells"]
    seen = cell["speculating"]["acceptance"]
    tokens = (server.num_accepted + server.num_rounds) / server.num_rounds
    assert seen["tokens_per_round"] == pytest.approx(tokens, rel=0.2)  # warming up is counted in the latter alone
    assert seen["depth"] == pytest.approx(DEPTH, rel=0.2)
    assert cell["speed_up"]["median"] == pytest.approx(tokens / 1.2, rel=0.4)
    assert len(cell["by_depth"]) > DEPTH
    assert cell["num_compared"] == 8
    assert cell["num_differing"] == 0
    assert cell["advice"]["clear"] in (True, False)


@pytest.mark.full
def test_loads_at_which_it_is_slower_are_named_with_the_setting() -> None:
    server, plain = StandIn("vllm", MODEL, depth=DEPTH, round_s=ROUND_S, crowd=3.0), StandIn(round_s=ROUND_S)
    plain.model = MODEL
    with server.running(), plain.running():
        result = tune("--server", server.url, "--against", plain.url, "--clients", "1,4")
    assert result.exit_code == 0, result.output
    assert "Speculation is faster at 1 client: " in result.stdout
    assert "Speculation is slower at 4 clients: " in result.stdout
    assert "From 4 clients on, speculation is slower." in result.stdout
    assert "vllm serve without --speculative-config" in result.stdout
    assert "answers    " in result.stdout


def test_with_one_server_the_report_names_what_is_unknown(clock: RoundClock) -> None:
    with StandIn("llamacpp", MODEL, depth=DEPTH, round_s=ROUND_S, clock=clock).running() as server:
        result = tune("--server", server.url, "--clients", "1")
    assert result.exit_code == 0, result.output
    assert "times as fast as plain decoding" in result.stdout
    assert (
        "A depth saves time if its share of a round's time is below its share of the tokens: depth 1 " in result.stdout
    )
    assert "the speed-up: name a server of the same model without speculation with --against URL" in result.stdout


def test_a_server_of_foreruns_is_measured_against_itself_at_depths_that_requests_ask_for(clock: RoundClock) -> None:
    with StandIn("forerun", MODEL, depth=DEPTH, round_s=ROUND_S, cost=1.2, clock=clock).running() as server:
        result = tune("--server", server.url, "--clients", "1", "--depths", "1,2", "--json")
        assert {body.get("speculation") for body in server.bodies} == {None, False, 1, 2}
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (cell,) = found["cells"]
    assert found["against"] == found["url"]
    assert cell["num_compared"] == 24
    assert [each["depth"] for each in cell["by_depth"] if each["measured"]] == [0, 1, 2]
    assert cell["speed_up"]["median"] > 1


def test_with_a_time_limit_no_repetition_begins_that_may_not_end_in_time(clock: RoundClock) -> None:
    """Rounds of 20 ms: a repetition takes about 2 seconds, a hundred of them minutes."""
    with StandIn("forerun", MODEL, depth=DEPTH, round_s=0.02, clock=clock).running() as server:
        more = ("--clients", "4,2", "--depths", "2", "--time-limit", "1", "--repeats", "100", "--json")
        fixed = ["--num-prompts", "4", "-n", "16"]
        result = CliRunner().invoke(
            cli.app, ["tune", "--server", server.url, *more, *fixed], env={"OPENAI_API_KEY": ""}
        )
    assert result.exit_code == 0, result.output
    assert [cell["num_repetitions"] for cell in json.loads(result.stdout)["cells"]] == [1, 1]


@pytest.mark.full
class Order(measure.ServerMeasurement):
    """Notes the contenders of blocks, and runs none; a block of repetition 1 takes 10 s of the clock."""

    @override
    async def warm_up(self, contender: Any, traffic: TrafficPlan) -> None:
        pass

    @override
    async def block(self, contender: Any, traffic: TrafficPlan, repetition: int) -> Any:
        self.extra["clock"].now_s += 10.0
        return repetition, contender.name, traffic.loads[0].value, traffic.num_requests


def test_contenders_take_turns_to_be_first_and_loads_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 s, the first load gets half, five repetitions of 20 s, and the second one the other half."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    plan = measure.ServerPlan((1, 16), num_requests=4, repeats=9, time_limit_s=200.0)
    contenders: Any = [SimpleNamespace(name=name) for name in ("speculating", "plain")]
    coroutine: Any = Order(contenders, plan, (), {"clock": clock}).run(lambda *_: None)
    blocks: list[Any] = []
    try:
        coroutine.send(None)
    except StopIteration as end:
        blocks = end.value
    assert [(repetition, name) for repetition, name, *_ in blocks[:4]] == [
        (0, "speculating"), (0, "plain"), (1, "plain"), (1, "speculating")
    ]  # fmt: skip
    assert Counter((load, number) for *_, load, number in blocks) == {(1, 4): 10, (16, 32): 10}


def test_the_counts_of_a_block_are_those_since_it_began() -> None:
    async def block(turn: TrafficTurn) -> TrafficBlock:
        return TrafficBlock(turn, (), 1.0)

    async def counts() -> SpeculationCounts:
        return next(readings)

    class Silent(measure.ServerMeasurement):
        @override
        def sender(self, *_: object) -> Any:
            return SimpleNamespace(block=block)

    readings = iter(SpeculationCounts(num_drafts=n, num_accepted=2 * n) for n in (5.0, 12.0))
    server: Any = SimpleNamespace(is_local=False, counts=counts)
    contender = measure.ServedContender("speculating", server, SpeculationMode())
    plan = measure.ServerPlan()
    found = asyncio.run(Silent([contender], plan, ()).block(contender, plan.traffic(1), 0))
    assert found.counts == SpeculationCounts(num_drafts=7.0, num_accepted=14.0)


def test_without_counters_the_speed_up_is_all_that_is_known(clock: RoundClock) -> None:
    found, _ = measured("vllm", clock, "--clients", "1", counted=False)
    (cell,) = found["cells"]
    assert cell["speed_up"]["median"] > 1
    assert cell["speculating"]["acceptance"] is None
    assert cell["by_depth"] == []
    assert any("does not report its draft tokens" in sentence for sentence in found["unknown"])
    timed, server = measured("llamacpp", clock, "--clients", "1", counted=False)
    seen = timed["cells"][0]["speculating"]["acceptance"]
    assert seen["acceptance_rate"] == pytest.approx(server.num_accepted / server.num_drafted, rel=0.2)
    assert any("start llama-server with --metrics" in sentence for sentence in timed["unknown"])


@pytest.mark.full
def test_a_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(10**6))
    busy = lambda: Neighbours(clock=lambda: float(next(looks)), others_s=lambda: 0.7 * next(looks))  # noqa: E731
    monkeypatch.setattr(measure, "Neighbours", busy)
    monkeypatch.setattr(machine, "DISTURBING", 0.2)
    with StandIn("vllm", MODEL, depth=DEPTH).running() as server, StandIn("vllm", MODEL).running() as plain:
        line = ["--server", server.url, "--against", plain.url, "--clients", "1"]
        shown, found = tune(*line).stdout, json.loads(tune(*line, "--json").stdout)
    assert "disturbed" in shown
    assert "Undecided: this was disturbed: other programs" in shown
    assert "times as fast" not in shown
    assert "so this measurement is unreliable" in found["undecided"]
    assert [each["advice"] for each in found["cells"]] == [None]


def test_mistakes_are_named_with_their_cure(tmp_path: Path) -> None:
    locked, other = StandIn("vllm", MODEL, key="secret"), StandIn("vllm", MODEL, name="other")
    with locked.running(), other.running():
        dead, both = "http://127.0.0.1:9", ("--server", locked.url, "--against", other.url, "--api-key", "secret")
        assert "server: http://127.0.0.1:9 does not answer" in refusal("tune", "--server", dead)
        assert "give its key with --api-key" in refusal("tune", "--server", locked.url)
        assert "against: http://127.0.0.1:9 does not answer" in refusal(
            "tune", "--server", other.url, "--against", dead
        )
        assert "serves 'other', not 'toy': serve the same model there" in refusal("tune", *both)
        assert "does not serve 'x'" in refusal("tune", *both, "--against-model", "x")
        assert "drafts: it cannot be used with --server" in refusal("tune", "--server", other.url, "--drafts", "ngram")
        assert "out: it cannot be used with --server" in refusal("tune", "--server", other.url, "--out", str(tmp_path))
        assert "batch: it cannot be used with --server" in refusal("tune", "--server", other.url, "--batch", "2")
        assert "threads: it cannot be used with --server" in refusal("tune", "--server", other.url, "--threads", "1")
        assert "temperature: 0,1 must be one number" in refusal("tune", "--server", other.url, "--temperature", "0,1")
        assert "depths: 0 must be" in refusal("tune", "--server", other.url, "--depths", "0")
        assert "clients: '1,x' must be numbers" in refusal("tune", "--server", other.url, "--clients", "1,x")
        assert "concurrency: 0 must be" in refusal("tune", "--server", other.url, "--clients", "0")
        for option, value in (("against", "x"), ("against-model", "x"), ("clients", "2"), ("depths", "3")):
            assert f"{option.replace('-', '_')}: '{value}' needs --server" in refusal("tune", f"--{option}", value)

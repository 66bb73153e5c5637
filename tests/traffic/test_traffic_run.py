"""Load tests against a server with known delays: what is sent, when, and what counts as an answer."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from forerun.errors import InvalidRequest
from forerun.traffic import client, run
from forerun.traffic.client import ChunkTimes, ServerAddress
from forerun.traffic.figures import ServiceLevel, TrafficBlock, TrafficReport
from forerun.traffic.plan import ServerLoad, SpeculationMode, TrafficPlan
from forerun.traffic.run import measure_traffic
from traffic.fake import WORDS, FakeServer, event

FAST = ServerLoad("rate", 1000.0)


def silent(what: str, done: float) -> None:
    """Reports nothing."""


def load_test(server: FakeServer, load: ServerLoad = FAST, modes: tuple[str, ...] = (), **own: Any) -> TrafficReport:
    """The report of a load test of this server."""
    requests = {"num_requests": 6, "repeats": 1, "max_tokens": 8} | own.pop("requests", {})
    address = {"chat": own.pop("chat", False), "api_key": own.pop("api_key", "")}
    plan, level = (
        TrafficPlan((load,), tuple(map(SpeculationMode, modes)), **requests),
        own.pop("agreement", ServiceLevel()),
    )

    async def run() -> TrafficReport:
        async with server.running():
            return await measure_traffic(ServerAddress(server.url, **address), plan, level, silent, extra=own)

    return asyncio.run(run())


def the_block(report: TrafficReport) -> TrafficBlock:
    (block,) = report.blocks
    return block


class SharedClock:
    """A clock of client and server that delays put forward, each when the client has all that was written before."""

    def __init__(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.ahead_s, self.num_arrived = server, 0.0, 0
        arrived = ChunkTimes.record_time

        def counted(own: ChunkTimes, now_s: float) -> None:
            arrived(own, now_s)
            self.num_arrived += 1

        monkeypatch.setattr(ChunkTimes, "record_time", counted)
        for module in (client, run):
            monkeypatch.setattr(module, "time", self)
        server.wait, server.clock = self.put_forward, self.perf_counter

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead_s

    async def put_forward(self, seconds: float) -> None:
        while self.num_arrived < self.server.num_written:
            await asyncio.sleep(0)
        self.ahead_s += seconds


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_the_server(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = (0.03, 0.0, 0.05, 0.01)
    server = FakeServer(delays=lambda body: delays)
    SharedClock(server, monkeypatch)
    report = load_test(server, chat=chat)
    for answer in the_block(report).answers:
        written = server.written_s[answer.index]
        assert not answer.error
        assert answer.num_tokens == 2 * len(WORDS)
        assert answer.due_s <= answer.sent_s <= written[0] <= answer.first_s
        assert answer.first_s >= answer.sent_s + 0.03
        assert answer.last_s >= written[-1]
        assert answer.longest_gap_s >= 0.0499
        assert answer.between_tokens_s == (answer.last_s - answer.first_s) / 7
    assert [("messages" in body, "prompt" in body) for body in server.bodies] == [(chat, not chat)] * len(server.bodies)


def test_at_a_rate_requests_do_not_wait_for_answers_and_at_once_they_do() -> None:
    """No answer is begun before as many requests are there as there can be."""

    def all_of(number: int) -> Callable[[Mapping[str, Any]], int]:
        return lambda body: number if body["seed"] < 6 else 1  # what warms a server up has later seeds

    server = FakeServer(company=all_of(6))
    load_test(server)
    assert server.most_at_once == 6
    server = FakeServer(company=all_of(2))
    report = load_test(server, ServerLoad("concurrency", 2.0))
    assert server.most_at_once == 2
    assert [answer.index for answer in the_block(report).answers] == list(range(6))
    assert all(answer.due_s <= answer.sent_s for answer in the_block(report).answers)


def test_the_wait_before_sending_counts_in_the_times() -> None:
    """The server stops everything for a while: requests that were due meanwhile are sent late."""

    def stall(body: Mapping[str, Any]) -> tuple[float, ...]:
        if body["seed"] == 0:
            time.sleep(0.08)
        return (0.0,) * len(WORDS)

    answers = the_block(load_test(FakeServer(delays=stall), ServerLoad("rate", 100.0))).answers
    late = max(answers, key=lambda answer: answer.sent_s - answer.due_s)
    assert late.sent_s - late.due_s > 0.02
    assert late.first_token_s > late.sent_s - late.due_s
    assert late.total_s == late.last_s - late.due_s


def test_every_mode_gets_the_same_requests_and_the_field_that_asks_for_it() -> None:
    server = FakeServer(owner="forerun")
    report = load_test(server, modes=("off", "auto", "3"), requests={"num_requests": 4, "repeats": 3})
    assert [block.turn.mode.name for block in report.blocks] == [
        *("off", "auto", "3"),
        *("auto", "3", "off"),
        *("3", "off", "auto"),
    ]
    asked: dict[object, list[tuple[object, int]]] = {}
    for body in server.bodies:
        asked.setdefault(body["speculation"], []).append((body["prompt"], body["seed"]))
    assert set(asked) == {False, "auto", 3}
    for got in asked.values():
        assert {pair for pair in got if pair[1] < 12} == {pair for pair in asked[False] if pair[1] < 12}
        assert {seed for _, seed in got} >= set(range(12))
    assert report.same_answers is True


def test_an_answer_that_a_mode_changes_is_found() -> None:
    def other(body: Mapping[str, Any]) -> tuple[str, ...]:
        return ("one", "!", "", "") if body["speculation"] == "auto" and body["seed"] == 2 else WORDS

    report = load_test(FakeServer(owner="forerun", words=other), modes=("off", "auto"))
    assert report.same_answers is False
    assert [(each.mode, each.request) for each in report.differing] == [("auto", 2)]


def test_another_server_is_asked_as_it_is() -> None:
    server = FakeServer()
    report = load_test(server, top_p=0.5)
    assert {body.get("speculation") for body in server.bodies} == {None}
    assert {body["top_p"] for body in server.bodies} == {0.5}
    assert report.same_answers is None
    with pytest.raises(InvalidRequest, match="not a forerun server"):
        load_test(FakeServer(), modes=("auto",))
    with pytest.raises(InvalidRequest, match="set by the load test"):
        load_test(FakeServer(), seed=3)


def test_without_a_usage_chunks_are_counted_and_the_report_says_so() -> None:
    report = load_test(FakeServer(usage=False))
    assert {answer.num_tokens for answer in the_block(report).answers} == {len(WORDS)}
    assert not report.figures[0].counted


def test_text_with_ends_of_lines_of_other_kinds_is_one_chunk() -> None:
    def odd(body: Mapping[str, Any]) -> tuple[str, ...]:
        return ("a\u2028b", "\x85", "c", "d")

    assert {answer.num_tokens for answer in the_block(load_test(FakeServer(words=odd))).answers} == {8}


def test_failures_count_and_have_no_times() -> None:
    server = FakeServer()

    def failing(body: Mapping[str, Any]) -> tuple[float, ...]:
        server.ending = b"" if body["seed"] == 3 else b'data: {"error": {"message": "broke"}}\n\n'
        server.ending = b"data: [DONE]\n\n" if body["seed"] not in (3, 4) else server.ending
        return (0.0,) * len(WORDS)

    server.delays = failing
    report = load_test(server, ServerLoad("concurrency", 1.0), agreement=ServiceLevel(between_s=100.0))
    (figures,) = report.figures
    assert figures.errors == {"the stream ended before the answer was complete": 1, "'broke'": 1}
    assert json.loads(json.dumps(report.as_object()))["cells"][0]["errors"] == figures.errors
    assert figures.times.num_answers == 4
    assert figures.kept == 4 / 6
    assert figures.holds is False


@pytest.mark.parametrize(
    "chunk", [1, None, [], {"choices": 1}, {"choices": [None]}, {"choices": [{"delta": {"content": [{"text": "a"}]}}]}]
)
def test_a_chunk_in_another_form_is_an_error_of_its_answer(chunk: object) -> None:
    with pytest.raises(InvalidRequest, match="failed the first request: a chunk does not have OpenAI's form: "):
        load_test(FakeServer(ending=event(chunk) + b"data: [DONE]\n\n"))


NO_COUNTS = (None, "x", [1], {"a": 1}, math.nan, math.inf, -1, 10**400)


@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: str(value)[:9])
def test_numbers_of_a_server_that_are_no_counts_are_left_out(value: object) -> None:
    def times_of(chunk: dict[str, Any]) -> ChunkTimes:
        times = ChunkTimes()
        times.add(json.dumps(chunk).encode())
        return times

    counts = {"num_drafted": 4, "num_accepted": 3, "num_rounds": 3}
    timings = {"draft_n": 4, "draft_n_accepted": 3, "predicted_n": 6}
    assert (
        times_of({"usage": {"speculation": counts}}).speculation == counts == times_of({"timings": timings}).speculation
    )
    for name in counts:
        assert times_of({"usage": {"speculation": counts | {name: value}}}).speculation is None
    for name in timings:
        assert times_of({"timings": timings | {name: value}}).speculation is None
    assert times_of({"usage": {"completion_tokens": value}}).num_tokens == 0


def test_a_report_is_made_in_spite_of_numbers_that_are_no_counts() -> None:
    usage = {
        "completion_tokens": "8",
        "speculation": {"num_drafted": "4", "num_accepted": None, "num_rounds": math.nan},
    }
    server = FakeServer(usage=False, ending=event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    report = load_test(server)
    assert (report.figures[0].acceptance_rate, report.figures[0].tokens_per_round) == (None, None)
    assert {answer.num_tokens for answer in the_block(report).answers} == {len(WORDS)}


def test_json_that_is_nested_too_deeply_is_an_error_of_its_answer() -> None:
    times = ChunkTimes()
    times.add(b"[" * 100_000)
    assert times.problem.startswith("a chunk does not have OpenAI's form")
    assert client.refusal_of(500, b"[" * 100_000) == "status 500"


@pytest.mark.parametrize("models", [1, ["fake"], {"fake": {}}])
def test_a_list_of_models_in_another_form_is_reported(models: object) -> None:
    with pytest.raises(InvalidRequest, match="/v1/models lists no models: is it OpenAI-compatible"):
        load_test(FakeServer(models=models))


def test_a_server_that_would_refuse_everything_is_reported_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"first request: status 429: 'not now'"):
        load_test(FakeServer(status=429))
    with pytest.raises(InvalidRequest, match=r"status 401: give its key with --api-key"):
        load_test(FakeServer(key="secret"))
    (figures,) = load_test(FakeServer(key="secret"), api_key="secret").figures
    assert figures.times.num_answers == 6


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no address", "ftp://x"])
def test_an_address_without_a_server_is_reported(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^url: "):
        asyncio.run(measure_traffic(ServerAddress(url), TrafficPlan((FAST,)), ServiceLevel(), silent))

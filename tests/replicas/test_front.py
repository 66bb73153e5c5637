"""The front of replicas: answers are one engine's whatever is lost on the way, and errors say what to do."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from forerun.accept.delta import Delta
from forerun.errors import OutOfMemory
from forerun.llm import LLM
from forerun.replicas.replica import ReplicaNews
from kit.servers import OK, Paced, events_of, expected, library_answer, until
from replicas.conversations import known_share
from replicas.local import LocalReplicas, replicated

LONG_ALONE = OK | {"max_tokens": 60, "ignore_eos": True}
LONG = LONG_ALONE | {"return_token_ids": True}
Served = tuple[Any, LocalReplicas]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with replicated() as served:
        yield served


@pytest.fixture(autouse=True)
def forgetful(server: Served) -> Iterator[None]:
    yield
    server[1].losses.clear()
    server[1].took.clear()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.short("whole-[1]", "stream-[]", "stream-[0, 2, 5]")
@pytest.mark.parametrize("losses", [[], [0], [1], [3], [0, 2, 5], [4, 1, 4, 1]], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_is_one_engines_whatever_is_lost(server: Served, losses: list[int], stream: bool) -> None:
    running, replicas = server
    replicas.losses = list(losses)
    answer = running.post("/v1/completions", **LONG, logprobs=2, stream=stream)
    wanted = library_answer(
        {name: value for name, value in LONG.items() if name != "return_token_ids"} | {"logprobs": 2}
    )
    choices = (
        [choice for event in events_of(answer.text) for choice in event["choices"]]
        if stream
        else [answer.json()["choices"][0]]
    )
    assert [token for choice in choices for token in choice["token_ids"]] == list(wanted.outputs[0].token_ids)
    assert "".join(choice["text"] for choice in choices) == wanted.outputs[0].text
    logprobs = [each for choice in choices for each in choice["logprobs"]["token_logprobs"]]
    assert logprobs == pytest.approx([each.logprob for each in wanted.outputs[0].logprobs])
    assert len(replicas.took) == 1 + len(losses)
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")


def test_samples_and_prompts_of_one_body_are_all_answered(server: Served) -> None:
    running, replicas = server
    replicas.losses = [2, 1]
    body = {"prompt": ["Once upon a time", "The dog"], "n": 2, "max_tokens": 12, "seed": 3, "temperature": 1.0}
    answer = running.post("/v1/completions", **body).json()
    for number, prompt in enumerate(body["prompt"]):  # type: ignore[arg-type]
        wanted = library_answer(body | {"prompt": prompt})
        got = [choice["text"] for choice in answer["choices"][2 * number : 2 * number + 2]]
        assert got == [sample.text for sample in wanted.outputs]
    assert len(replicas.took) == 4


def test_a_request_that_ends_its_replicas_is_not_tried_for_ever(server: Served) -> None:
    running, replicas = server
    replicas.losses = [0] * 5
    answer = running.post("/v1/completions", **OK)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert "5 replicas in a row were lost" in answer.json()["error"]["message"]
    assert len(replicas.took) == 5
    assert running.post("/v1/completions", **OK).json()["choices"][0]["text"] == expected()


def test_a_begun_stream_that_cannot_go_on_ends_with_the_error(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, replicas = server
    replicas.losses = [2]
    honest = replicas.answer

    async def other(call: Any) -> Any:
        first = not replicas.took
        async for news in honest(call):
            yield news if first else changed(news)

    def changed(news: ReplicaNews) -> ReplicaNews:
        return replace(news, deltas=[with_other_tokens(delta) for delta in news.deltas])

    def with_other_tokens(delta: Delta) -> Delta:
        return delta._replace(token_ids=tuple(token + 1 for token in delta.token_ids))

    monkeypatch.setattr(replicas, "answer", other)
    answer = running.post("/v1/completions", **LONG, stream=True)
    events = events_of(answer.text)
    assert "error" not in events[0]
    assert events[-1]["error"]["code"] == "replica_lost"
    assert "repeat the request" in events[-1]["error"]["message"]


def test_a_replicas_refusal_reaches_the_client(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, replicas = server

    def fail(*_: object) -> Any:
        raise OutOfMemory(0, MemoryError())

    for replica in replicas.there.values():
        monkeypatch.setattr(replica.front, "follow", fail)
    answer = running.post("/v1/completions", **OK)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "out_of_memory"


def test_a_session_stays_with_its_replica_and_conversations_with_theirs(server: Served) -> None:
    running, replicas = server
    with running.http() as http:
        for session in ("one", "two", "one", "two", "one"):
            http.post("/v1/completions", json=OK, headers={"x-session-id": session})
    assert replicas.took[0] != replicas.took[1]
    assert replicas.took == [replicas.took[0], replicas.took[1]] * 2 + [replicas.took[0]]


def test_metrics_of_all_replicas_are_on_one_page(server: Served) -> None:
    running, replicas = server
    replicas.losses = [1]
    running.post("/v1/completions", **LONG)
    with running.http() as http:
        lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for replica, engine in replicas.there.items():
        counted = float(values[f'forerun:generation_tokens_total{{replica="{replica}"}}'])
        assert counted == engine.llm.stats.num_emitted > 0
        assert f'forerun:num_requests_running{{replica="{replica}"}}' in values
    assert float(values["forerun:num_replicas"]) == 2
    assert float(values["forerun:requests_taken_over_total"]) >= 1
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        {line.split()[2] for line in lines if line.startswith("# TYPE")}
    )


def test_a_client_that_leaves_is_cancelled_in_the_replica(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, replicas = server
    llms, paced = [each.llm for each in replicas.there.values()], Paced(monkeypatch)
    paced.hold(5)
    with (
        running.http() as http,
        http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 400, "stream": True}),
    ):
        until(lambda: any(llm.engine.has_work for llm in llms))
    paced.let_go_when(lambda: any(llm.driver.jobs for llm in llms) or not any(llm.engine.has_work for llm in llms))
    until(lambda: not any(llm.engine.has_work for llm in llms))


def test_it_is_not_ready_while_no_replica_runs(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running, replicas = server

    async def none() -> int:
        return 0

    with running.http() as http:
        assert http.get("/ready").status_code == 200
        monkeypatch.setattr(replicas, "num_running", none)
        assert http.get("/ready").status_code == 503
        assert http.get("/ready").json()["error"]["code"] == "no_replica"
        assert http.get("/health").status_code == 200


def test_many_clients_are_answered_as_by_one_engine(server: Served) -> None:
    running, replicas = server
    replicas.losses = [0, 1, 2] * 4
    bodies = [{"prompt": "Lily", "max_tokens": 16, "seed": seed, "temperature": 1.0} for seed in range(12)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(lambda body: text_of([running.post("/v1/completions", **body).json()]), bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert answer == library_answer(body).outputs[0].text, json.dumps(body)
    assert set(replicas.took) == {"r0", "r1"}


@pytest.mark.full
def test_eight_conversations_go_to_the_replica_that_has_their_cache() -> None:
    """Each replica has places for all, so that none is ever so much busier that a conversation leaves it."""
    shares = []
    for number in (1, 2):
        with replicated(lambda: LLM("stdlib", max_num_seqs=8), number) as (running, replicas), running.http() as http:
            shares.append(known_share(lambda body: http.post("/v1/completions", json=body).json()))
            assert len(set(replicas.took)) == number
    assert shares[0] > 0.5
    assert shares[1] >= 0.9 * shares[0]


def test_an_answer_without_a_seed_goes_on_with_the_one_that_it_began_with(server: Served) -> None:
    running, replicas = server
    replicas.losses = [2, 3]
    answer = running.post("/v1/completions", **LONG | {"temperature": 1.0})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == LONG["max_tokens"]
    assert len(replicas.took) == 3

"""Hostile bodies: none is answered with 5xx, and none takes the time or memory of other requests."""

import inspect
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ChatTemplateError
from forerun.serve import service
from forerun.serve.envelope import encode_json, encode_json_pieces
from forerun.serve.parse import prepare
from forerun.serve.problems import ApiError
from forerun.serve.settings import ServeSettings
from forerun.text.chat import ChatTemplate
from forerun.text.renderer import Renderer
from forerun.text.tokenizer import Tokenizer
from kit.engines import PATIENCE_S, plain
from kit.servers import ENDLESS, TEMPLATE, Paced, drafting, running, until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": TEMPLATE}
SETTINGS = ServeSettings(trust_request_templates=True)
PARAMETERS = {
    name
    for method in (ChatTemplate.render, Tokenizer.apply_chat_template)
    for name, parameter in inspect.signature(method).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD
}


@pytest.mark.parametrize("name", sorted(PARAMETERS | {"", "a b", "__class__", "context", "loop", "None", "\ud800"}))
def test_options_of_a_template_may_have_any_name(name: str) -> None:
    """One that a parameter of ours has is refused."""
    body: dict[str, Any] = {**CHAT, "chat_template_kwargs": {name: "x"}}
    if name not in PARAMETERS:
        prepare(body, "chat", plain(), "", SETTINGS)
        return
    with pytest.raises(ApiError, match="chat_template_kwargs") as error:
        prepare(body, "chat", plain(), "", SETTINGS)
    assert error.value.status == 400


MANY = {"logprobs": 128, "max_tokens": 100, "ignore_eos": True}


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("completions", {"prompt": [[1] * 200] * 128, "prompt_logprobs": 128, "max_tokens": 1}, "prompt_logprobs"),
        ("completions", {"prompt": [[1] * 200] * 128, "echo": True, "logprobs": 128}, "logprobs"),
        ("completions", {"prompt": [[1]] * 128, **MANY}, "logprobs"),
        ("completions", {"prompt": [1], "n": 128, **MANY, "stream": True}, "logprobs"),
        ("chat", {**CHAT, "n": 128, "logprobs": True, "top_logprobs": 128}, "top_logprobs"),
    ],
)
def test_log_probabilities_of_a_body_are_bounded_all_together(endpoint: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError, match=f"{field}: the body requests [0-9]+ log-probabilities") as error:
        prepare(body, endpoint, plain(), "", SETTINGS)
    assert error.value.status == 400


def test_log_probabilities_of_tokens_and_their_alternatives_are_counted() -> None:
    options = {"prompt_logprobs": 2, "logprobs": 4, "n": 2, "max_tokens": 6}
    asked, _ = prepare({"prompt": [[1] * 3, [1] * 5], **options}, "completions", plain(), "", SETTINGS)
    assert asked.num_logprobs == (3 + 5) * (2 + 1) + 2 * 2 * 6 * (4 + 1)


def test_a_full_context_may_have_the_alternatives_of_openai() -> None:
    body: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 20}
    asked, _ = prepare(body, "chat", plain(), "", SETTINGS)
    assert 0 < asked.num_logprobs <= 21 * plain().plan.max_model_len


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner),
    max_leaves=60,
)


@given(JSON)
def test_an_answer_encoded_in_pieces_is_the_answer(value: Any) -> None:
    assert b"".join(encode_json_pieces(value)) == encode_json(value)


def test_a_long_answer_is_written_in_another_thread_and_is_the_same() -> None:
    """While it is, the server answers others."""
    with running(drafting()) as server:
        body = {"prompt": "Once upon a time", "seed": 1, "logprobs": 5, "max_tokens": 60}
        short = server.post("/v1/completions", **body).json()
        threads = []

        def noting(value: Any) -> Any:
            threads.append(threading.current_thread().name)
            return encode_json_pieces(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "QUICK_LOGPROBS", 0)
            patch.setattr(service, "encode_json_pieces", noting)
            long = server.post("/v1/completions", **body).json()
        assert long["choices"] == short["choices"]
        assert threads[0].startswith("long answers")


def test_slow_bodies_leave_threads_for_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, a plain body is read in the meantime."""
    reading, release = threading.Semaphore(0), threading.Event()

    def waiting(*_: Any) -> Any:
        reading.release()
        release.wait(PATIENCE_S)
        raise ChatTemplateError("done")

    with running(drafting()) as server:
        monkeypatch.setattr(Renderer, "answer", waiting)
        with ThreadPoolExecutor(40) as clients:
            slow = [clients.submit(server.post, "/v1/chat/completions", **CHAT) for _ in range(20)]
            slow += [clients.submit(server.post, "/tokenize", **CHAT) for _ in range(20)]
            assert reading.acquire(timeout=PATIENCE_S)
            try:
                plain_one = server.post("/v1/completions", prompt="Once", max_tokens=2)
            finally:
                release.set()
            assert plain_one.status_code == 200
            assert {each.result().status_code for each in slow} == {400}


def test_bodies_still_unread_at_shutdown_are_answered_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = threading.Event()
    monkeypatch.setattr(service, "NUM_SLOW_BODIES", 1)
    monkeypatch.setattr(service, "prepare", lambda *body: held.wait(PATIENCE_S) and prepare(*body))
    with drafting() as llm, running(llm, drain_s=0.1) as server, ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(server.post, "/v1/chat/completions", **CHAT) for _ in range(3)]
        try:
            until(lambda: server.server.service.slow_bodies._work_queue.qsize() == 2)
            server.server.loop.call_soon_threadsafe(server.server.drain)
            until(lambda: sum(each.done() for each in sent) >= 2)
        finally:
            held.set()
        answers = [each.result() for each in sent if each.exception() is None]
    assert len(answers) >= 2
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
    assert "Traceback" not in caplog.text
    assert 'File "' not in caplog.text


def test_deeply_nested_values_in_an_answer_are_no_server_error() -> None:
    """Python reads a little deeper than it writes, since the stack is deeper then."""
    with drafting() as llm, running(llm) as server, server.http() as http:
        statuses = []
        for depth in range(930, 1000, 3):
            asked = {"input": "Once", "chat_template": TEMPLATE, "max_output_tokens": 1}
            sent = json.dumps(asked)[:-1] + f', "metadata": {{"a": {"[" * depth + "]" * depth}}}}}'
            answer = http.post("/v1/responses", content=sent, headers={"Content-Type": "application/json"})
            statuses.append(answer.status_code)
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 400}


@pytest.mark.parametrize(("num_signals", "stream"), [(1, False), (1, True), (2, False)])
def test_the_log_of_a_shutdown_is_right_and_short(
    paced: Paced, num_signals: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that are cut off are not logged as answered, and the reason for closing the engine is logged."""
    begun = list[int]()

    def ask() -> Any:
        with suppress(httpx.HTTPError), server.http() as http:
            with http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": stream}) as answer:
                begun.append(answer.status_code)
                answer.read()
            return answer
        return None

    with drafting() as llm, ThreadPoolExecutor(3) as pool:
        paced.hold(8)  # rounds: all three are in the engine, and none is at its end
        with caplog.at_level("INFO"), running(llm, drain_s=0.3 if num_signals == 1 else 60.0) as server:
            asked = [pool.submit(ask) for _ in range(3)]
            until(lambda: len(llm.engine.sequences) == 3 and (len(begun) == 3 or not stream))
            for _ in range(num_signals):
                server.server.handle_exit(signal.SIGTERM, None)
            paced.let_go_when(lambda: server.server.service.front.closing)
        answers = [each.result() for each in asked]
    if num_signals == 1:
        assert [each.status_code for each in answers] == [200 if stream else 503] * 3
        assert all('"code":"engine_closed"' in each.text and "[DONE]" not in each.text for each in answers)
    else:
        assert answers == [None] * 3
    assert "Every request is answered" not in caplog.text
    assert "3 unfinished answers are cut off" in caplog.text
    assert "File " not in caplog.text

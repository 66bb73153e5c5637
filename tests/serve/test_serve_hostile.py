"""Bodies that are meant to hurt: none is answered by 5xx, and none takes the time or the memory of others."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.serve import service
from forerun.serve.asking import prepared
from forerun.serve.envelope import written, written_pieces
from forerun.serve.problems import ApiError, problem_of
from forerun.serve.settings import ServeSettings
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from serve.servers import TEMPLATE, drafting, plain, running

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": TEMPLATE}
SETTINGS = ServeSettings(trust_request_templates=True)
PARAMETERS = {
    name
    for method in (ChatTemplate.render, Tokenizer.apply_chat_template)
    for name in inspect.signature(method).parameters
}


@pytest.mark.parametrize("name", sorted(PARAMETERS | {"", "a b", "__class__", "context", "loop", "None", "\ud800"}))
def test_options_of_a_template_may_have_any_name(name: str) -> None:
    """Also that of a parameter of ours: it is refused, or the template's own."""
    body: dict[str, Any] = {**CHAT, "chat_template_kwargs": {name: "x"}}
    try:
        prepared(body, "chat", plain(), "", SETTINGS)
    except Exception as error:
        problem = problem_of(error)
        assert problem.status == 400, error
        assert "chat_template_kwargs" in problem.message


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
    with pytest.raises(ApiError, match=f"{field}: [0-9]+ log-probabilities") as error:
        prepared(body, endpoint, plain(), "", SETTINGS)
    assert error.value.status == 400


def test_a_full_context_may_have_the_alternatives_of_openai() -> None:
    body: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 20}
    asked, _ = prepared(body, "chat", plain(), "", SETTINGS)
    assert 0 < asked.num_logprobs <= 21 * plain().plan.max_model_len


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner),
    max_leaves=60,
)


@given(JSON)
def test_pieces_of_an_answer_are_the_answer(value: Any) -> None:
    assert b"".join(written_pieces(value)) == written(value)


def test_a_long_answer_is_written_in_another_thread_and_is_the_same() -> None:
    """While it is, the server answers others."""
    with running(drafting()) as server:
        body = {"prompt": "Once upon a time", "seed": 1, "logprobs": 5, "max_tokens": 60}
        short = server.post("/v1/completions", **body).json()
        threads = []

        def noting(value: Any) -> Any:
            threads.append(threading.current_thread().name)
            return written_pieces(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "QUICK_LOGPROBS", 0)
            patch.setattr(service, "written_pieces", noting)
            long = server.post("/v1/completions", **body).json()
        assert long["choices"] == short["choices"]
        assert threads[0].startswith("long answers")

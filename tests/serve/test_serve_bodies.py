"""Bodies: every field of the specification is classified, and unsupported fields are refused by name."""

import logging
import re
from typing import Any

import pytest

from forerun.serve.body import parse_json_body
from forerun.serve.problems import ApiError
from forerun.serve.schema import KNOWN, Endpoint
from kit.servers import Running, drafting, running, serving, specification

OK = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ messages[0].content }}", "max_tokens": 2}
RESPONSE = {"input": "Hi", "chat_template": "{{ messages[0].content }}", "max_output_tokens": 2}
BODIES: dict[Endpoint, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", OK),
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", RESPONSE),
    "messages": ("/v1/messages", CHAT),
}

server = serving(max_body_bytes=100_000)


def properties(name: str) -> set[str]:
    """The fields that the specification gives a body, its parts included."""
    schemas = specification()["components"]["schemas"]

    def of(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return of(schemas[schema["$ref"].rpartition("/")[2]])
        return set(schema.get("properties", ())).union(*map(of, schema.get("allOf", ())))

    return of(schemas[name])


def test_every_field_of_the_specification_has_a_class() -> None:
    assert properties("CreateCompletionRequest") <= KNOWN["completions"].keys()
    assert properties("CreateChatCompletionRequest") <= KNOWN["chat"].keys()
    assert properties("CreateResponse") <= KNOWN["responses"].keys()


def fields(kind: str) -> list[Any]:
    """An endpoint, and a field of this class that it knows."""
    return [(name, field) for name in BODIES for field, own in KNOWN[name].items() if own.kind == kind]


@pytest.mark.short(
    "completions-user",
    "completions-request_id",
    "chat-metadata",
    "chat-store",
    "chat-service_tier",
    "responses-safety_identifier",
    "responses-prompt_cache_key",
    "responses-max_tool_calls",
)
@pytest.mark.parametrize(("endpoint", "name"), fields("idle"))
def test_fields_that_do_not_concern_the_text_have_no_effect(server: Running, endpoint: Endpoint, name: str) -> None:
    path, body = BODIES[endpoint]
    with_it, without = server.post(path, **body, seed=1, **{name: "x"}), server.post(path, **body, seed=1)
    assert with_it.status_code == without.status_code == 200
    assert content_of(with_it.json()) == content_of(without.json())


def content_of(answer: dict[str, Any]) -> Any:
    """The content of an answer."""
    texts = [part["text"] for item in answer.get("output", ()) for part in item["content"]]
    return answer.get("choices") or answer.get("content") or texts


@pytest.mark.short("completions-*", "responses-previous_response_id", "responses-background")
@pytest.mark.parametrize(("endpoint", "name"), fields("unserved"))
def test_unsupported_fields_that_would_change_the_text_are_refused(
    server: Running, endpoint: Endpoint, name: str
) -> None:
    (path, body), field = BODIES[endpoint], KNOWN[endpoint][name]
    for harmless in (None, *field.harmless):
        assert server.post(path, **body, **{name: harmless}).status_code == 200
    refused = server.post(path, **body, **{name: {"asks": "for something"}})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith(f"{name}: ")
    assert error["message"].endswith(f" is not served here: {field.answer}.")
    if endpoint != "messages":
        assert (error["code"], error["param"], error["type"]) == (
            "unsupported_parameter",
            name,
            "invalid_request_error",
        )


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b'{"prompt": "a", "logit_bias": {"5": -1e999}}', 400, "-1e999 is not a finite number"),
        (b'{"prompt": "\xff"}', 400, "invalid_json"),
        (b'{"prompt": "a", "n": 1, "n": 2}', 400, '"n" occurs twice'),
        (b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 413, "body_too_large"),
        (b'{"prompt":' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, "invalid_json"),
        (b'{"n":' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b'{"prompt": "' + b"x" * 100_001 + b'"}', 413, "body_too_large"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_bodies_are_refused(server: Running, content: bytes, status: int, message: str) -> None:
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"] == message or message in error["message"]) == (status, True), (
                error
            )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbf{}", "begins with a byte order mark: leave that out"),
        (b'{"n":' + b"9" * 5000 + b"}", "4300 digits"),
    ],
)
def test_errors_of_invalid_json_are_worded_for_clients(content: bytes, message: str) -> None:
    """Python's own messages advise programs: which codec to use, which function of `sys` to call."""
    with pytest.raises(ApiError, match=message) as caught:
        parse_json_body(content)
    assert not re.search(r"sys\.|utf-8-sig", str(caught.value))


def test_an_answer_may_fill_the_context_and_the_default_limit_is_reduced(server: Running) -> None:
    """`max_tokens` of the body must fit into the context with the prompt; the server's default is reduced."""
    body = {"prompt": [1] * 500, "ignore_eos": True, "temperature": 0}
    for limit in ({"max_tokens": 12}, {}):
        found = server.post("/v1/completions", **body, **limit).json()
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (12, "length")
    refused = server.post("/v1/completions", **body, max_tokens=13)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_other_types_methods_models_and_origins_are_refused(server: Running) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        wrong = http.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert http.head("/v1/completions").headers["allow"] == "POST"
        for path in ("/health", "/openapi.json"):
            assert {*http.delete(path).headers["allow"].split(", ")} == {"GET", "HEAD"}
        assert http.get("/nowhere").json()["error"]["code"] == "no_route"
        for path in ("/chat/completions", "/v1/chat/completion"):
            assert "did you mean '/v1/chat/completions'?" in http.post(path).json()["error"]["message"]
        asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
        preflight = http.options("/v1/completions", headers=asked)
        answer = http.post("/v1/completions", json=OK, headers={"Origin": "http://elsewhere"})
        assert preflight.status_code == answer.status_code == 403
        assert http.options("/v1/completions").status_code == 405
        assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]
    other = server.post("/v1/completions", **OK, model="gpt-5")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert server.post("/detokenize", tokens=[1, 512]).json()["error"]["param"] == "tokens"
    for tokens, code in (([True], "invalid_value"), ("x", "invalid_value"), (None, "missing_required_parameter")):
        answer = server.post("/detokenize", tokens=tokens)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert server.post("/tokenize", prompt="a", messages=[]).status_code == 400


def test_a_template_in_a_body_is_run_only_if_allowed() -> None:
    """The model has none, so that a conversation without it is refused for that."""
    brought = {"chat_template": "{{ messages[0].content }}"}
    talks = {
        "/v1/chat/completions": {"messages": CHAT["messages"], "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
        "/tokenize": {"messages": CHAT["messages"]},
    }
    with drafting() as llm, running(llm, trust_request_templates=False) as wary, running(llm) as trusting:
        for path, body in talks.items():
            for more in (brought, {"chat_template_kwargs": brought}):
                answer = wary.post(path, **body, **more)
                error = answer.json()["error"]
                expected = (400, "chat_template", "unsupported_parameter")
                assert (answer.status_code, error["param"], error["code"]) == expected, answer.text
                assert "--trust-request-templates" in error["message"]
            message = wary.post(path, **body, chat_template=None).json()["error"]["message"]
            assert message.startswith("no chat template in tokenizer_config.json (chat_template): use"), "has a path"
            assert trusting.post(path, **body, **brought).status_code == 200
            nested = trusting.post(path, **body, chat_template_kwargs=brought)
            assert (nested.status_code, nested.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_head_gives_the_headers_of_get_at_every_address(server: Running) -> None:
    with server.http() as http:
        paths = [path for path, own in http.get("/openapi.json").json()["paths"].items() if "get" in own]
        assert {"/", "/health", "/ready", "/metrics", "/v1/models", "/page/settings"} < set(paths)
        for path in [*(path.replace("{name}", "stories") for path in paths), "/openapi.json", "/nowhere"]:
            whole, head = http.get(path), http.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            if path not in ("/metrics", "/nowhere"):  # one changes, the other repeats what was asked
                length, kind = whole.headers["content-length"], whole.headers["content-type"]
                assert (head.headers["content-length"], head.headers["content-type"]) == (length, kind)


def test_lenient_mode_warns_of_unknown_fields_and_refuses_unsupported_ones(caplog: pytest.LogCaptureFixture) -> None:
    with drafting() as llm, running(llm, lenient=True) as server, caplog.at_level(logging.WARNING):
        assert server.post("/v1/completions", **OK, temprature=1).status_code == 200
        assert server.post("/v1/completions", **OK, best_of=3).status_code == 400
    assert "did you mean 'temperature'? It was ignored." in caplog.text

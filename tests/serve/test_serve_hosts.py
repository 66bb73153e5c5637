"""Hosts and ids: pages of other sites cannot send requests, the server's can, and every answer has an id of the log."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.errors import EngineClosed, InvalidRequest
from forerun.serve.access import Hosts
from forerun.serve.envelope import ACCESS
from forerun.serve.problems import ApiError
from forerun.serve.records import REQUESTS
from forerun.serve.service import Service
from forerun.serve.settings import ServeSettings
from kit.servers import OK, Running, drafting, expected, running, serving, until

ADDRESSES = [
    ("GET", "/"), ("GET", "/page/app.js"), ("GET", "/page/settings"), ("GET", "/metrics"), ("GET", "/health"),
    ("HEAD", "/ready"), ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/nowhere"), ("OPTIONS", "/v1/models"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/tokenize"),
]  # fmt: skip
server = serving()


def refused(hosts: Hosts, host: str | None, origin: str | None = None, scheme: str = "http") -> str:
    """The code of the refusal of such a request; empty where it is answered."""
    try:
        hosts.check([] if host is None else [host], [] if origin is None else [origin], scheme)
    except ApiError as error:
        return error.code if error.status == 403 and "--allowed-hosts" in error.message else error.message
    return ""


@settings(max_examples=30)
@given(st.text(max_size=40), st.text(max_size=40), st.sampled_from(["http", "https"]))
def test_whatever_a_client_sends_is_answered_or_refused(host: str, origin: str, scheme: str) -> None:
    for hosts in (Hosts("127.0.0.1", frozenset()), Hosts("0.0.0.0", frozenset({"a.example"}))):
        assert refused(hosts, host, origin, scheme) in ("", "host_not_allowed", "origin_not_allowed")


NAMES = {  # of hosts, and whether they are this machine's own
    "localhost": True, "a.localhost": True, "127.0.0.1": True, "127.9.8.7": True, "[::1]": True, "[0:0::0:1]": True,
    "a.example": False, "b.a.example": False, "localhost.a.example": False, "127.0.0.1.a.example": False,
    "alocalhost": False, "0.0.0.0": False, "128.0.0.1": False, "[::2]": False, "[2001:db8::a]": False,
}  # fmt: skip


WRONG = [
    "me@{}", "me:pw@{}", " {}", "{} ", "{}/", "{}?", "{}#", "{}\\", "{}:",
    "[{}", "{}:x", "{}\x00", "{}\x85", "a\x7f{}", "a b", "",
]  # fmt: skip


class Spelled(NamedTuple):
    """A host in a header, and what was meant by it: a name, or None where the header names no host, and a port."""

    text: str
    name: str | None
    port: str


@st.composite
def spelled_hosts(draw: st.DrawFn) -> Spelled:
    one = st.shared(st.sampled_from(sorted(NAMES)), key="one")
    name = draw(one | one | st.sampled_from(sorted(NAMES)))
    dot = draw(st.sampled_from(["", "."])) if name[0] != "[" else ""
    port = draw(st.sampled_from(["", "", "80", "443", "8000"]))
    text = draw(st.sampled_from([str.lower, str.upper, str.title]))(name) + dot + (port and f":{port}")
    wrong = draw(st.sampled_from([None] * 30 + WRONG))
    return Spelled(text, name, port) if wrong is None else Spelled(wrong.replace("{}", text), None, "")


ANYBODY = frozenset({Spelled("*", None, "")})
CONTROL = Spelled("0.0.0.0.\x00", None, "")


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(["127.0.0.1", "localhost", "LocalHost.", "::1", "0.0.0.0", "::", "192.0.2.1", "a.example"]),
    st.frozensets(spelled_hosts().filter(lambda each: each.name and not each.port), max_size=2) | st.just(ANYBODY),
    st.none() | spelled_hosts(),
    st.none() | st.tuples(st.sampled_from(["http", "http", "https", "https", "HTTP", "file"]), spelled_hosts()),
    st.sampled_from(["http", "https"]),
)
@example("0.0.0.0", frozenset(), CONTROL, ("http", CONTROL), "http")
def test_hosts_are_allowed_by_meaning_in_any_spelling(
    bound: str, allowed: frozenset[Spelled], host: Spelled | None, page: tuple[str, Spelled] | None, scheme: str
) -> None:
    """However hosts are spelled, in a header and by the server's user."""
    hosts, names = Hosts(bound, frozenset(each.text for each in allowed)), {each.name for each in allowed}
    everybody = not allowed and bound.lower().strip(".") not in ("127.0.0.1", "localhost", "::1")
    ports = {"http": "80", "https": "443"}
    code = ""
    if page is not None:
        its_scheme, at = page[0].lower(), page[1]
        same = host is not None and (its_scheme, at.name) == (scheme, host.name)
        same = same and (at.port or ports[scheme]) == (host.port or ports[scheme])
        code = "" if at.name is not None and (same or at.name in names) else "origin_not_allowed"
    if host is not None and not everybody and (host.name is None or not (host.name in names or NAMES[host.name])):
        code = "host_not_allowed"
    code = "" if allowed == ANYBODY else code
    assert refused(hosts, host and host.text, page and f"{page[0]}://{page[1].text}", scheme) == code


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a b", "a/b", "[::1"])
def test_an_invalid_host_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed_hosts: .* not a host name"):
        ServeSettings(allowed_hosts=name)


@pytest.mark.parametrize(("method", "path"), ADDRESSES)
def test_every_address_refuses_other_sites_and_gives_an_id(server: Running, method: str, path: str) -> None:
    with server.http() as http:
        plain = http.request(method, path, json=OK)
        own_page = http.request(method, path, json=OK, headers={"Origin": server.url})
        assert plain.status_code == own_page.status_code != 403
        answers = [plain, own_page]
        for headers, code in (
            ({"Host": "evil.example"}, "host_not_allowed"),
            ({"Origin": "http://evil.example"}, "origin_not_allowed"),
            ({"Host": "evil.example", "Origin": "http://evil.example"}, "host_not_allowed"),
        ):
            answer = http.request(method, path, json=OK, headers=headers)
            assert answer.status_code == 403
            if method != "HEAD":
                assert answer.json()["error"]["code"] == code
                assert "evil.example" in answer.json()["error"]["message"]
            answers.append(answer)
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == len(answers)
        named = http.request(method, path, json=OK, headers={"X-Request-Id": "run 7/3 'a'"})
        assert named.headers["x-request-id"] == "run 7/3 'a'"


ANSWERED: list[tuple[int, dict[str, Any]]] = [  # by what is not as usual in a request
    (200, {}), (200, {"json": {**OK, "stream": True}}), (200, {"path": "/tokenize", "json": {"prompt": "a"}}),
    (400, {"json": {"prompt": 3}}), (400, {"content": b"{"}), (400, {"json": {**OK, "max_tokens": 9999}}),
    (400, {"path": "/v1/messages"}), (401, {"X-Api-Key": "no"}), (403, {"Host": "a.example"}),
    (403, {"Origin": "null"}), (404, {"json": {**OK, "model": "other"}}), (404, {"path": "/%ff?%00"}),
    (404, {"path": "/v1/models/other", "method": "GET"}), (405, {"method": "BREW"}), (405, {"method": "HEAD"}),
    (413, {"json": "x" * 3000}), (415, {"Content-Type": "text/plain"}), (415, {"Content-Encoding": "gzip"}),
    (431, {"X": "y" * 16_400}), (429, {"fault": ApiError(429, "", code="full")}), (500, {"fault": OSError()}),
    (500, {"fault": KeyError(3)}), (503, {"fault": MemoryError()}), (503, {"fault": EngineClosed("on purpose")}),
    (504, {"fault": ApiError(504, "", code="late")}),
]  # fmt: skip
SENT = st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n\v\f\x7f"), max_size=130)
SENT |= st.integers(120, 131).map(lambda length: "x" * length)


def test_every_answer_of_every_status_has_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the client, where it is of printable ASCII; else a new one, of which there are no two."""
    keys, ids, honest = tmp_path / "keys", set[str](), Service.process
    keys.write_text("alice k-1\n")

    with drafting() as llm, running(llm, api_keys=keys, max_body_bytes=2000) as server, server.http() as http:

        @settings(max_examples=8, deadline=None)
        @given(st.lists(st.none() | SENT, min_size=len(ANSWERED), max_size=len(ANSWERED)))
        def check(sents: list[str | None]) -> None:
            for (status, odd), any_id in zip(ANSWERED, sents, strict=True):
                sent = None if status == 431 else any_id  # which may have been refused before its head was whole
                headers = {"X-Api-Key": "k-1", "Content-Type": "application/json"}
                headers |= {name: value for name, value in odd.items() if name[0].isupper()}
                raw = {name.encode(): value.encode() for name, value in headers.items()}
                raw |= {} if sent is None else {b"X-Request-Id": sent.strip(" \t").encode("latin-1")}
                body = {"content": odd["content"]} if "content" in odd else {"json": odd.get("json", OK)}
                monkeypatch.setattr(Service, "process", raising(odd["fault"]) if "fault" in odd else honest)
                path = odd.get("path", "/v1/completions")
                answer = http.request(odd.get("method", "POST"), path, headers=raw, **body)
                assert answer.status_code == status
                (answer_id,) = {answer.headers[name] for name in ("x-request-id", "request-id")}
                shown = (sent or "").strip(" \t")
                if 1 <= len(shown) <= 128 and all(" " <= each <= "~" for each in shown):
                    assert answer_id == shown
                else:
                    assert answer_id.startswith("req_")
                    assert answer_id not in ids
                    ids.add(answer_id)

        check()


def raising(error: Exception) -> Any:
    """A method that raises."""

    async def body(*_: object) -> None:
        raise error

    return body


def test_the_log_has_the_id_of_the_answer(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), server.http(headers={"X-Request-Id": 'mine" id=x'}) as http:
        whole = http.post("/v1/completions", json=OK)
        with http.stream("POST", "/v1/completions", json={**OK, "stream": True}) as stream:
            stream.read()
        refused_one = http.post("/v1/completions", json={})
        until(lambda: sum(each.name == ACCESS for each in caplog.records) == 3)  # a line may follow its answer
    ids = ['mine" id=x'] * 3
    assert [each.headers["x-request-id"] for each in (whole, stream, refused_one)] == ids
    records = {name: [each for each in caplog.records if each.name == name] for name in (ACCESS, REQUESTS)}
    assert [len(each) for each in records.values()] == [3, 2]
    for record in (*records[ACCESS], *records[REQUESTS]):
        assert record.fields["request_id"] == ids[0]  # type: ignore[attr-defined]
        assert f"request_id={json.dumps(ids[0])}" in record.message
    assert next(record.fields["id"] for record in records[REQUESTS]) == whole.json()["id"]  # type: ignore[attr-defined]


def test_openais_client_shows_the_id_of_an_answer_and_of_an_error(server: Running) -> None:
    client = server.client()
    answer = client.completions.create(model="stories", **OK)
    assert answer._request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="stories", **OK, temperature=-1)
    assert error.value.request_id.startswith("req_")


def test_an_allowed_host_reaches_the_server(tmp_path: Path) -> None:
    with drafting() as llm, running(llm, allowed_hosts="models.example") as server, server.http() as http:
        headers = {"Host": "models.example", "Origin": "https://models.example"}
        answer = http.post("/v1/completions", json=OK, headers=headers)
        assert answer.json()["choices"][0]["text"] == expected()
        assert http.get("/", headers={"Host": "other.example"}).status_code == httpx.codes.FORBIDDEN


def test_refusals_are_counted(server: Running) -> None:
    with server.http() as http:
        http.get("/metrics", headers={"Host": "evil.example"})
        http.get("/nowhere")
        text = http.get("/metrics").text
    assert 'forerun:http_responses_total{status="403"}' in text
    assert 'forerun:http_responses_total{status="404"}' in text

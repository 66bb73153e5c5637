"""The HTTP client of load tests: sends a streaming request and times its tokens. Only this file imports httpx.

A chunk's time is taken when its bytes arrive, before they are parsed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from forerun.config import require_url
from forerun.errors import InvalidRequest, MissingPackage
from forerun.limits import shown

CONNECT_S = 10.0
MOST_COUNT = 1 << 53  # a larger number is no count of tokens
IDLE_S = 2.0  # idle connections are not reused after this time, since servers close them, many after 5 seconds


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's URL, API key and model; `chat`: use chat completions.

    `url_option` and `model_option`: the options that errors about the URL and the model name.
    """

    url: str
    api_key: str = ""
    model: str = ""
    chat: bool = False
    timeout_s: float = 600.0
    url_option: str = "url"
    model_option: str = "served_model_name"

    @property
    def base(self) -> str:
        """The URL without a trailing `/v1` and slashes."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        """The path of requests."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a server: its name, whether it is a forerun server, and the model's fingerprint and owner, if any."""

    name: str
    forerun: bool
    fingerprint: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One request with its times, in seconds on one clock.

    `due_s`: when it should have been sent; `sent_s`: when it was sent. `num_tokens`: from the usage if `counted`, else
    the number of chunks with text. `longest_gap_s`: the longest time between two chunks. `digest`: a hash of the text.
    `error`: "" for a complete answer; the times of a failed one are not used.
    """

    index: int
    due_s: float
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    digest: str = ""
    counted: bool = True
    speculation: Mapping[str, Any] | None = None
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds from when it was due to its first token, including the wait before sending."""
        return self.first_s - self.due_s

    @property
    def between_tokens_s(self) -> float | None:
        """The mean seconds between tokens; None for a single token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def total_s(self) -> float:
        """Seconds from when it was due to its last token."""
        return self.last_s - self.due_s


def require_client(command: str = "forerun bench serve", *packages: str) -> None:
    """Raise MissingPackage if httpx, or another package that a command needs, is not installed."""
    for package in ("httpx", *packages):
        if find_spec(package) is None:
            raise MissingPackage(f"{command} needs {package}, which is not installed: pip install 'forerun[bench]'")


class TrafficClient:
    """A client of one server; to be used as an async context."""

    def __init__(self, address: ServerAddress) -> None:
        import httpx

        self.address, base, option = address, address.base, address.url_option
        require_url(option, base)
        headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else {}
        try:
            self.http = httpx.AsyncClient(
                base_url=base,
                headers=headers,
                timeout=httpx.Timeout(address.timeout_s, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),  # the client must never wait
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidRequest(option, f"{shown(address.url)} is not a valid URL ({error}).") from error

    async def __aenter__(self) -> TrafficClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def served_model(self) -> ServedModel:
        """The model to use. Raises InvalidRequest if the server does not answer or does not have the model."""
        import httpx

        base, option = self.address.base, self.address.url_option
        try:
            response = await self.http.get("/v1/models")
            models = response.raise_for_status().json()["data"]
            names = [str(model.get("id")) for model in models]
        except httpx.HTTPStatusError as error:
            fix = "give its key with --api-key" if error.response.status_code == 401 else "is it OpenAI-compatible?"
            raise InvalidRequest(option, f"{base}/v1/models: status {error.response.status_code}: {fix}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise InvalidRequest(
                option, f"{base} does not answer ({why}): start the server, or give another address."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(option, f"{base}/v1/models lists no models: is it OpenAI-compatible?") from error
        if not names:
            raise InvalidRequest(option, f"{base} serves no model.")
        name = self.address.model or names[0]
        if name not in names:
            raise InvalidRequest(
                self.address.model_option, f"{base} does not serve {shown(name)}: name one of {', '.join(names)}."
            )
        model = models[names.index(name)]
        owner = str(model.get("owned_by") or "")
        return ServedModel(name, owner == "forerun", str(model.get("system_fingerprint") or ""), owner)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request that is not streamed. Raises InvalidRequest with the server's error message if it fails."""
        import httpx

        base, option = self.address.base, self.address.url_option
        try:
            try:
                response = await self.http.post(self.address.path, json=body)
            except (httpx.RemoteProtocolError, httpx.NetworkError, httpx.ConnectTimeout):  # retry once
                response = await self.http.post(self.address.path, json=body)
            answer = response.json() if response.status_code == 200 else None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(option, f"{base} closed the connection or did not answer ({reason}).") from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(option, f"{base}{self.address.path} does not answer with JSON.") from error
        if answer is None:
            fix = ": give its key with --api-key" if response.status_code == 401 else ""
            refusal = refusal_of(response.status_code, response.content)
            raise InvalidRequest(option, f"{base} refuses a request with {refusal}{fix}.")
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise InvalidRequest(option, f"{base}{self.address.path} answers without choices: {shown(answer)}.")
        return answer

    async def metrics(self) -> str | None:
        """The server's Prometheus metrics; None if it has none."""
        import httpx

        try:
            response = await self.http.get("/metrics")
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def ask(self, index: int, body: Mapping[str, Any], due_s: float) -> TimedAnswer:
        """Send a request and read its stream. If the request fails, the answer has an error."""
        import httpx

        sent_s = time.perf_counter()
        times = ChunkTimes()
        try:
            async with self.http.stream("POST", self.address.path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    return TimedAnswer(index, due_s, sent_s, error=refusal_of(response.status_code, response.content))
                async for data in events(response.aiter_bytes()):
                    times.add(data)
        except httpx.HTTPError as error:
            return TimedAnswer(index, due_s, sent_s, error=f"{type(error).__name__} {error}".strip())
        return TimedAnswer(
            index,
            due_s,
            sent_s,
            times.first_s or 0.0,
            times.last_s or 0.0,
            times.num_tokens,
            times.longest_gap_s,
            hashlib.sha256("".join(times.texts).encode("utf-8", "surrogatepass")).hexdigest(),
            times.usage is not None,
            times.speculation,
            times.problem,
        )


class ChunkTimes:
    """Collects the chunks of one stream with their times."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.longest_gap_s = 0.0
        self.texts: list[str] = []
        self.usage: Mapping[str, Any] | None = None
        self.timings: Mapping[str, Any] = {}
        self.error = ""
        self.done = False

    def add(self, data: bytes) -> None:
        """Add the data of one event."""
        now_s = time.perf_counter()
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(data)
            parts = [(text_of(choice), choice.get("finish_reason")) for choice in chunk.get("choices") or ()]
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.error = f"a chunk does not have OpenAI's form: {data[:80]!r}"
            return
        if chunk.get("error"):
            self.error = error_text(chunk)
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        if isinstance(chunk.get("timings"), dict):
            self.timings = chunk["timings"]
        for text, finish_reason in parts:
            if text:
                self.texts.append(text)
            if text or finish_reason:
                self.record_time(now_s)

    def record_time(self, now_s: float) -> None:
        """Record the time of a chunk with tokens."""
        if self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, from the usage, or else the number of chunks with text."""
        counted = count_of((self.usage or {}).get("completion_tokens"))
        return counted if isinstance(counted, int) else len(self.texts)

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        """Speculation counts from forerun's usage or llama.cpp's timings; None without any, or if one is no count."""
        usage, timings = (self.usage or {}).get("speculation"), self.timings
        if isinstance(usage, dict):
            counts = {name: count_of(usage.get(name)) for name in ("num_drafted", "num_accepted", "num_rounds")}
        else:
            accepted = count_of(timings.get("draft_n_accepted", 0))
            tokens = count_of(timings.get("predicted_n", self.num_tokens))
            rounds = None if tokens is None or accepted is None else count_of(tokens - accepted)
            counts = {"num_drafted": count_of(timings.get("draft_n")), "num_accepted": accepted, "num_rounds": rounds}
        return None if None in counts.values() else counts

    @property
    def problem(self) -> str:
        """Why the answer is incomplete; "" if it is complete."""
        if self.error:
            return self.error
        if not self.done:
            return "the stream ended before the answer was complete"
        return "" if self.first_s is not None else "the stream contains no answer"


def count_of(value: object) -> int | float | None:
    """The value if it can be a count, from 0 to MOST_COUNT; None for others, NaN included."""
    return value if isinstance(value, int | float) and 0 <= value <= MOST_COUNT else None


def text_of(choice: Mapping[str, Any]) -> str:
    """The text in a choice of an answer or a chunk. Raises AttributeError or TypeError for another form."""
    text = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    if not isinstance(text, str):
        raise TypeError(f"{shown(text)} is not a text")
    return text


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. Only line feeds end lines, since JSON may contain other line separators."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def refusal_of(status: int, content: bytes) -> str:
    """The status and message of an error response, on one line."""
    try:
        return f"status {status}: {error_text(json.loads(content))}"
    except (ValueError, RecursionError):
        return f"status {status}"


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's format, or the whole body in other formats."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return shown(error.get("message", error) if isinstance(error, dict) else error)

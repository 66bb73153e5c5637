"""Envelope: the middleware around all routes, for request ids, host checks, HTTP framing checks and the access log.

Every request passes it, so that every answer, including refusals, is counted and has its id in the log.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.limits import values_in_json
from forerun.serve.access import Hosts
from forerun.serve.metrics import Metrics
from forerun.serve.problems import ApiError

ACCESS = "forerun.serve.access"
ID_HEADER, ANTHROPIC_ID_HEADER = "x-request-id", "request-id"  # Anthropic's clients read the latter
CLIENT_ID = re.compile(r"[ -~]{1,128}")  # a request id from a client that is accepted
ABSOLUTE = re.compile(rb"https?://(?P<authority>[^/]*)(?P<path>/.*)?", re.IGNORECASE)  # a request target, without query
CLOSE = (b"connection", b"close")
VERSIONS = ("1.0", "1.1")
PIECE_ITEMS = 16  # list items per piece: 16 tokens with 128 alternatives each take 2 ms
MOST_HEAD_BYTES = 1 << 14
HEAD_TOO_LARGE = ApiError(431, f"the request head has more than {MOST_HEAD_BYTES} bytes.", code="head_too_large")
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # creating one takes as long as encoding a chunk
access_log = logging.getLogger(ACCESS)


class Envelope:
    """Middleware that refuses unsafe requests, and adds the request id to every answer."""

    def __init__(self, app: ASGIApp, hosts: Hosts, metrics: Metrics) -> None:
        self.app = app
        self.hosts = hosts
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. The scope's state gets its `request_id`, and as `problem` what is `logged` of its error.

        The access log line is written at the end of the answer, or when the client leaves before that.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        use_origin_form(scope)
        headers, arrived_s = Headers(raw=scope["headers"]), time.perf_counter()
        request_id = next(filter(CLIENT_ID.fullmatch, headers.getlist(ID_HEADER)), None) or new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        app: ASGIApp = self.app
        status: int | None = None  # until the answer has begun
        closes = "expect" in headers  # after a refusal, such a client may send either the body or the next request
        try:
            with values_in_json():
                check_framing(scope, headers)
                self.hosts.check(headers.getlist("host"), headers.getlist("origin"), scope["scheme"])
        except ApiError as problem:
            scope["state"]["problem"] = problem.logged
            app = json_response(problem.body, problem.status, problem.headers)
            closes = closes or problem.status != 403

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [CLOSE] if closes and status >= 400 else []
                message["headers"] = [*message["headers"], *id_headers(request_id), *more]
                self.metrics.answered.labels(str(status)).inc()
            await send(message)

        try:
            await app(scope, receive, send_with_headers)
        finally:
            if status is not None:
                log_access(scope, status, request_id, time.perf_counter() - arrived_s)


def use_origin_form(scope: Scope) -> None:
    """Replace an absolute request target by its path, and the Host header by its authority (RFC 9112, 3.2.2)."""
    match = ABSOLUTE.fullmatch(scope["raw_path"])
    if match is not None:
        scope["raw_path"] = match["path"] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [(b"host", match["authority"]), *others]


def check_framing(scope: Scope, headers: Headers) -> None:
    """Raise ApiError for a head that is too long, or for ambiguous framing, which would allow request smuggling."""
    size = len(scope["path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers.raw)
    if size > MOST_HEAD_BYTES:
        raise HEAD_TOO_LARGE
    version = scope["http_version"]
    if version not in VERSIONS:
        raise ApiError(400, f"HTTP/{version} is not supported: use HTTP/1.1.", code="invalid_http")
    if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
        message = "Transfer-Encoding cannot be used with Content-Length or in HTTP/1.0: send Content-Length alone."
        raise ApiError(400, message, code="invalid_http")


def log_access(scope: Scope, status: int, request_id: str, duration_s: float) -> None:
    """Write the access log line of one answer: uvicorn's line, then the other fields, also those of an error."""
    client = ":".join(map(str, scope["client"] or ()))
    path = quote(scope["path"]) + (f"?{scope['query_string'].decode('ascii')}" if scope["query_string"] else "")
    method, version = scope["method"], scope["http_version"]
    fields = {"client": client, "method": method, "path": path, "status": status, "request_id": request_id}
    fields["duration_s"] = round(duration_s, 6)
    line = '%s - "%s %s HTTP/%s" %d request_id=%s duration_s=%.6f'
    values = [client, method, path, version, status, json.dumps(request_id), duration_s]
    problem = scope["state"].get("problem")
    if problem is not None:
        fields |= problem
        line += " code=%s param=%s"
        values += [problem["code"], json.dumps(problem["param"])]
    access_log.info(line, *values, extra={"fields": fields})


def id_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    """The response headers with the request id."""
    return [(name.encode(), request_id.encode()) for name in (ID_HEADER, ANTHROPIC_ID_HEADER)]


def new_id() -> str:
    """A new request id."""
    return f"req_{secrets.token_hex(16)}"


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(encode_json(body), status, headers, "application/json")


def encode_json(body: Any) -> bytes:
    """Encode as ASCII JSON: some clients treat U+2028 as a line end, and lone surrogates have no UTF-8."""
    return ENCODER.encode(body).encode("ascii")


def encode_json_pieces(value: Any) -> Iterator[bytes]:
    """Encode as JSON in pieces, since encoding holds the GIL and long answers have megabytes."""
    if isinstance(value, dict) and value:
        for place, (name, member) in enumerate(value.items()):
            yield (b"," if place else b"{") + encode_json(name) + b":"
            yield from encode_json_pieces(member)
        yield b"}"
    elif isinstance(value, list) and len(value) > PIECE_ITEMS:
        for place in range(0, len(value), PIECE_ITEMS):
            yield (b"," if place else b"[") + encode_json(value[place : place + PIECE_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            yield b"," if place else b"["
            yield from encode_json_pieces(item)
        yield b"]"
    else:
        yield encode_json(value)

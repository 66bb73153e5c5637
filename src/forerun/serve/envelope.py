"""Envelope: what is around every request and its answer: its id, its host, its framing, and the line of the access log.

It stands before all addresses, so that an answer of any of them, and a refusal, is counted and can be found again.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from forerun.limits import values_in_json
from forerun.serve.hosts import Hosts
from forerun.serve.metrics import Metrics
from forerun.serve.problems import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

ACCESS = "forerun.serve.access"
ID_HEADER = b"x-request-id"
CLIENTS_ID = re.compile(rb"[ -~]{1,128}")
CLOSE = (b"connection", b"close")
VERSIONS = ("1.0", "1.1")
access_log = logging.getLogger(ACCESS)


class Envelope:
    """An application inside another one that refuses what must not reach it, and says of every answer which it is."""

    def __init__(self, app: Application, hosts: Hosts, metrics: Metrics) -> None:
        self.app = app
        self.hosts = hosts
        self.metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request. Its id is in the scope's state as `request_id`."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope["headers"])
        request_id = next(filter(CLIENTS_ID.fullmatch, headers.of(ID_HEADER)), None) or new_id()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        app = self.app
        closes = bool(headers.of(b"expect"))  # such a client may send its body, or the next request, behind a refusal
        try:
            with values_in_json():
                headers.check_framing(scope["http_version"])
                self.hosts.check(headers.texts(b"host"), headers.texts(b"origin"), scope["scheme"])
        except ApiError as problem:
            app = json_response(problem.body, problem.status, problem.headers)
            closes = closes or problem.status == 400

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [CLOSE] if closes and status >= 400 else []
                message["headers"] = [*message["headers"], (ID_HEADER, request_id), *more]
                self.metrics.answered.labels(str(status)).inc()
                log_access(scope, status, request_id.decode())
            await send(message)

        await app(scope, receive, tell)


class Headers:
    """The headers of one request, names in lower case."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.headers = headers

    def of(self, name: bytes) -> list[bytes]:
        """All values of a name."""
        return [value for each, value in self.headers if each == name]

    def texts(self, name: bytes) -> list[str]:
        """The same as texts."""
        return [value.decode("latin-1") for value in self.of(name)]

    def check_framing(self, version: str) -> None:
        """Raise the ApiError for 400 where a proxy might see another end of the body, or another version."""
        if version not in VERSIONS:
            raise ApiError(400, f"HTTP/{version} is not spoken here: use HTTP/1.1.", code="invalid_http")
        if self.of(b"transfer-encoding") and (self.of(b"content-length") or version == "1.0"):
            message = "the body has a Transfer-Encoding beside a Content-Length, or in HTTP/1.0: send one of the two."
            raise ApiError(400, message, code="invalid_http")


def log_access(scope: Message, status: int, request_id: str) -> None:
    """Write the line of one answer."""
    client = ":".join(map(str, scope["client"] or ()))
    path = quote(scope["path"]) + (f"?{scope['query_string'].decode('ascii')}" if scope["query_string"] else "")
    method, version = scope["method"], scope["http_version"]
    fields = {"method": method, "path": path, "status": status, "request_id": request_id}
    line = '%s - "%s %s HTTP/%s" %d request_id=%s'
    access_log.info(line, client, method, path, version, status, json.dumps(request_id), extra={"fields": fields})


def new_id() -> bytes:
    """An id for a request that has none."""
    return f"req_{secrets.token_hex(16)}".encode()


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(written(body), status, headers, "application/json")


def written(body: dict[str, Any]) -> bytes:
    """JSON in ASCII: some clients take U+2028 for the end of a line, and halves of surrogates have no UTF-8."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")

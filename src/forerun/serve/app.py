"""The HTTP application: routes, streams and error answers. Only this file and `page_routes.py` import FastAPI."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forerun import __version__
from forerun.did_you_mean import nearest
from forerun.errors import EngineClosed, ForerunError
from forerun.limits import shown, values_in_json
from forerun.serve.answers import Writer
from forerun.serve.envelope import Envelope, encode_json, json_response
from forerun.serve.gate import OpenRequest
from forerun.serve.message_answers import message_error
from forerun.serve.metrics import CONTENT_TYPE
from forerun.serve.page_routes import page_routes
from forerun.serve.problems import ApiError, problem_of
from forerun.serve.schema import Endpoint, openapi_body
from forerun.serve.service import ClientGone, Service, unless_gone
from forerun.serve.texts import counted, detokenized, tokenized, tokenizer_info

Handler = Callable[[Request], Awaitable[Response]]
CLIENT_GONE = 499  # nginx's status for a closed connection; only logs see it
DONE = b"data: [DONE]\n\n"
MESSAGES = "/v1/messages"
ROUTE_HINTS = {  # routes of other servers, and the message of the 404 for them
    "/v1/embeddings": "this server generates text and has no embeddings; use a server with an embedding model",
    "/v1/rerank": "this server generates text and does not rank; use a server with a ranking model",
    "/v1/files": "this server does not store files; send prompts in requests",
    "/v1/batches": "this server does not store batches; send many requests at once, which are batched",
    "/v1/complete": "Anthropic's older interface is not served; use /v1/messages",
}
log = logging.getLogger(__name__)


class EventStream(StreamingResponse):
    """Server-sent events: `first`, then those of `rest`, until they end or the client disconnects.

    In every case `rest` is closed afterwards, and `end` is called.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], end: Callable[[], None]) -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            yield first
            async for event in rest:
                yield event

        self.generators = (events(), rest)
        super().__init__(self.generators[0], headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        try:
            await unless_gone(receive, self.stream_response(send))
        except (ClientGone, OSError):
            log.debug("A client disconnected during its stream.")
        finally:
            try:
                for generator in self.generators:
                    await generator.aclose()
            finally:
                self.end()


class HttpRoutes:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Answer a generation request, with a complete body or a stream whose first event exists."""
        entry, raw = await self.open_request(request)
        is_stream = False
        try:
            reply = self.reply(entry, endpoint, raw)
            del raw  # bodies may be long, and many may wait
            response = await unless_gone(request.receive, reply)
            is_stream = isinstance(response, EventStream)
            return response
        finally:
            if not is_stream:
                self.service.gate.leave(entry)

    async def reply(self, entry: OpenRequest, endpoint: Endpoint, raw: bytes) -> Response:
        """Generate the response. An error before the first event is raised, so that it gets its own HTTP status."""
        writer = await self.service.process(raw, partial(self.service.read, entry, endpoint))
        del raw  # bodies may be long, and many may wait
        deltas = self.service.deltas(entry, writer)
        if writer.parsed.stream:
            events = self.events(writer, deltas)
            first = await anext(events)  # if this raises, the generator is closed
            return EventStream(first, events, lambda: self.service.gate.leave(entry))
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        return Response(await self.service.whole(writer), media_type="application/json")

    async def events(self, writer: Writer, deltas: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
        """The encoded events of a stream. An error after the first event is sent as the last event."""
        started = False
        async with aclosing(deltas):
            try:
                async for delta in deltas:
                    for chunk in writer.chunks(delta):
                        yield encode_event(chunk, writer.named)
                        started = True
            except Exception as error:
                if not started:
                    raise
                yield encode_event(writer.failed(self.logged_problem(error)), writer.named)
                return
        for chunk in writer.last_chunks():
            yield encode_event(chunk, writer.named)
        if not writer.named:
            yield DONE

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model."""
        self.tenant(request)
        return json_response({"object": "list", "data": [self.model_object()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: the model, or 404."""
        self.tenant(request)
        self.service.check_model(request.path_params["name"])
        return json_response(self.model_object())

    def model_object(self) -> dict[str, Any]:
        """OpenAI's model object, with the context length and the fingerprint."""
        service, llm = self.service, self.service.llm
        fields = {"id": service.model_name, "object": "model", "created": service.started, "owned_by": "forerun"}
        return fields | {"max_model_len": llm.plan.max_model_len, "system_fingerprint": llm.fingerprint}

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: special tokens and chat template."""
        self.tenant(request)
        return json_response(tokenizer_info(self.service))

    async def tokenizer(self, work: Callable[[Service, dict[str, Any]], dict[str, Any]], request: Request) -> Response:
        """Answer a tokenizer request in another thread; it counts as an open request of its tenant."""
        entry, raw = await self.open_request(request)
        try:
            return json_response(await self.service.process(raw, partial(work, self.service)))
        finally:
            self.service.gate.leave(entry)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine runs."""
        if self.service.front.end is not None:
            raise EngineClosed
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while new requests are accepted."""
        await self.service.require_ready()
        return await self.health(request)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in Prometheus' text format."""
        return Response(await self.service.exposition(), media_type=CONTENT_TYPE)

    def tenant(self, request: Request) -> str:
        """The tenant of a request. Raises ApiError 401 without a valid key."""
        key = request.headers.get("x-api-key")  # sent by Anthropic's clients
        return self.service.keys.tenant(request.headers.get("authorization", key and f"Bearer {key}"))

    async def open_request(self, request: Request) -> tuple[OpenRequest, bytes]:
        """Check a POST request, read its body and admit it at the gate; returns it and its body. Raises ApiError.

        The content type must be JSON: a browser page of another origin cannot send it without a CORS preflight, which
        this server refuses.
        """
        arrived_s = time.perf_counter()
        tenant = self.tenant(request)
        self.service.gate.check(tenant)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be sent with Content-Type: application/json.", code="invalid_type")
        if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
            message = f"a body with Content-Encoding: {shown(coding)} is not supported: send it uncompressed."
            raise ApiError(415, message, code="unsupported_encoding")
        announced_bytes = int(request.headers.get("content-length", 0))
        raw = await self.service.uploads.read(request.stream(), announced_bytes)
        entry = self.service.gate.enter(tenant, arrived_s)
        entry.request_id, entry.traceparent = request.state.request_id, request.headers.get("traceparent", "")
        entry.session_id = request.headers.get("x-session-id", "")
        return entry, raw

    def logged_problem(self, error: BaseException) -> ApiError:
        """The ApiError for any exception; unexpected ones are logged."""
        problem = problem_of(error)
        is_shutdown = isinstance(error, EngineClosed) and self.service.front.closing
        if problem.status >= 500 and not isinstance(error, ApiError) and not is_shutdown:
            # The message of an unexpected error may contain a prompt; its traceback does not.
            is_shown = isinstance(error, ForerunError) or self.service.settings.log_prompts
            text = str(error) if is_shown else type(error).__name__
            trace = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            log.error("A request was answered with %d (%s): %s\n%s", problem.status, problem.code, text, trace)
        return problem

    async def error_response(self, request: Request, error: Exception) -> Response:
        """The response to a request whose handler raised."""
        if isinstance(error, ClientGone | ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = route_problem(request, error)
        problem = self.logged_problem(error)
        request.state.problem = problem.logged  # not the error itself, whose traceback holds the body
        body = message_error(problem) if request.url.path.startswith(MESSAGES) else problem.body
        return json_response(body, problem.status, problem.headers)

    def guarded(self, handler: Handler) -> Handler:
        """A handler that turns every exception into a response, so that no request can stop the server."""

        async def handle(request: Request) -> Response:
            with values_in_json():
                try:
                    return await handler(request)
                except Exception as error:
                    return await self.error_response(request, error)

        return handle


def application(service: Service) -> FastAPI:
    """The FastAPI application of a service."""
    # FastAPI's documentation pages are off because they load scripts from other hosts.
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    routes = HttpRoutes(service)
    table: list[tuple[str, str, Handler, Endpoint | None]] = [
        ("POST", "/v1/completions", partial(routes.answer, "completions"), "completions"),
        ("POST", "/v1/chat/completions", partial(routes.answer, "chat"), "chat"),
        ("POST", "/v1/responses", partial(routes.answer, "responses"), "responses"),
        ("POST", MESSAGES, partial(routes.answer, "messages"), "messages"),
        ("POST", f"{MESSAGES}/count_tokens", partial(routes.tokenizer, counted), "messages"),
        ("POST", "/tokenize", partial(routes.tokenizer, tokenized), "tokenize"),
        ("POST", "/detokenize", partial(routes.tokenizer, detokenized), "detokenize"),
        ("GET", "/tokenizer_info", routes.tokenizer_info, None),
        ("GET", "/v1/models", routes.models, None),
        ("GET", "/v1/models/{name:path}", routes.model, None),
        ("GET", "/health", routes.health, None),
        ("GET", "/ready", routes.ready, None),
        ("GET", "/metrics", routes.metrics, None),
        *(("GET", path, handler, None) for path, handler in page_routes(service)),
    ]
    for method, path, handler, endpoint in table:
        extra, answering = None if endpoint is None else openapi_body(endpoint), routes.guarded(handler)
        app.add_api_route(path, answering, methods=[method], openapi_extra=extra, response_class=Response)
        if method == "GET":  # HEAD gives the headers of GET
            app.add_api_route(path, answering, methods=["HEAD"], include_in_schema=False)

    app.add_exception_handler(HTTPException, routes.error_response)
    app.add_middleware(Envelope, hosts=service.settings.hosts, metrics=service.metrics)
    return app


def route_problem(request: Request, error: HTTPException) -> ApiError:
    """The error for an unknown route or a method that a route does not have."""
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404 and (hint := ROUTE_HINTS.get(request.url.path)) is not None:
        return ApiError(404, f"{route}: {hint}.", code="no_route")
    if error.status_code != 405:
        meant = nearest(request.url.path, [each.path for each in request.app.routes])
        hint = f"did you mean {meant!r}? Otherwise see" if meant else "see"
        return ApiError(error.status_code, f"{route}: {error.detail}; {hint} /openapi.json.", code="no_route")
    allow = (error.headers or {}).get("Allow", "")
    allow = "GET, HEAD" if allow == "GET" else allow
    return ApiError(405, f"{route}: use {allow} here.", code="method_not_allowed", allow=allow)


def encode_event(body: dict[str, Any], named: bool = False) -> bytes:
    """Encode one server-sent event; if `named`, with its type as the event name."""
    name = b"event: " + body["type"].encode() + b"\n" if named else b""
    return name + b"data: " + encode_json(body) + b"\n\n"

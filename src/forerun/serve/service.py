"""Service: runs request bodies through parsing, the gate and the engine, independent of the HTTP layer."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from prometheus_client.registry import Collector

from forerun.accept.delta import Delta
from forerun.async_llm import AsyncLLM
from forerun.engine.sequence import Sequence
from forerun.errors import EngineClosed
from forerun.limits import shown
from forerun.llm import LLM
from forerun.output import Answers
from forerun.serve.access import ApiKeys
from forerun.serve.answers import AnswerWriter, Writer
from forerun.serve.body import parse_json_body
from forerun.serve.envelope import encode_json, encode_json_pieces
from forerun.serve.gate import Gate, OpenRequest
from forerun.serve.logprob_text import TokenTexts
from forerun.serve.message_answers import MessageWriter
from forerun.serve.metrics import EngineReader, Metrics
from forerun.serve.parse import prepare
from forerun.serve.problems import TOO_LONG, ApiError, problem_of
from forerun.serve.records import FINISHED, LEFT, SpanSink, log_request, record_of
from forerun.serve.responses import ResponseWriter
from forerun.serve.schema import Endpoint
from forerun.serve.settings import BODY_S, ServeSettings
from forerun.serve.structured import FORMAT_FIELDS
from forerun.serve.uploads import SerialRunner, Uploads

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
SLOW_FIELDS = ("chat_template", "tools", *FORMAT_FIELDS)
LONG_BODY_BYTES = 1 << 13  # parsing a shorter body is cheap compared with the rest of its request
NUM_SLOW_BODIES = 2  # processed at the same time, each with a process for templates or grammars
QUICK_LOGPROBS = 2000  # encoding this many takes some milliseconds
T = TypeVar("T")
WRITERS: Mapping[Endpoint, Callable[..., Writer]] = {
    "completions": AnswerWriter,
    "chat": AnswerWriter,
    "responses": ResponseWriter,
    "messages": MessageWriter,
}
log = logging.getLogger(__name__)


@runtime_checkable
class Front(Protocol):
    """A service's interface to its engine or engines: `end` is the error that stopped it, None while it runs."""

    end: BaseException | None
    closing: bool

    def close(self) -> None:
        """Stop the engine; unfinished requests get an error."""

    def end_with(self, sequences: Seq[Sequence], error: Exception) -> None:
        """Raise an error in the tasks that read the deltas of these sequences."""


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


class Service:
    """The engine in its thread, the gate, the keys, the metrics and the worker threads of one server.

    The caller owns the LLM and closes it after `close`.
    """

    def __init__(self, llm: LLM, settings: ServeSettings, front: Front | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self.model_name = settings.named(llm.name).served_model_name  # in requests
        self.keys = ApiKeys() if settings.api_keys is None else ApiKeys.read(settings.api_keys)
        places = llm.options.max_num_seqs
        self.gate = Gate(places, places + max(1, places // 4), settings.max_queue)
        self.uploads = Uploads(settings.max_body_bytes, BODY_S)
        self.metrics = Metrics(self.reader())
        self.texts = TokenTexts(llm.tokenizer)
        self.started = int(time.time())
        self.long_bodies = SerialRunner()
        self.slow_bodies = ThreadPoolExecutor(NUM_SLOW_BODIES, "slow bodies")
        self.long_prompts = ThreadPoolExecutor(1, "long prompts")
        self.long_answers = ThreadPoolExecutor(1, "long answers")
        self.front = AsyncLLM(llm) if front is None else front
        self.spans = SpanSink(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None

    def close(self) -> None:
        """Stop the engine's thread; unfinished requests get an error."""
        self.front.close()
        for pool in (self.slow_bodies, self.long_prompts, self.long_answers):
            pool.shutdown(wait=False, cancel_futures=True)
        spans, self.spans = self.spans, None
        if spans is not None:
            spans.close()

    def check_model(self, name: object) -> None:
        """Raise ApiError 404 if a body names another model."""
        if name is not None and name != self.model_name:
            message = f"the model {shown(name)} is not served here: use {shown(self.model_name)}."
            raise ApiError(404, message, code="model_not_found", param="model")

    async def process(self, raw: bytes, task: Callable[[dict[str, Any]], T]) -> T:
        """Parse a body as JSON, check its model name and run a task with it, in other threads.

        Long bodies are processed one at a time. Bodies with templates, tools or grammars, which may take seconds to
        compile or run, are processed in separate threads, so that other bodies do not wait for them.
        """
        is_long, parse = len(raw) > LONG_BODY_BYTES, partial(parse_json_body, raw)
        body = await (self.long_bodies.run(parse) if is_long else asyncio.to_thread(parse))
        self.check_model(body.get("model"))
        is_slow = any(body.get(name) is not None for name in SLOW_FIELDS)
        if not is_slow and not is_long:
            return await asyncio.to_thread(task, body)
        pool = self.slow_bodies if is_slow else self.long_prompts
        return await self.within(pool, partial(contextvars.copy_context().run, task, body))

    def read(self, entry: OpenRequest, endpoint: Endpoint, body: dict[str, Any]) -> Writer:
        """Create the sequences of a body and the writer of its answer, without running them."""
        parsed, answers = prepare(body, endpoint, self.llm, entry.tenant, self.settings)
        if self.settings.log_prompts:
            for request, _ in answers.requests:
                prompt = request.prompt if request.prompt is not None else request.prompt_token_ids
                log.info("%s %r %r", endpoint, prompt, request.sampling_params)
        return WRITERS[endpoint](parsed, answers, self.texts, self.model_name)

    async def whole(self, writer: Writer) -> bytes:
        """The complete answer as JSON.

        Long answers are encoded in another thread, one at a time, since each needs memory for several copies.
        """
        if writer.parsed.num_logprobs <= QUICK_LOGPROBS:
            return encode_json(writer.whole())
        return await self.within(self.long_answers, lambda: b"".join(encode_json_pieces(writer.whole())))

    async def within(self, pool: ThreadPoolExecutor, task: Callable[[], T]) -> T:
        """Run a task in a thread of this pool. Raises EngineClosed if the service is closed first."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, task)
        except (asyncio.CancelledError, RuntimeError) as error:
            if not self.front.closing:
                raise
            raise EngineClosed from error

    async def deltas(self, entry: OpenRequest, writer: Writer) -> AsyncGenerator[Delta, None]:
        """The deltas of an answer, once the gate admits it. Closing the generator cancels its sequences.

        Afterwards the request's record goes to the log and the traces.
        """
        answers, outcome = writer.answers, LEFT
        try:
            with self.limited(entry, answers):
                await self.gate.place(entry, len(answers.sequences))
                async with aclosing(self.follow(entry, answers)) as deltas:
                    async for delta in deltas:
                        answers.add(delta)
                        self.metrics.observe(entry, delta, answers)
                        yield delta
        except Exception as error:
            outcome = problem_of(error).code
            raise
        finally:
            outcome = FINISHED if answers.num_finished == len(answers.sequences) else outcome
            record = record_of(entry, writer, outcome)
            log_request(record)
            if self.spans is not None:
                self.spans.take(record, entry.traceparent)

    def follow(self, entry: OpenRequest, answers: Answers) -> AsyncGenerator[Delta, None]:
        """The deltas of admitted sequences from the engine."""
        assert isinstance(self.front, AsyncLLM), "a service with another front overrides this"
        return self.front.follow(answers.sequences, partial(self.gate.free, entry))

    def reader(self) -> Collector:
        """The Prometheus collector of the engine."""
        return EngineReader(self.llm, self.gate)

    async def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self.metrics.exposition()

    async def require_ready(self) -> None:
        """Raise an error with status 503 if new requests are not accepted."""
        if self.gate.draining:
            raise ApiError(503, "the server is shutting down.", code="shutting_down")
        if self.front.end is not None:
            raise EngineClosed

    @contextmanager
    def limited(self, entry: OpenRequest, answers: Answers) -> Iterator[None]:
        """Context in which the answer ends with ApiError 504 when the request exceeds `request_s`."""
        limit_s = self.settings.request_s
        if limit_s is None:
            yield
            return

        def end() -> None:
            message = f"the request took more than {limit_s:g} seconds, including its time in the queue."
            error = ApiError(504, message, code=TOO_LONG)
            if entry.turn is not None and not entry.turn.done():
                entry.turn.set_exception(error)
            self.front.end_with(answers.sequences, error)

        left_s = limit_s - (time.perf_counter() - entry.entered_s)
        timer = asyncio.get_running_loop().call_later(left_s, end)
        try:
            yield
        finally:
            timer.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects first, the work is cancelled and ClientGone is raised."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        del task, working, watching  # a reference cycle with an error's traceback would keep the body alive


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass

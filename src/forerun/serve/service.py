"""Service: one body on its way from the gate through the engine, whatever the protocol around it."""

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

from forerun.accept.delta import Delta
from forerun.async_llm import AsyncLLM
from forerun.engine.sequence import Sequence
from forerun.errors import EngineClosed
from forerun.limits import shown
from forerun.llm import LLM
from forerun.output import Answers
from forerun.serve.access import ApiKeys
from forerun.serve.answers import AnswerWriter, Writer
from forerun.serve.body import parsed_body
from forerun.serve.envelope import written, written_pieces
from forerun.serve.gate import Gate, OpenRequest
from forerun.serve.logprob_text import TokenTexts
from forerun.serve.message_answers import MessageWriter
from forerun.serve.metrics import EngineReader, MetricReader, Metrics
from forerun.serve.parse import prepared
from forerun.serve.problems import FAULT_OF_SERVER, TOO_LONG, ApiError, problem_of
from forerun.serve.records import FINISHED, LEFT, SpanSink, log_request, record_of
from forerun.serve.responses import ResponseWriter
from forerun.serve.schema import Endpoint
from forerun.serve.settings import BODY_S, ServeSettings, served_name
from forerun.serve.structured import FIELDS_OF_FORM
from forerun.serve.uploads import OneByOne, Uploads

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
SLOW_FIELDS = ("chat_template", "tools", *FIELDS_OF_FORM)
LONG_BODY_BYTES = 1 << 13  # to take a shorter one apart costs less than its request does anyway
NUM_SLOW_BODIES = 2  # that are read at once, each with a process of its own for what it brings
QUICK_LOGPROBS = 2000  # take some milliseconds to write
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
    """What stands between a service and what answers: `end` says why nothing is taken any more, None if it is."""

    end: BaseException | None
    closing: bool

    def close(self) -> None:
        """Stop; whoever still waits is told so."""

    def end_with(self, sequences: Seq[Sequence], error: Exception) -> None:
        """Raise an error to whoever follows these sequences."""


class ClientGone(Exception):
    """The client went away before its answer was complete."""


class Service:
    """Everything that answering needs: the engine in its thread, the gate, the keys and the metrics.

    The LLM belongs to the caller, who closes it after `close`.
    """

    def __init__(self, llm: LLM, settings: ServeSettings, front: Front | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self.keys = ApiKeys() if settings.api_keys is None else ApiKeys.read(settings.api_keys)
        places = llm.options.max_num_seqs
        self.gate = Gate(places, places + max(1, places // 4), settings.max_queue)
        self.uploads = Uploads(settings.max_body_bytes, BODY_S)
        self.metrics = Metrics(self.reader())
        self.texts = TokenTexts(llm.tokenizer)
        self.started = int(time.time())
        self.long_bodies = OneByOne()
        self.slow_bodies = ThreadPoolExecutor(NUM_SLOW_BODIES, "slow bodies")
        self.long_prompts = ThreadPoolExecutor(1, "long prompts")
        self.long_answers = ThreadPoolExecutor(1, "long answers")
        self.front = AsyncLLM(llm) if front is None else front
        self.spans = SpanSink(settings.otlp_endpoint) if settings.otlp_endpoint else None

    @property
    def model_name(self) -> str:
        """The model's name, as bodies give it."""
        return self.settings.model_name or served_name(self.llm.name)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread goes on."""
        return self.front.end is None

    def close(self) -> None:
        """Stop the engine's thread; whoever is still waiting is told so."""
        self.front.close()
        for pool in (self.slow_bodies, self.long_prompts, self.long_answers):
            pool.shutdown(wait=False, cancel_futures=True)
        spans, self.spans = self.spans, None
        if spans is not None:
            spans.close()

    def check_model(self, name: object) -> None:
        """Raise the ApiError for 404 where a body names another model."""
        if name is not None and name != self.model_name:
            message = f"the model {shown(name)} is not served here: it is {shown(self.model_name)}."
            raise ApiError(404, message, code="model_not_found", param="model")

    async def writer(self, visit: OpenRequest, endpoint: Endpoint, raw: bytes) -> Writer:
        """A body, checked and made into sequences, with the writer of its answer; nothing runs yet."""
        body = await self.body(raw)
        return await self.work(body, len(raw), partial(self.read, visit, endpoint, body))

    async def body(self, raw: bytes) -> dict[str, Any]:
        """The JSON object of a body for the model that is served; long ones take time, hence in another thread."""
        parse = partial(parsed_body, raw)
        body = await (self.long_bodies.run(parse) if len(raw) > LONG_BODY_BYTES else asyncio.to_thread(parse))
        self.check_model(body.get("model"))
        return body

    async def work(self, body: Mapping[str, Any], num_bytes: int, task: Callable[[], T]) -> T:
        """What a task gives that reads a body of so many bytes, in another thread: for long ones one after the other.

        Where the body brings what has to be compiled or run, which may take seconds, it is one of few threads that are
        for such bodies alone, so that others do not wait for them.
        """
        is_slow = any(body.get(name) is not None for name in SLOW_FIELDS)
        if not is_slow and num_bytes <= LONG_BODY_BYTES:
            return await asyncio.to_thread(task)
        pool = self.slow_bodies if is_slow else self.long_prompts
        return await self.within(pool, partial(contextvars.copy_context().run, task))

    def read(self, visit: OpenRequest, endpoint: Endpoint, body: dict[str, Any]) -> Writer:
        """The writer of a body's answer, in this thread."""
        asked, answers = prepared(body, endpoint, self.llm, visit.tenant, self.settings)
        if self.settings.log_prompts:
            for request, _ in answers.requests:
                shown = request.prompt if request.prompt is not None else request.prompt_token_ids
                log.info("%s %r %r", endpoint, shown, request.sampling_params)
        return WRITERS[endpoint](asked, answers, self.texts, self.model_name)

    async def whole(self, writer: Writer) -> bytes:
        """The answer to a body that is no stream, in JSON.

        A long one is written in another thread, and one after the other, since while it is it has several forms.
        """
        if writer.asked.num_logprobs <= QUICK_LOGPROBS:
            return written(writer.whole())
        return await self.within(self.long_answers, lambda: b"".join(written_pieces(writer.whole())))

    async def within(self, pool: ThreadPoolExecutor, task: Callable[[], T]) -> T:
        """What a task gives in one of these threads. Raises EngineClosed where the service is closed before."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, task)
        except (asyncio.CancelledError, RuntimeError) as error:
            if not self.front.closing:
                raise
            raise EngineClosed from error

    async def deltas(self, visit: OpenRequest, writer: Writer) -> AsyncGenerator[Delta, None]:
        """The deltas of a prepared body, once it has places. Closing the generator cancels it in the engine."""
        answers = writer.answers
        with self.recorded(visit, writer), self.limited(visit, answers):
            await self.gate.place(visit, len(answers.sequences))
            async with aclosing(self.follow(visit, answers)) as deltas:
                async for delta in deltas:
                    answers.add(delta)
                    self.metrics.see(visit, delta, answers)
                    yield delta

    def follow(self, visit: OpenRequest, answers: Answers) -> AsyncGenerator[Delta, None]:
        """The deltas of sequences that have places, from the engine."""
        assert isinstance(self.front, AsyncLLM), "whoever brings another front follows it"
        return self.front.follow(answers.sequences, partial(self.gate.free, visit))

    def reader(self) -> MetricReader:
        """What reads the engine's metrics."""
        return EngineReader(self.llm, self.gate)

    async def exposition(self) -> bytes:
        """The metrics, as Prometheus reads them."""
        return self.metrics.exposition()

    async def require_ready(self) -> None:
        """Raise the error for 503 where new requests are not taken."""
        if self.gate.draining:
            raise ApiError(503, "the server is shutting down.", code="shutting_down", kind=FAULT_OF_SERVER)
        if not self.alive:
            raise EngineClosed

    @contextmanager
    def recorded(self, visit: OpenRequest, writer: Writer) -> Iterator[None]:
        """Within it a request is answered; its record goes to the log and the traces, however it ends."""
        outcome = LEFT
        try:
            yield
            outcome = FINISHED
        except Exception as error:
            outcome = problem_of(error).code
            raise
        finally:
            answers = writer.answers
            outcome = FINISHED if answers.num_finished == len(answers.sequences) else outcome
            record = record_of(visit, writer, outcome)
            log_request(record)
            if self.spans is not None:
                self.spans.take(record, visit.traceparent)

    @contextmanager
    def limited(self, visit: OpenRequest, answers: Answers) -> Iterator[None]:
        """Within it the answer ends with the ApiError for 504 once the time of a request is over."""
        limit_s = self.settings.request_s
        if limit_s is None:
            yield
            return

        def end() -> None:
            message = f"the request took more than {limit_s:g} seconds, waiting included, and was ended."
            error = ApiError(504, message, code=TOO_LONG, kind=FAULT_OF_SERVER)
            if visit.turn is not None and not visit.turn.done():
                visit.turn.set_exception(error)
            self.front.end_with(answers.sequences, error)

        left_s = limit_s - (time.perf_counter() - visit.entered_s)
        timer = asyncio.get_running_loop().call_later(left_s, end)
        try:
            yield
        finally:
            timer.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What the work gives. If the client goes away first, the work is cancelled and ClientGone is raised."""
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
        del task, working, watching  # an error that holds this frame, and it the error, would keep a whole body


async def gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass

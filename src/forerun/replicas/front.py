"""ReplicaService: a server's service whose engines are replicas.

This file sends requests to replicas, repeats them on another replica after a failure, and merges the metrics of all
replicas. It uses the same HTTP application, gate and answer formats as a server with one engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.accept.delta import Delta, Segment
from forerun.async_llm import DeltaQueue
from forerun.engine.sequence import Sequence
from forerun.errors import AnswerDiffers, EngineClosed, ReplicaLost
from forerun.llm import LLM
from forerun.output import Answers
from forerun.replicas.replica import Call, ReplicaNews
from forerun.replicas.routes import Route
from forerun.request import Request
from forerun.serve.gate import OpenRequest
from forerun.serve.problems import ApiError
from forerun.serve.service import Service
from forerun.serve.settings import ServeSettings

MOST_LOSSES = 5  # lost replicas in a row, after which the request is assumed to be the cause
RETRY_S = 0.1  # until a retry, times the number of failures
log = logging.getLogger(__name__)


@runtime_checkable
class Replicas(Protocol):
    """The interface of a changing set of replicas of one model."""

    def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        """One replica's answer to a call. Raises ReplicaLost if the replica fails before it is complete."""
        ...

    async def readings(self) -> Mapping[str, Seq[Metric]]:
        """The metrics of all reachable replicas, by their names."""
        ...

    async def num_running(self) -> int:
        """The number of replicas that accept requests."""
        ...


@dataclass(eq=False)
class ReplicaFront:
    """Runs requests on replicas; the counterpart of AsyncLLM for one engine.

    If a replica is lost, its open requests are repeated on another one; deltas that were already sent are skipped.
    """

    replicas: Replicas
    end: BaseException | None = None
    closing: bool = False
    outboxes: dict[int, DeltaQueue] = field(default_factory=dict)  # by the first request id of an answer
    num_taken_over: int = 0

    def close(self) -> None:
        """Accept no more requests; open ones get EngineClosed."""
        self.closing, self.end = True, EngineClosed("the server was closed while the request ran.")
        for outbox in self.outboxes.values():
            outbox.put_nowait(EngineClosed("the server was closed while the request ran."))

    def end_with(self, sequences: Seq[Sequence], error: Exception) -> None:
        outbox = self.outboxes.get(sequences[0].request_id)
        if outbox is not None:
            outbox.put_nowait(error)

    async def follow(
        self, answers: Answers, session: str = "", on_finish: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Delta, None]:
        """The deltas of all requests, each run on a replica; closing the generator cancels them.

        `on_finish` is called for each finished sample. The fingerprint of the answers is set to the replica's.
        """
        if self.end is not None:
            raise EngineClosed("the server has shut down.") from self.end
        outbox, key, num_open = DeltaQueue(), answers.sequences[0].request_id, len(answers.sequences)
        self.outboxes[key] = outbox

        def forward_error(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                outbox.put_nowait(error)

        tasks = [
            asyncio.ensure_future(self.run_request(request, samples, session, answers, outbox))
            for request, samples in answers.requests
        ]
        for task in tasks:
            task.add_done_callback(forward_error)
        try:
            while num_open:
                news = await outbox.get()
                if isinstance(news, BaseException):
                    raise news
                if news.finish_reason is not None:
                    num_open -= 1
                    on_finish()
                yield news
        finally:
            del self.outboxes[key]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run_request(
        self, request: Request, samples: Seq[Sequence], session: str, answers: Answers, outbox: DeltaQueue
    ) -> None:
        """Put the deltas of one request into the outbox, from one replica after the other until it is complete."""
        first, readers = samples[0], [SampleReader(sequence) for sequence in samples]
        tokens, params = first.tokens[: first.num_prompt], replace(first.params, seed=first.seed)
        request = replace(request, prompt=None, prompt_token_ids=tuple(tokens), sampling_params=params)
        call = Call(request, Route.of(request.tenant, tokens, session, len(samples)))
        for num_lost in range(1, MOST_LOSSES + 1):
            try:
                await self.read(call, readers, answers, outbox)
                return
            except AnswerDiffers:
                raise
            except ReplicaLost as error:
                log.warning("A request is repeated on another replica: %s", error)
                self.num_taken_over += 1
            await asyncio.sleep(RETRY_S * num_lost)
        message = f"{MOST_LOSSES} replicas in a row were lost while they ran this request, so it is not repeated again"
        raise ReplicaLost(f"{message}: see the server's log; if other requests succeed, change this one.")

    async def read(self, call: Call, readers: Seq[SampleReader], answers: Answers, outbox: DeltaQueue) -> None:
        """Put the new deltas of one replica into the outbox. Raises ReplicaLost if the answer is incomplete."""
        for reader in readers:
            reader.restart()
        called_s = time.perf_counter()
        async with aclosing(self.replicas.answer(call)) as answer:
            async for news in answer:
                if news.problem is not None:
                    raise ApiError(**news.problem)
                answers.fingerprint = news.fingerprint
                for sample, state in news.states.items():
                    sequence = readers[sample].sequence
                    sequence.num_cached, sequence.pace = state.num_cached, state.pace
                    sequence.prompt_logprobs = list(state.prompt_logprobs)
                    sequence.started_s = sequence.started_s or called_s + state.queue_s
                for delta in news.deltas:
                    if (new := readers[delta.sample].take(delta)) is not None:
                        outbox.put_nowait(new)
        if not all(reader.finished for reader in readers):
            raise ReplicaLost("the replica stopped before the answer was complete.")


class ReplicaService(Service, Collector):
    """A service whose engines are replicas in other processes; `llm` is a RemoteLLM of their model.

    It collects their last metrics, each labelled with its replica's name.
    """

    def __init__(self, llm: LLM, settings: ServeSettings, replicas: Replicas) -> None:
        self.replicas, self.replica_front = replicas, ReplicaFront(replicas)
        self.readings: Mapping[str, Seq[Metric]] = {}
        self.num_running = 0
        super().__init__(llm, settings, self.replica_front)

    def follow(self, entry: OpenRequest, answers: Answers) -> AsyncGenerator[Delta, None]:
        return self.replica_front.follow(answers, entry.session_id, partial(self.gate.free, entry))

    def reader(self) -> Collector:
        return self

    def collect(self) -> Iterator[Metric]:
        """The metrics of the last reading."""
        families: dict[str, Metric] = {}
        for replica, metrics in sorted(self.readings.items()):
            for metric in metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels=sample.labels | {"replica": replica}))
        yield from families.values()
        waiting = self.gate.num_waiting
        yield GaugeMetricFamily("forerun:num_requests_queued", "Requests that wait for any replica.", value=waiting)
        yield GaugeMetricFamily("forerun:num_replicas", "Replicas that accept requests.", value=self.num_running)
        text = "Requests that were repeated on another replica after theirs was lost."
        yield CounterMetricFamily("forerun:requests_taken_over", text, value=self.replica_front.num_taken_over)

    async def exposition(self) -> bytes:
        """The metrics of all replicas, and of this server."""
        self.readings, self.num_running = await asyncio.gather(self.replicas.readings(), self.replicas.num_running())
        return await super().exposition()

    async def require_ready(self) -> None:
        """Raise an error with status 503 if new requests are not accepted, or no replica is running."""
        await super().require_ready()
        if not await self.replicas.num_running():
            message = "no replica is running: wait until one has started; if none does, see the server's log."
            raise ApiError(503, message, code="no_replica", retry_s=1)


@dataclass(slots=True)
class SampleReader:
    """One sample's answer: the part sent to the client (in `sequence`), and the position in the replica's answer.

    After a failure another replica generates the same tokens again, since an answer is a function of prompt, parameters
    and seed; the part that was already sent is skipped. It may end inside a delta, since rounds may differ.
    """

    sequence: Sequence
    num_characters: int = 0  # sent to the client
    finished: bool = False
    at_token: int = 0  # position in the current replica's answer
    at_character: int = 0

    def restart(self) -> None:
        """Start reading the answer of another replica, from its beginning."""
        self.at_token = self.at_character = 0

    def take(self, delta: Delta) -> Delta | None:
        """The new part of a replica's delta, with this sequence's ids; None if nothing is new. Extends the sequence.

        Raises AnswerDiffers if the replica generates other tokens than those already sent.
        """
        sent = self.sequence.tokens[self.sequence.num_prompt + self.at_token :][: len(delta.token_ids)]
        if tuple(sent) != delta.token_ids[: len(sent)]:
            raise AnswerDiffers(
                "the request's replica was lost, and another one generates different tokens: repeat the request. "
                "Replicas generate the same tokens if their fingerprints are equal and verification is coupled."
            )
        skipped = min(len(delta.text), self.num_characters - self.at_character)
        self.at_token += len(delta.token_ids)
        self.at_character += len(delta.text)
        is_new = not sent and not skipped
        new = delta if is_new else remainder(delta, len(sent), skipped)
        if self.finished or not (is_new or new.token_ids or new.segments or new.finish_reason):
            return None
        self.num_characters += len(new.text)
        self.finished = new.finish_reason is not None
        self.sequence.extend(len(self.sequence.tokens), new.token_ids, new.origins)
        outcome = None if new.outcome is None else new.outcome._replace(seq_id=self.sequence.id)
        return new._replace(request_id=self.sequence.request_id, seq_id=self.sequence.id, outcome=outcome)


def remainder(delta: Delta, num_tokens: int, num_characters: int) -> Delta:
    """A delta without its first tokens and characters, and without its round's outcome."""
    return delta._replace(
        token_ids=delta.token_ids[num_tokens:],
        origins=delta.origins[num_tokens:],
        logprobs=delta.logprobs[num_tokens:],
        segments=tuple(skip_characters(delta.segments, num_characters)),
        outcome=None,
        draft=None,
    )


def skip_characters(segments: Seq[Segment], number: int) -> Iterator[Segment]:
    """The segments without their first `number` characters."""
    for segment in segments:
        if number < len(segment.text):
            yield replace(segment, text=segment.text[number:])
        number = max(0, number - len(segment.text))

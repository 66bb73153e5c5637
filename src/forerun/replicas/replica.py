"""Replica: an engine that answers calls from a server in another process, and the server's view of its model.

The messages between the two processes are a Call, and the ReplicaNews of its answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from prometheus_client.core import Metric

from forerun.accept.delta import Delta
from forerun.accept.outcome import LiveGain, Stats
from forerun.async_llm import AsyncLLM
from forerun.config import EngineOptions
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.errors import EngineClosed, ForerunError
from forerun.llm import LLM
from forerun.replicas.routes import Route
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
from forerun.serve.gate import Gate
from forerun.serve.metrics import EngineReader
from forerun.serve.problems import problem_of

MODEL_FIELDS = ("name", "draft_name", "fingerprint", "format", "kernels", "measured", "plan", "forecasts", "tokenizer")
LOCAL_FIELDS = ("request_ids", "seq_ids", "matchers")  # fields of a RequestChecker that each process creates
PAUSE_S = 0.005  # deltas of this period are sent together, since each message takes half a millisecond
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A request with token ids as prompt and a fixed seed, and its route."""

    request: Request
    route: Route


@dataclass(frozen=True, slots=True)
class SampleState:
    """The state of a sample that its deltas do not contain; `queue_s`: its seconds in the queue for the batch."""

    num_cached: int | None
    queue_s: float
    prompt_logprobs: Seq[TokenLogprobs]
    pace: LiveGain

    @classmethod
    def of(cls, sequence: Sequence, arrived_s: float) -> SampleState:
        """The state of a sequence that arrived at `arrived_s`."""
        queue_s = 0.0 if sequence.started_s is None else max(0.0, sequence.started_s - arrived_s)
        return cls(sequence.num_cached, queue_s, tuple(sequence.prompt_logprobs), sequence.pace)


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """The next deltas of an answer, with the states of samples that started or finished in them.

    `problem`: the arguments of the ApiError that ended the request.
    """

    fingerprint: str
    deltas: Seq[Delta] = ()
    states: Mapping[int, SampleState] = field(default_factory=dict)
    problem: Mapping[str, Any] | None = None


class RemoteLLM(LLM):
    """A model without weights whose replicas run in other processes: it checks requests and tokenizes like an LLM.

    It is created from a replica's `description` and the maximum number of replicas.
    """

    def __init__(self, description: Mapping[str, Any], num_replicas: int) -> None:
        vars(self).update({name: description[name] for name in MODEL_FIELDS})
        self.generation_defaults = description["generation_defaults"]
        options: EngineOptions = description["options"]
        self.summed_options = replace(options, max_num_seqs=options.max_num_seqs * num_replicas)
        self.requests, self._stats = RequestChecker(**description["checker"]), Stats()

    def __repr__(self) -> str:
        return f"RemoteLLM({self.name!r}, fingerprint={self.fingerprint!r})"

    @property
    def options(self) -> EngineOptions:
        """The engine options, with `max_num_seqs` summed over all replicas."""
        return self.summed_options

    def close(self) -> None:
        """No effect: the models belong to the replicas."""


class Replica:
    """An engine that answers calls; `name` identifies it in metrics."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.name = llm, name
        self.front = AsyncLLM(llm)
        self.metrics = EngineReader(llm, Gate(0, 0, 0))

    def description(self) -> dict[str, Any]:
        """The description from which a RemoteLLM is created."""
        llm, checker = self.llm, self.llm.requests
        values = {each.name: getattr(checker, each.name) for each in fields(checker) if each.name not in LOCAL_FIELDS}
        known = {name: getattr(llm, name) for name in (*MODEL_FIELDS, "generation_defaults", "options")}
        return known | {"checker": values}

    def reading(self) -> tuple[str, list[Metric]]:
        """The replica's name and its current metrics."""
        return self.name, list(self.metrics.collect())

    def check_health(self) -> None:
        """Raise EngineClosed if the engine has stopped."""
        if self.front.end is not None:
            raise EngineClosed(f"the engine of replica {self.name} has stopped.") from self.front.end

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        """The answer to a call; closing the generator cancels it. Raises EngineClosed if the engine has stopped."""
        arrived_s, started = time.perf_counter(), set[int]()
        try:
            sequences = await asyncio.to_thread(self.llm.requests.sequences, call.request)
            async with aclosing(self.front.follow(sequences)) as deltas, aclosing(in_batches(deltas)) as lists:
                async for each in lists:
                    changed = {delta.sample for delta in each if delta.sample not in started or delta.finish_reason}
                    started |= changed
                    states = {sample: SampleState.of(sequences[sample], arrived_s) for sample in changed}
                    yield ReplicaNews(self.llm.fingerprint, each, states)
        except EngineClosed:
            raise
        except ForerunError as error:
            problem = problem_of(error)
            if problem.status >= 500:
                log.error("A request failed: %s", error)
            arguments = {name: getattr(problem, name) for name in ("status", "message", "code", "param", "kind")}
            yield ReplicaNews(self.llm.fingerprint, problem=arguments)


async def in_batches(items: AsyncGenerator[T, None]) -> AsyncGenerator[list[T], None]:
    """The items in lists: the first item at once, then those of each period of PAUSE_S together."""
    pending, changed = list[T](), asyncio.Event()

    async def collect() -> None:
        async for item in items:
            pending.append(item)
            changed.set()

    task = asyncio.ensure_future(collect())
    task.add_done_callback(lambda _: changed.set())
    try:
        while not task.done() or pending:
            await changed.wait()
            if pending:
                batch = list(pending)
                pending.clear()
                yield batch
                await asyncio.wait([task], timeout=PAUSE_S)
            if not task.done() and not pending:
                changed.clear()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Replica: one engine that answers for a server in another process; and what that server has to know of its model.

What goes between the two processes is defined here: a Call, and the ReplicaNews of its answer.
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

KNOWN = ("name", "draft_name", "fingerprint", "format", "kernels", "measured", "plan", "forecasts", "tokenizer")
DRAWN = ("request_ids", "seq_ids", "matchers")  # of a RequestChecker, which each process has for itself
PAUSE_S = 0.005  # in which deltas are gathered behind the first: each message takes half a millisecond
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A request whose prompt is token ids and whose seed is there, and what it is routed by."""

    request: Request
    route: Route


@dataclass(frozen=True, slots=True)
class SampleState:
    """What is known of a sample beside its deltas; `queue_s` is how long it waited for a place in the batch."""

    num_cached: int | None
    queue_s: float
    prompt_logprobs: Seq[TokenLogprobs]
    pace: LiveGain

    @classmethod
    def of(cls, sequence: Sequence, came_s: float) -> SampleState:
        """The state of a sequence that came at `came_s`."""
        queue_s = 0.0 if sequence.started_s is None else max(0.0, sequence.started_s - came_s)
        return cls(sequence.num_cached, queue_s, tuple(sequence.prompt_logprobs), sequence.pace)


@dataclass(frozen=True, slots=True)
class ReplicaNews:
    """The next deltas of an answer, with the states of the samples that began or ended in them.

    `problem` is what ended the request instead: the arguments of an ApiError.
    """

    replica: str
    fingerprint: str
    deltas: Seq[Delta] = ()
    states: Mapping[int, SampleState] = field(default_factory=dict)
    problem: Mapping[str, Any] | None = None


class RemoteLLM(LLM):
    """A model whose replicas run elsewhere: it checks requests and reads texts like an LLM, and has no weights.

    `num_replicas` of them answer at once, at most.
    """

    def __init__(self, described: Mapping[str, Any], num_replicas: int) -> None:
        vars(self).update({name: described[name] for name in KNOWN})
        self.generation_defaults = described["generation_defaults"]
        options: EngineOptions = described["options"]
        self.of_all = replace(options, max_num_seqs=options.max_num_seqs * num_replicas)
        self.requests, self._stats = RequestChecker(**described["checker"]), Stats()

    def __repr__(self) -> str:
        return f"RemoteLLM({self.name!r}, fingerprint={self.fingerprint!r})"

    @property
    def options(self) -> EngineOptions:
        """How the engines batch and verify, with the sequences of all of them together."""
        return self.of_all

    def close(self) -> None:
        """Nothing: the models belong to the replicas."""


class Replica:
    """An engine that answers calls. `name` tells it from others in metrics."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.name = llm, name
        self.front = AsyncLLM(llm)
        self.metrics = EngineReader(llm, Gate(0, 0, 0))

    def described(self) -> dict[str, Any]:
        """What a RemoteLLM is made of."""
        llm, checker = self.llm, self.llm.requests
        values = {each.name: getattr(checker, each.name) for each in fields(checker) if each.name not in DRAWN}
        known = {name: getattr(llm, name) for name in (*KNOWN, "generation_defaults", "options")}
        return known | {"checker": values}

    def reading(self) -> tuple[str, list[Metric]]:
        """The name, and the metrics of the moment."""
        return self.name, list(self.metrics.collect())

    def check_health(self) -> None:
        """Raise the reason if the engine does not go on."""
        if self.front.end is not None:
            raise EngineClosed(f"the engine of replica {self.name} has stopped.") from self.front.end

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        """The answer to a call; closing the generator cancels it. Raises EngineClosed where another has to answer."""
        came_s, begun = time.perf_counter(), set[int]()
        try:
            sequences = await asyncio.to_thread(self.llm.requests.sequences, call.request)
            async with aclosing(self.front.follow(sequences)) as deltas, aclosing(gathered(deltas)) as lists:
                async for each in lists:
                    changed = {delta.sample for delta in each if delta.sample not in begun or delta.finish_reason}
                    begun |= changed
                    states = {sample: SampleState.of(sequences[sample], came_s) for sample in changed}
                    yield ReplicaNews(self.name, self.llm.fingerprint, each, states)
        except EngineClosed:
            raise
        except ForerunError as error:
            problem = problem_of(error)
            if problem.status >= 500:
                log.error("A request failed: %s", error)
            arguments = {name: getattr(problem, name) for name in ("status", "message", "code", "param", "kind")}
            yield ReplicaNews(self.name, self.llm.fingerprint, problem=arguments)


async def gathered(items: AsyncGenerator[T, None]) -> AsyncGenerator[list[T], None]:
    """The items in lists: the first as soon as it is there, and then those of PAUSE_S together."""
    there, bell = list[T](), asyncio.Event()

    async def gather() -> None:
        async for item in items:
            there.append(item)
            bell.set()

    task = asyncio.ensure_future(gather())
    task.add_done_callback(lambda _: bell.set())
    try:
        while not task.done() or there:
            await bell.wait()
            if there:
                taken = list(there)
                there.clear()
                yield taken
                await asyncio.wait([task], timeout=PAUSE_S)
            if not task.done() and not there:
                bell.clear()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""SharedBatch: runs many requests on replicas, for callers without an event loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from forerun.accept.delta import Delta
from forerun.engine.sequence import Sequence
from forerun.errors import AnswerDiffers
from forerun.output import Answers
from forerun.replicas.front import ReplicaFront, Replicas
from forerun.replicas.replica import RemoteLLM
from forerun.request import Request

STEP_S = 0.2  # maximum wait of a step, so that Ctrl-C takes effect


class SharedBatch:
    """Open requests on replicas of the model `llm`. Deltas are received only while a step waits.

    If a replica is lost, its requests are repeated on another one. Speculation is counted in the model's stats.
    """

    def __init__(self, llm: RemoteLLM, replicas: Replicas) -> None:
        self.llm, self.front = llm, ReplicaFront(replicas)
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[int, asyncio.Task[None]] = {}  # by request id
        self.deltas: list[Delta] = []
        self.error: BaseException | None = None
        self.changed = asyncio.Event()  # set when there is a delta, or a request has ended

    def submit(self, sequence: Sequence) -> None:
        """Start a request of one sample."""
        key, request = sequence.request_id, Request(sampling_params=sequence.params, speculation=sequence.speculation)
        task = self.tasks[key] = self.loop.create_task(self.collect(Answers([(request, [sequence])], "")))

        def on_end(task: asyncio.Task[None]) -> None:
            self.tasks.pop(key, None)
            if not task.cancelled():
                self.error = self.error or task.exception()
            self.changed.set()

        task.add_done_callback(on_end)

    async def collect(self, answers: Answers) -> None:
        """Collect the deltas of a request until it is complete."""
        async with aclosing(self.front.follow(answers)) as deltas:
            async for delta in deltas:
                if answers.fingerprint != self.llm.fingerprint:
                    raise AnswerDiffers(
                        f"a replica has the fingerprint {answers.fingerprint} and others have {self.llm.fingerprint}, "
                        "so that answers may differ: run all replicas on machines of one kind."
                    )
                if delta.outcome is not None:
                    self.llm.stats.count(delta.outcome)
                self.deltas.append(delta)
                self.changed.set()
        for sequence in answers.sequences:
            self.llm.stats.pace.join(sequence.pace)

    def step(self) -> list[Delta]:
        """The deltas since the last step, after waiting up to STEP_S. If there are none, raises a request's error."""
        self.loop.run_until_complete(self.wait())
        if self.error is not None and not self.deltas:
            raise self.error
        deltas, self.deltas = self.deltas, []
        return deltas

    async def wait(self) -> None:
        """Wait until there are deltas or an error, at most STEP_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                await self.changed.wait()
        self.changed.clear()

    def cancel(self, request_id: int) -> None:
        task = self.tasks.get(request_id)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all open requests."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

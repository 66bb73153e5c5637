"""SharedBatch: many requests at once, shared among replicas, for programs that have no event loop of their own."""

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

STEP_S = 0.2  # that a step waits for deltas, so that Ctrl-C is noticed


class SharedBatch:
    """Requests under way in replicas of a model, which is `llm`. They go on while a step waits.

    A request whose replica is lost is answered by another one. Guesses and rounds are counted in the model's stats.
    """

    def __init__(self, llm: RemoteLLM, replicas: Replicas) -> None:
        self.llm, self.front = llm, ReplicaFront(replicas)
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[int, asyncio.Task[None]] = {}  # by request
        self.deltas: list[Delta] = []
        self.error: BaseException | None = None
        self.bell = asyncio.Event()

    def submit(self, sequence: Sequence) -> None:
        """Begin with a request of one sample."""
        key, request = sequence.request_id, Request(sampling_params=sequence.params, speculation=sequence.speculation)
        task = self.tasks[key] = self.loop.create_task(self.attend(Answers([(request, [sequence])], "")))

        def over(task: asyncio.Task[None]) -> None:
            self.tasks.pop(key, None)
            if not task.cancelled():
                self.error = self.error or task.exception()
            self.bell.set()

        task.add_done_callback(over)

    async def attend(self, answers: Answers) -> None:
        """Gather the deltas of a request until it is answered."""
        async with aclosing(self.front.follow(answers)) as deltas:
            async for delta in deltas:
                if answers.fingerprint != self.llm.fingerprint:
                    raise AnswerDiffers(
                        f"a replica has the fingerprint {answers.fingerprint} and others have {self.llm.fingerprint}: "
                        "answers of one file come from replicas on machines of one kind."
                    )
                if delta.outcome is not None:
                    self.llm.stats.count(delta.outcome)
                self.deltas.append(delta)
                self.bell.set()
        for sequence in answers.sequences:
            self.llm.stats.pace.join(sequence.pace)

    def step(self) -> list[Delta]:
        """The deltas that came since the last step, or come soon. Raises what ended a request, behind all deltas."""
        self.loop.run_until_complete(self.wait())
        if self.error is not None and not self.deltas:
            raise self.error
        deltas, self.deltas = self.deltas, []
        return deltas

    async def wait(self) -> None:
        """Wait until there is something to tell, and not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_S):
                await self.bell.wait()
        self.bell.clear()

    def cancel(self, request_id: int) -> None:
        """End a request that was submitted."""
        task = self.tasks.get(request_id)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """End all requests that are under way."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

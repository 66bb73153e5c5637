"""AsyncLLM: the front door for event loops, over an engine in a thread of its own.

This file decides who may use the engine: only its thread, which takes jobs from one queue and puts deltas into one
outbox per request.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from forerun.engine.delta import Delta
from forerun.engine.sequence import Sequence
from forerun.errors import EngineClosed
from forerun.llm import LLM
from forerun.messages import ChatOptions, Conversation
from forerun.output import RequestOutput
from forerun.request import Prompt, Request, Wish
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer


class AsyncLLM:
    """Many requests at once from event loops: the engine runs in a thread of its own and batches them.

    Use it as `async with AsyncLLM(llm) as front:`, or call `close`; later requests raise EngineClosed. The LLM must not
    be used at the same time. An error in a request's own code is raised to that request; one of the engine itself ends
    it and is raised to every request under way.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.outboxes: dict[int, Outbox] = {}
        self.end: BaseException | None = None  # why nothing joins any more
        self.gate = threading.Lock()
        self.thread = threading.Thread(target=self.run, name="forerun-engine", daemon=True)
        self.thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the engine's thread; requests under way get EngineClosed."""
        self.inbox.put(None)
        self.thread.join()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Wish = None,
        tenant: str = "",
    ) -> AsyncIterator[Delta]:
        """One request's deltas, one per round and sample. Leaving the loop early cancels the request."""
        sequences = self.llm.requests.sequences(Request.of(prompt, sampling_params, speculation, tenant))
        async with aclosing(self.follow(sequences)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Wish = None,
        tenant: str = "",
    ) -> RequestOutput:
        """One request's answer, once all its samples are finished."""
        answers = self.llm.ask([Request.of(prompt, sampling_params, speculation, tenant)])
        async for delta in self.follow(answers.sequences):
            answers.add(delta)
        return answers.outputs()[0]

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculation: Wish = None,
        tenant: str = "",
    ) -> RequestOutput:
        """The answer to one conversation; the options of the template are those of ChatOptions."""
        options = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs or {}
        )
        prompt = self.llm.chat_prompt(messages, options)
        return await self.generate(prompt, sampling_params, speculation=speculation, tenant=tenant)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any."""
        return self.llm.get_default_sampling_params()

    async def follow(self, sequences: Seq[Sequence]) -> AsyncGenerator[Delta, None]:
        """Give sequences to the engine's thread and yield their deltas."""
        request_id, num_open = sequences[0].request_id, len(sequences)
        outbox = Outbox(asyncio.get_running_loop(), asyncio.Queue())
        with self.gate:
            if self.end is not None:
                raise EngineClosed("this AsyncLLM has shut down; build a new one.") from self.end
            self.inbox.put(lambda: self.join(sequences, outbox))
        try:
            while num_open:
                news = await outbox.news.get()
                if isinstance(news, BaseException):
                    raise news
                if news.error is not None:
                    raise news.error
                num_open -= news.finish_reason is not None
                yield news
        finally:
            self.inbox.put(lambda: self.part(request_id))

    def join(self, sequences: Seq[Sequence], outbox: Outbox) -> None:
        """A request enters the engine. In its thread."""
        self.outboxes[sequences[0].request_id] = outbox
        for sequence in sequences:
            self.llm.engine.submit(sequence)

    def part(self, request_id: int) -> None:
        """A request leaves the engine, finished or not. In its thread."""
        self.outboxes.pop(request_id, None)
        self.llm.engine.cancel(request_id)

    def run(self) -> None:
        """The engine's thread: take what came in, step, hand out, until told to stop."""
        end: BaseException = EngineClosed("this AsyncLLM was closed while the request ran.")
        try:
            while self.take_in():
                for delta in self.llm.engine.step():
                    self.outboxes[delta.request_id].put(delta)
        except BaseException as error:  # the thread has no caller: those who wait are told instead
            end = error
        with self.gate:
            self.end = end  # nothing joins from here on
        while not self.inbox.empty():
            if (job := self.inbox.get()) is not None:
                job()  # what came too late is told of the end with the others
        for request_id, outbox in list(self.outboxes.items()):
            self.part(request_id)
            outbox.put(end)

    def take_in(self) -> bool:
        """Run the jobs in the queue, waiting for one where there is no other work; False to stop."""
        while not self.inbox.empty() or not self.llm.engine.has_work:
            job = self.inbox.get()
            if job is None:
                return False
            job()
        return True


@dataclass(frozen=True, slots=True)
class Outbox:
    """Where a request's deltas go: a queue of the event loop that waits for them."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[Delta | BaseException]

    def put(self, news: Delta | BaseException) -> None:
        """Put a delta or an error from the engine's thread; a closed loop gets nothing."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)

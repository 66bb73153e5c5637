"""AsyncLLM: the interface for event loops, with the engine in a separate thread.

That thread steps the engine, in turn with other threads (`engine/driver.py`), and puts deltas into one outbox per
request. An event loop is woken once per round for all its deltas: each wake-up takes the interpreter lock, and the
engine waits for it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from forerun.accept.delta import Delta
from forerun.ecosystem import REQUEST_WORDS, check_words
from forerun.engine.driver import DeltaReader, Inbox
from forerun.engine.sequence import Sequence
from forerun.errors import EngineClosed
from forerun.guard import attempt
from forerun.kernels.threads import end_idle_threads
from forerun.llm import LLM, Uncopyable
from forerun.output import RequestOutput
from forerun.request import ChatOptions, Conversation, Prompt, Request, SpeculationOption
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer


class AsyncLLM(Uncopyable):
    """Many requests at once from event loops: the engine runs in a separate thread and batches them.

    Use it as `async with AsyncLLM(llm) as front:`, or call `close`; later requests raise EngineClosed. The LLM may be
    used at the same time. An error in a request's own code is raised to that request alone, even an exit or a
    cancellation; an error of the engine is raised to the requests whose rounds fail (RoundFailed). If the engine cannot
    continue at all, the reason is raised to every running request. No request is left waiting.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.bell: Inbox = queue.SimpleQueue()  # gets None when there is work
        self.closing = False
        self.outboxes: dict[int, Outbox] = {}  # by the id of their first request
        self.unsent: deque[tuple[Outbox, Delta | BaseException]] = deque()
        self.end: BaseException | None = None  # why no further requests are accepted
        self.gate = threading.Lock()
        weak, bell = weakref.ref(self, lambda _: bell.put(None)), self.bell
        self.thread = threading.Thread(target=run, args=(weak, bell), name="forerun-engine", daemon=True)
        end_idle_threads()  # of this thread, if it has loaded the model
        self.thread.start()

    def __repr__(self) -> str:
        state = "" if self.end is None else ", closed"
        return f"AsyncLLM({self.llm!r}{state})"

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the engine's thread; running requests raise EngineClosed."""
        self.closing = True
        self.bell.put(None)
        self.thread.join()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: SpeculationOption = None,
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
        speculation: SpeculationOption = None,
        tenant: str = "",
        **words: object,
    ) -> RequestOutput:
        """One request's answer, when all its samples are finished."""
        check_words(words, AsyncLLM.generate, REQUEST_WORDS)
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
        speculation: SpeculationOption = None,
        tenant: str = "",
        **words: object,
    ) -> RequestOutput:
        """The answer to one conversation; the template options are those of ChatOptions."""
        check_words(words, AsyncLLM.chat, REQUEST_WORDS)
        options = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs or {}
        )
        prompt = await asyncio.to_thread(self.llm.chat_prompt, messages, options)  # templates may take seconds
        return await self.generate(prompt, sampling_params, speculation=speculation, tenant=tenant)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of requests without any."""
        return self.llm.get_default_sampling_params()

    async def follow(
        self, sequences: Seq[Sequence], on_finish: Callable[[], None] | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Give the sequences of one or more requests to the engine's thread and yield their deltas.

        They are cancelled together when the generator is closed, or when one of them fails. `on_finish` is called in
        the event loop for each sequence that the engine has finished, even if its deltas are still unread.
        """
        reader, key = DeltaReader(sequences), sequences[0].request_id
        request_ids = frozenset(sequence.request_id for sequence in sequences)
        outbox = Outbox(asyncio.get_running_loop(), DeltaQueue(), key, request_ids, on_finish or (lambda: None))
        with self.gate:
            if self.end is not None or not self.thread.is_alive():  # a forked process lacks the thread
                raise EngineClosed("this AsyncLLM has shut down; create a new one.") from self.end
            self.outboxes[key] = outbox
            self.llm.driver.submit(sequences, lambda delta: self.unsent.append((outbox, delta)))
        self.bell.put(None)
        try:
            while reader.num_open:
                item = await outbox.queue.get()
                if isinstance(item, BaseException):
                    raise item
                if reader.accepts(item):
                    yield item
        finally:
            self.remove(key)

    def end_with(self, sequences: Seq[Sequence], error: Exception) -> None:
        outbox = self.outboxes.get(sequences[0].request_id)
        if outbox is not None:
            self.send([(outbox, error)])

    def remove(self, key: int) -> None:
        """Cancel the unfinished requests of an outbox, and remove it."""
        outbox = self.outboxes.pop(key, None)
        if outbox is not None:
            self.llm.driver.jobs.append(self.llm.driver.cancel_job(outbox.request_ids))
            self.bell.put(None)

    def work(self) -> bool:
        """Run rounds while the engine has work. False, after `shut`, if it was closed or the engine cannot continue."""
        error = attempt(self.drive)
        if error is None and not self.closing:
            return True
        self.shut(error or EngineClosed("this AsyncLLM was closed while the request ran."))
        return False

    def drive(self) -> None:
        """Run jobs and rounds until there are none, or until it is closed."""
        driver = self.llm.driver
        # `unsent` last: it is filled by the others
        while not self.closing and (driver.jobs or driver.engine.has_work or self.unsent):
            if not driver.drive():
                driver.wait(self.bell)
            self.send([self.unsent.popleft() for _ in range(len(self.unsent))])

    def send(self, items: Seq[tuple[Outbox, Delta | BaseException]]) -> None:
        """Put deltas and errors into their outboxes, in their event loops. Requests of closed loops are cancelled."""
        by_loop = defaultdict(list)
        for outbox, item in items:
            by_loop[outbox.loop].append((outbox, item))
        for loop, items_of_loop in by_loop.items():
            try:
                loop.call_soon_threadsafe(receive_all, items_of_loop)
            except RuntimeError:
                for outbox, _ in items_of_loop:
                    self.remove(outbox.key)

    def shut(self, end: BaseException) -> None:
        """Refuse further requests and raise the reason to running ones, before anything else that may raise."""
        with self.gate:
            self.end, outboxes = end, dict(self.outboxes)
        self.send([*self.unsent, *((outbox, end) for outbox in outboxes.values())])
        for key in outboxes:
            self.remove(key)
        self.llm.driver.drive(rounds=False)


def run(weak: weakref.ref[AsyncLLM], bell: Inbox) -> None:
    """The engine's thread: work whenever the bell rings, until the AsyncLLM has ended or nothing refers to it.

    While it waits it has no reference to the AsyncLLM, which would keep the model in memory.
    """
    while (front := weak()) is not None and front.work():
        del front
        bell.get()


class DeltaQueue(asyncio.Queue[Delta | BaseException]):
    """The pending deltas of one reader in an event loop. Reading yields to other tasks even if deltas are pending."""

    async def get(self) -> Delta | BaseException:
        """Wait for the next delta or error."""
        if not self.empty():
            await asyncio.sleep(0)
        return await super().get()


@dataclass(frozen=True, slots=True)
class Outbox:
    """The destination of some requests' deltas: a queue of the event loop that reads them."""

    loop: asyncio.AbstractEventLoop
    queue: DeltaQueue
    key: int  # the id of the first request
    request_ids: frozenset[int]
    on_finish: Callable[[], None]
    finished: set[int] = field(default_factory=set)  # ids of sequences

    def receive(self, item: Delta | BaseException) -> None:
        """Receive a delta or an error, in the event loop."""
        self.queue.put_nowait(item)
        if isinstance(item, Delta) and item.finish_reason is not None and item.seq_id not in self.finished:
            self.finished.add(item.seq_id)  # after an interrupt the last delta may come twice
            self.on_finish()


def receive_all(items: Seq[tuple[Outbox, Delta | BaseException]]) -> None:
    """Receive items for outboxes of one event loop, in that loop."""
    for outbox, item in items:
        outbox.receive(item)

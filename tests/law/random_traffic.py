"""Random requests in a cache that may be too small for all of them; each answer equals that of plain decoding, alone.

Conversations go on, prompts come again and have several samples, under two tenants; requests are cancelled, and
sequences preempted.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from forerun.accept.delta import Delta
from forerun.config import EngineOptions, Speculation
from forerun.engine.sequence import Sequence
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from kit.texts import story
from law.fuzz import Bench

SYSTEM = story(150, 1)
NO_SHARING = ("documented:taps", "mtp-of-3")  # drafters that are shown the states of all tokens
STATIC = Speculation(tree=StaticTree([[0], [1], [0, 0]]))


@dataclass(slots=True)
class Received:
    """What a client received of a sample: its deltas together, and its end."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[object, ...] = ()

    def add(self, delta: Delta) -> None:
        """Append a delta; of an error its type counts, since its message may name a request."""
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.end = (delta.finish_reason, delta.stop_reason, type(delta.error))


@dataclass(slots=True)
class LiveText:
    """An unfinished sample, and the same sample decoded plainly, alone and without a prefix cache."""

    sample: Sequence
    alone: Sequence
    expected: Received
    received: Received = field(default_factory=Received)

    def assert_plain(self) -> None:
        """Assert that the sample equals the one decoded alone, to the bit."""
        assert self.sample.tokens == self.alone.tokens, self.sample.params
        assert self.received == self.expected, self.sample.params
        assert self.sample.prompt_logprobs == self.alone.prompt_logprobs, self.sample.params


class Traffic:
    """Requests with common prefixes, to an engine with cache for a few. The caller sets the engine's drafter."""

    def __init__(self, bench: Bench, num_tokens: int, seed: int, options: EngineOptions) -> None:
        self.bench, self.rng, self.requests = bench, random.Random(seed), bench.requests()
        self.engine = bench.engine(None, num_tokens, options=options)
        self.plain = bench.engine(None, 1024, options=EngineOptions(1, 512, prefix_cache=False))
        self.live: dict[int, LiveText] = {}
        self.past = {"a": [SYSTEM], "b": [SYSTEM]}
        self.counts = Counter[str]()

    def prompt(self, tenant: str) -> list[int]:
        """The system prompt or a part of an earlier conversation, perhaps followed by new text."""
        begun = self.rng.choice(self.past[tenant])
        if self.rng.random() < 0.4:
            begun = begun[: self.rng.randint(1, len(begun))]
        new = story(self.rng.choice([1, 1, 20, 70]), self.rng.randrange(1000))[1:]
        return [*begun, *new][:220]

    def request(self) -> Request:
        """Any request, at any temperature, to be drafted in any shape."""
        rng, tenant = self.rng, self.rng.choice("aab")
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            max_tokens=rng.randrange(1, 40),
            n=rng.choice([1, 1, 3]),
            seed=rng.randrange(1000),
            logprobs=2,
            prompt_logprobs=rng.choice([None, None, None, 2]),
            ignore_eos=True,
        )
        shape = Speculation(rng.randrange(8), rng.choice([1, 1, 3]), rng.randrange(1, 12))
        return Request.of(self.prompt(tenant), params, rng.choice([shape, shape, STATIC]), tenant)

    def ask(self) -> None:
        """Submit a request, after decoding its answer plainly."""
        request = self.request()
        alone, expected = self.requests.sequences(replace(request, speculation=False)), list[Received]()
        for text in alone:
            self.plain.submit(text)
            expected.append(Received())
            while self.plain.has_work:
                for delta in self.plain.step():
                    expected[-1].add(delta)
        samples = self.requests.sequences(request)
        for live in map(LiveText, samples, alone, expected):
            self.live[live.sample.id] = live
            self.engine.submit(live.sample)

    def cancel(self) -> None:
        """Cancel a random request."""
        request_id = self.rng.choice(list(self.live.values())).sample.request_id
        self.engine.cancel(request_id)
        self.live = {seq_id: text for seq_id, text in self.live.items() if text.sample.request_id != request_id}
        self.counts["cancelled"] += 1

    def round(self) -> None:
        """One round, before which the youngest sequence may be preempted; texts that end in it are compared."""
        scheduler = self.engine.scheduler
        if scheduler.running and self.rng.random() < 0.03:
            self.engine.forget([scheduler.preempt(scheduler.running[-1])])
        for delta in self.engine.step():
            text = self.live[delta.seq_id]
            text.received.add(delta)
            if delta.finish_reason is not None:
                self.live.pop(delta.seq_id).assert_plain()
                self.past[text.sample.tenant or ""].append(text.sample.tokens)
                self.counts["finished"] += 1
                self.counts["preempted"] += text.sample.num_preempted
        self.engine.runner.cache.check()

    def run(self, num_requests: int) -> None:
        """Run `num_requests` requests, a few at a time, to their ends."""
        while self.live or num_requests:
            if num_requests and len(self.live) < 6:
                self.ask()
                num_requests -= 1
            if self.live and self.rng.random() < 0.02:
                self.cancel()
            self.round()

    def play(self, num_requests: int) -> None:
        """`run`, with enough requests for some to finish and some to be preempted."""
        self.run(num_requests)
        assert self.counts["finished"] > 4
        assert self.counts["preempted"] > 0

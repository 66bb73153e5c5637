"""The time to first token of short prompts while a server prefills long ones.

    python -m benchmarks.first_token [--widened] [--draft DRAFT] [--long 2] [--short-tokens 32] [--long-tokens 1500]
                                     [--num-requests 40] [--repeats 3] [-- OPTIONS OF forerun serve]

`forerun serve` runs in a separate process with the bundled target, or the widened one. One client sends short prompts,
one at a time, each after a random pause. In every other block, `--long` further clients send long prompts, each with
an answer of 16 tokens and the next one as soon as one is answered. All prompts begin differently, so that the prefix
cache has no effect. The temperature is 0.

Printed are percentiles over the short requests in milliseconds, alone and with the long ones, the ratios of the 95th
percentiles, by repetition and over all requests, and the prefilled tokens of long prompts per second. The goal is a
ratio of at most 3.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.drafters import passages
from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of
from benchmarks.processes import serving

from forerun.demo.material import widened_pair
from forerun.models.bundled import TARGET
from forerun.models.loading import Blueprint
from forerun.traffic.client import ServerAddress, TimedAnswer, TrafficClient
from forerun.traffic.figures import percentile

ANSWER_TOKENS = 16
WARM_UP = 4  # short requests before the first block
PAUSE_S = 0.25  # at most, before each short request


@dataclass(slots=True, kw_only=True)
class Options:
    """Options for the server and its requests."""

    serve: Sequence[str] = option(what="options of forerun serve, after --", nargs="*", metavar="OPTION")
    widened: bool = option(False, "serve the widened target")
    draft: str | None = option(None, "a drafter; none by default")
    long: int = option(2, "clients with long prompts (default %(default)s)")
    short_tokens: int = option(32, "tokens of a short prompt (default %(default)s)")
    long_tokens: int = option(1500, "tokens of a long prompt (default %(default)s)")
    num_requests: int = option(40, "short requests per block (default %(default)s)")
    repeats: int = option(3, "repetitions (default %(default)s)")


@dataclass(slots=True)
class Texts:
    """Prompts that are excerpts of one cyclic text, each from a different start."""

    tokens: Sequence[int]
    dice: random.Random
    starts: set[int] = field(default_factory=set)

    def prompt(self, num_tokens: int) -> list[int]:
        """The next prompt, with a start that was not used before, until all were used."""
        if len(self.starts) == len(self.tokens):
            self.starts.clear()
        start = self.dice.choice([i for i in range(len(self.tokens)) if i not in self.starts])
        self.starts.add(start)
        return [self.tokens[(start + i) % len(self.tokens)] for i in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Block:
    """The short requests of a block, and the long ones answered during it."""

    short: Sequence[TimedAnswer]
    long: Sequence[TimedAnswer]
    seconds: float


@dataclass(slots=True)
class Asker:
    """Sends requests to one server."""

    client: TrafficClient
    texts: Texts
    options: Options
    number: int = 0

    async def ask(self, num_tokens: int) -> TimedAnswer:
        """Send one request; returns its answer. Raises SystemExit if the server fails."""
        self.number += 1
        body = {"prompt": self.texts.prompt(num_tokens), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        answer = await self.client.ask(self.number, body, time.perf_counter())
        if answer.error:
            raise SystemExit(f"the server failed: {answer.error}")
        return answer

    async def shorts(self, count: int) -> list[TimedAnswer]:
        """Send short requests, one after another; returns their answers."""
        answers = []
        for _ in range(count):
            await asyncio.sleep(self.texts.dice.uniform(0, PAUSE_S))
            answers.append(await self.ask(self.options.short_tokens))
        return answers

    async def longs(self, answers: list[TimedAnswer]) -> None:
        """Send long requests, one after another, and add their answers to `answers`, until the task is cancelled."""
        while True:
            answers.append(await self.ask(self.options.long_tokens))

    async def block(self, num_long: int) -> Block:
        """Send the short requests of a block, with `num_long` long requests open at any time."""
        long: list[TimedAnswer] = []
        tasks = [asyncio.create_task(self.longs(long)) for _ in range(num_long)]
        started_s = time.perf_counter()
        try:
            short = await self.shorts(self.options.num_requests)
        finally:
            seconds = time.perf_counter() - started_s
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    raise SystemExit(f"a long request failed: {ended!r}")
        return Block(short, long, seconds)


def first_ms(answers: Sequence[TimedAnswer], share: float) -> float:
    """A percentile of the times to the first token in milliseconds; `share` is in percent."""
    return 1000 * percentile([answer.first_token_s for answer in answers], share)


async def measure(url: str, texts: Texts, options: Options) -> float:
    """Run all blocks and print the table; returns the ratio over all requests."""
    blocks: dict[int, list[Block]] = {0: [], options.long: []}
    async with TrafficClient(ServerAddress(url)) as client:
        asker = Asker(client, texts, options)
        await asker.shorts(WARM_UP)
        for turn in range(options.repeats):
            for num_long in (0, options.long) if turn % 2 == 0 else (options.long, 0):
                blocks[num_long].append(await asker.block(num_long))
    show_header(
        "long clients", "short requests", "first token p50, ms", "p95, ms", "slowest, ms", "prefilled long tokens/s"
    )
    for num_long, repeated in blocks.items():
        short = [answer for block in repeated for answer in block.short]
        num_prefilled = sum(len(block.long) for block in repeated) * options.long_tokens
        times = (f"{first_ms(short, share):.1f}" for share in (50, 95, 100))
        show(num_long, len(short), *times, f"{num_prefilled / sum(block.seconds for block in repeated):.0f}")
    pairs = zip(*blocks.values(), strict=True)
    ratios = [first_ms(loaded.short, 95) / first_ms(alone.short, 95) for alone, loaded in pairs]
    alone, loaded = ([answer for block in repeated for answer in block.short] for repeated in blocks.values())
    ratio = first_ms(loaded, 95) / first_ms(alone, 95)
    by_repetition = ", ".join(f"{each:.2f}" for each in ratios)
    print(f"\np95 with long prompts over p95 alone: {ratio:.2f} (goal: at most 3; by repetition {by_repetition})")
    return ratio


def main() -> int:
    """Run the measurement and print the table; returns 1 if the goal is missed, otherwise 0."""
    options = options_of(Options)
    tokenizer = Blueprint.of(TARGET).tokenizer()
    texts = [str(passage.prompt) for name in ("code", "prose") for passage in passages(name)]
    tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    target, draft = (
        widened_pair(TARGET, options.draft or "ngram", None) if options.widened else (TARGET, options.draft or "")
    )
    drafted = ("--draft", draft) if options.draft else ()
    with serving("--model", target, *drafted, *options.serve) as url:
        ratio = asyncio.run(measure(url, Texts(tokens, random.Random(0)), options))
    return 0 if ratio <= 3 else 1


if __name__ == "__main__":
    sys.exit(main())

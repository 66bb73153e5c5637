"""The savings and the costs of the prefix cache: engines with and without it, alternating.

    python -m benchmarks.prefixes [--parameters 0.1B] [--draft DRAFT] [--repeats 3] [--only chats,alone,samples,copies]

The model is the widened target, in bfloat16 if the processor supports it. Both engines share its weights and one cache,
which is emptied before each case. With `--draft` chains of depth 4 are drafted, otherwise decoding is plain.

- chats: a conversation of 6 turns about one document; time to first token of each turn.
- alone: prompts without common prefixes, in a cache that is full of cached blocks: the cost of lookups and evictions.
- samples: 8 samples of one prompt; time until all have 16 tokens.
- copies: time to copy the keys and values of a prefix, and to prefill it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from benchmarks.options import option, options_of

from forerun.cache.shared_prefix import CachedPrefix, CachedText, start_row
from forerun.commands.widening import read_amount
from forerun.config import Speculation
from forerun.control.controller import FixedDepth
from forerun.demo.material import widen
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as Text
from forerun.llm import LLM
from forerun.models.bundled import TARGET
from forerun.models.runner import Read
from forerun.request import Request
from forerun.sampling.params import SamplingParams

DOCUMENT, QUESTION, ANSWER, TURNS = 600, 24, 40, 6
PARTS = ("chats", "alone", "samples", "copies")


@dataclass(slots=True)
class Sides:
    """Two engines on one model, with and without a prefix cache."""

    llm: LLM
    depth: int
    repeats: int

    def engine(self, prefix_cache: bool) -> Engine:
        """A new engine with an empty cache, with or without a prefix cache."""
        first = self.llm.engine
        first.runner.clear()
        if self.llm.drafter is not None and hasattr(self.llm.drafter, "runner"):
            self.llm.drafter.runner.clear()
        options = replace(first.options, prefix_cache=prefix_cache)
        return Engine(first.runner, self.llm.drafter, options=options, controller=FixedDepth(), num_ids=first.num_ids)

    def texts(self, prompt: Sequence[int], num_tokens: int, n: int = 1) -> list[Text]:
        """The samples of a request."""
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, n=n, ignore_eos=True)
        return self.llm.requests.sequences(Request.of(list(prompt), params, Speculation(self.depth)))

    def compare(self, case: Callable[[Engine], list[float]]) -> tuple[list[float], list[float], list[float]]:
        """The medians of a case's times with and without the prefix cache, alternating, and of their ratios."""
        times: dict[bool, list[list[float]]] = {True: [], False: []}
        for repeat in range(self.repeats + 1):
            for prefix_cache in (True, False) if repeat % 2 else (False, True):
                measured = case(self.engine(prefix_cache))
                if repeat:  # the first is a warm-up
                    times[prefix_cache].append(measured)
        with_, without = (list(zip(*times[prefix_cache], strict=True)) for prefix_cache in (True, False))
        ratios = [[b / a for a, b in zip(*pair, strict=True)] for pair in zip(with_, without, strict=True)]
        return (
            [statistics.median(e) for e in with_],
            [statistics.median(e) for e in without],
            list(map(statistics.median, ratios)),
        )


def random_text(length: int, seed: int) -> list[int]:
    """Random tokens, since the content of the text does not matter."""
    dice = random.Random(seed)
    return [1, *(dice.randrange(10, 1000) for _ in range(length - 1))]


def first_token_s(engine: Engine, texts: Sequence[Text]) -> float:
    """Generate the texts to their ends; returns the seconds until the first token."""
    started_s, first = time.perf_counter(), 0.0
    for text in texts:
        engine.submit(text)
    while engine.has_work:
        if engine.step() and not first:
            first = time.perf_counter() - started_s
    return first


def chats(sides: Sides) -> None:
    """Measure a conversation, turn by turn."""

    def case(engine: Engine) -> list[float]:
        text, times = random_text(DOCUMENT, 1), []
        for turn in range(TURNS):
            (sequence,) = sides.texts([*text, *random_text(QUESTION, turn)], ANSWER)
            times.append(first_token_s(engine, [sequence]))
            text = sequence.tokens
        return times

    table("turn", range(1, TURNS + 1), *sides.compare(case))


def alone(sides: Sides) -> None:
    """Measure prompts without common prefixes, in a full cache."""
    lengths, cache = (64, 256, 1024), sides.llm.engine.runner.cache

    def case(engine: Engine) -> list[float]:
        size = cache.blocks.block_size
        for number in range(cache.blocks.num_blocks // 8 if engine.options.prefix_cache else 0):
            cache.reserve([-2], [8 * size])
            cache.keep([-2], [range(8 * size)])
            cache.retire(-2, random_text(8 * size, -number - 1), "")
        times = []
        for length in lengths:
            started_s = time.perf_counter()
            first_token_s(engine, sides.texts(random_text(length, length), 32))
            times.append(time.perf_counter() - started_s)
        return times

    table("tokens", lengths, *sides.compare(case))


def samples(sides: Sides) -> None:
    """Measure eight samples of prompts of several lengths."""
    lengths = (20, 40, 80, 160, 500)

    def case(engine: Engine) -> list[float]:
        times = []
        for length in lengths:
            started_s = time.perf_counter()
            first_token_s(engine, sides.texts(random_text(length, length), 16, n=8))
            times.append(time.perf_counter() - started_s)
        return times

    table("tokens", lengths, *sides.compare(case))


def copies(sides: Sides) -> None:
    """Measure copying a prefix, and prefilling it."""
    runner, lengths, read, copied = sides.llm.engine.runner, (64, 256, 1024), [], []
    for length in lengths:
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(sides.repeats + 1):
            runner.clear()
            text, started_s = random_text(length + 1, repeat), time.perf_counter()
            for first in range(0, length, 512):
                runner.read([Read(0, text[first : min(length, first + 512)])])
                runner.keep([0], [range(min(512, length - first))])
            read_s = time.perf_counter()
            runner.retire(0, text, "")
            start_row(runner.cache, CachedText(1, "", text), CachedPrefix(length))
            for taken_s, column in zip((read_s - started_s, time.perf_counter() - read_s), times, strict=True):
                column.append(taken_s)
        read.append(statistics.median(times[0][1:]))
        copied.append(statistics.median(times[1][1:]))
    table("tokens", lengths, copied, read, [b / a for a, b in zip(copied, read, strict=True)])


def table(
    what: str, rows: Sequence[int], known: Sequence[float], plain: Sequence[float], ratio: Sequence[float]
) -> None:
    """Print milliseconds with and without the prefix cache, and their ratio."""
    print(f"{what:>8} {'with, ms':>10} {'without, ms':>12} {'ratio':>8}")
    for row, a, b, r in zip(rows, known, plain, ratio, strict=True):
        print(f"{row:8} {1e3 * a:10.1f} {1e3 * b:12.1f} {r:8.2f}")


@dataclass(slots=True)
class Options:
    """The parts and the models."""

    parameters: str = option("0.1B", "parameters of the widened target (default %(default)s)")
    draft: str | None = option(None, "a drafter (default: none)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    only: Sequence[str] = option(",".join(PARTS), "parts (default %(default)s)")


def main() -> None:
    """Run the selected parts."""
    options = options_of(Options)
    folder = widen(TARGET, read_amount(options.parameters), None)
    depth = 4 if options.draft else 0
    llm = LLM(folder, options.draft, speculation=depth, max_model_len=1536, max_num_seqs=8, use_tqdm_on_load=False)
    print(f"{llm!r}, {torch.get_num_threads()} threads; {llm.plan.cache_tokens} tokens in the cache")
    sides = Sides(llm, depth, options.repeats)
    for name, part in zip(PARTS, (chats, alone, samples, copies), strict=True):
        if name in options.only:
            print(f"\n{name}")
            with torch.inference_mode():
                part(sides)


if __name__ == "__main__":
    main()

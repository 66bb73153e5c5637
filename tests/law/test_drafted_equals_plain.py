"""Plain and speculative decoding give the same tokens and log-probabilities, without tolerance.

Two pairs of models in every format; chains of every depth and trees; any number of sequences, threads and tokens per
chunk; preemption; every family. Each pair has 200 prompts in parts of 20: a sample runs always, all of them as long
proofs. Prompts of the stories models are texts of the target. Some are longer than the draft model's context, where its
depth is 0. Prompts of the bundled pair are held-out code from the library of the Python that runs the tests. A tenth of
them ends just before each border of the attention's key blocks, at 512 and 1,024 tokens, and is drafted across it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.stdlib.corpus import read_corpus, standard_library
from torch import Tensor

from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.models.bundled import BUNDLED
from forerun.models.choice import cpu_backend
from forerun.models.config import read_config
from forerun.models.decoder import Decoder
from forerun.models.packing import WeightLoader
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import SMALL, TARGET
from kit.reading import threads
from kit.sparse import DENSE, FAMILIES, write_sparse
from law.equality import (
    CHAINS,
    FOLDERS,
    FORMATS,
    SPECULATIONS,
    STATIC,
    TREES,
    Answer,
    Asked,
    Decoded,
    decode,
    decode_plain,
)
from law.fuzz import Bench, number_format, run

NUM_PROMPTS, NUM_PARTS, NUM_NEW = 200, 10, 40
SMALLEST, LONGEST, LEAST_FILES = 16, 1023, 8
SETTINGS: list[dict[str, Any]] = [
    *({"temperature": 0.0}, {"temperature": 1.0}) * 2,
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
]


def asked(i: int, prompt: list[int]) -> Asked:
    """A prompt with a setting; every kind of prompt gets every setting."""
    setting = SETTINGS[(i + i // 10) % len(SETTINGS)]
    return Asked(prompt, SamplingParams(**setting, seed=i, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0))


@cache
def stories() -> list[Asked]:
    """Prompts of 1 to 100 tokens, every tenth of 480 to 511."""
    bench, rng = Bench.of(), random.Random(NUM_PROMPTS)
    requests, engine = bench.requests(), bench.engine(options=EngineOptions(max_num_seqs=8))
    params = [SamplingParams(seed=i, max_tokens=520, ignore_eos=True) for i in range(8)]
    texts = run(engine, [requests.sequences(Request.of([1], p))[0] for p in params])
    found = []
    for i in range(NUM_PROMPTS):
        length = rng.randrange(480, 512) if i % 10 == 9 else rng.randrange(1, 100)
        start = 0 if length > 100 else rng.randrange(0, 300)
        found.append(asked(i, texts[i % len(texts)][start : start + length]))
    return found


@cache
def code() -> list[Asked]:
    """Prompts of held-out code: the fifth of every ten ends before the first border, the tenth before the second."""
    tokenizer, rng, found = Tokenizer.load(BUNDLED["stdlib"]), random.Random(NUM_PROMPTS), []
    files = [file for file in read_corpus(standard_library()) if file.held_out]
    texts = [tokens for file in files if len(tokens := tokenizer.encode(file.text)) >= LONGEST]
    if len(texts) < LEAST_FILES:
        pytest.skip(f"this Python's library has {len(texts)} held-out files of {LONGEST} tokens, under {LEAST_FILES}")
    for i in range(NUM_PROMPTS):
        length = {4: rng.randint(480, 511), 9: rng.randint(1000, LONGEST)}.get(i % 10, rng.randint(SMALLEST, 200))
        text = texts[i % len(texts)]
        start = rng.randint(0, len(text) - length)
        found.append(asked(i, text[start : start + length]))
    return found


@dataclass(frozen=True)
class Pair:
    """A target and its draft model, their requests, and the size of a cache hardly larger than the longest text."""

    target: Path
    draft: Path
    requests: Callable[[], list[Asked]]
    scarce_tokens: int


PAIRS = {
    "stories": Pair(TARGET, SMALL, stories, 576),
    "stdlib": Pair(BUNDLED["stdlib"], BUNDLED["stdlib-draft"], code, 1072),
}
every_format = pytest.mark.parametrize(
    ("pair", "dtype"), [*((pair, each) for pair in PAIRS for each in FORMATS), *(("stories", each) for each in FOLDERS)]
)
every_part = pytest.mark.parametrize("part", range(NUM_PARTS))


@cache
def bench_of(pair: str, dtype: str) -> Bench:
    return Bench.of(PAIRS[pair].target, PAIRS[pair].draft, dtype)


def part_of(pair: str, part: int) -> list[Asked]:
    each = NUM_PROMPTS // NUM_PARTS
    return PAIRS[pair].requests()[part * each : (part + 1) * each]


@cache
def plain(pair: str, dtype: str, part: int) -> list[Answer]:
    return decode_plain(bench_of(pair, dtype), part_of(pair, part))


def drafted(pair: str, dtype: str, part: int, drafter: Drafter, speculation: Speculation) -> Decoded:
    """The requests of a part, drafted with a random number of sequences, threads and tokens per chunk."""
    rng = random.Random(f"{part} {speculation}")
    limits = {"max_num_seqs": rng.randint(1, 8), "chunk_tokens": rng.choice([512, 400, 64, 33])}
    with threads(rng.randint(1, 2)):
        return decode(bench_of(pair, dtype), part_of(pair, part), speculation, drafter, **limits)


@pytest.mark.short("stories-int4", "stdlib-bfloat16")
@every_format
def test_drafted_equals_plain_for_a_sample_of_prompts(pair: str, dtype: str) -> None:
    """A chain and a tree; among the prompts is one before each border, or before the second only."""
    bench, chosen = bench_of(pair, dtype), part_of(pair, 0)[6:10]
    if "by torch" not in dtype:
        chosen[0] = part_of(pair, 0)[4]
    expected = decode_plain(bench, chosen)
    for speculation in (CHAINS[4], TREES[len(dtype) % 3]):
        got = decode(bench, chosen, speculation, bench.model_drafter(8192), max_num_seqs=3, chunk_tokens=77)
        assert got.answers == expected, speculation
        assert 20 < got.stats.num_accepted < got.stats.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("speculations", [CHAINS[:4], CHAINS[4:], TREES], ids=["shallow", "deep", "trees"])
@every_part
@every_format
def test_drafted_equals_plain_at_every_depth_and_tree(
    pair: str, dtype: str, part: int, speculations: list[Speculation]
) -> None:
    """One drafter serves all runs: each must leave it empty."""
    drafter = bench_of(pair, dtype).model_drafter(8192)
    for speculation in speculations:
        got = drafted(pair, dtype, part, drafter, speculation)
        assert got.answers == plain(pair, dtype, part), speculation
        assert 100 < got.stats.num_accepted < got.stats.num_drafted


@pytest.mark.short("stories-bfloat16-0")
@every_part
@every_format
def test_drafted_equals_plain_under_preemption(pair: str, dtype: str, part: int) -> None:
    """The drafter's cache is too small for all rows, too."""
    bench, options = bench_of(pair, dtype), {"num_tokens": PAIRS[pair].scarce_tokens, "chunk_tokens": 400}
    got = decode(bench, part_of(pair, part), SPECULATIONS[part], bench.model_drafter(1280), **options)
    assert got.answers == plain(pair, dtype, part)
    assert got.num_preempted > 0
    assert got.stats.num_accepted > 50


def random_pair(numbers: str) -> Bench:
    """The target's shape with 1,200 positions and a window, random weights, logits as spread as a real model's."""
    bench = Bench.of(dtype=numbers)
    config = replace(read_config(TARGET), max_positions=1200, windows=(None, 600, None, 40, None))
    generator = torch.Generator().manual_seed(9)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        scale = 3.0 if name.startswith("model.embed") else 1.0
        return scale * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)

    held = {"float32": torch.float32, "float16": torch.float16}
    chosen, dtype = number_format(numbers), held.get(numbers.partition(" ")[0], torch.bfloat16)
    weights = WeightLoader(take, dtype, cpu_backend(chosen["kernels"], dtype), chosen["quantize"])
    decoder = Decoder(config, weights)
    runner = Runner(decoder, bench.runner.cache)
    return Bench(replace(bench.target, config=config), bench.draft, runner, bench.reader)


@pytest.mark.short("bfloat16-512")
@pytest.mark.parametrize("edge", [512, 1024])
@pytest.mark.parametrize("numbers", FORMATS)
def test_drafted_equals_plain_across_key_blocks(numbers: str, edge: int) -> None:
    """Prompts that end just before the cache's key blocks do, drafted across the edge."""
    bench, rng = random_pair(numbers), random.Random(edge)
    chosen = [asked(i, [rng.randrange(3, 512) for _ in range(edge - rng.randrange(1, 40))]) for i in range(4)]
    plain = decode_plain(bench, chosen)
    for speculation, chunk in ((Speculation(5), 512), (Speculation(3, 3, 9), 400), (Speculation(8), 61)):
        self_draft = bench.with_cache(bench.runner, 16384)
        drafter = type(bench.model_drafter())(self_draft, 512)
        got = decode(bench, chosen, speculation, drafter, max_num_seqs=6, chunk_tokens=chunk, num_tokens=16384)
        assert got.answers == plain
        assert got.stats.num_accepted > 80


@pytest.mark.short("int8-qwen3_moe", "bfloat16-ministral3")
@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
@pytest.mark.parametrize("numbers", FORMATS)
def test_drafted_equals_plain_for_every_family(family: str, numbers: str, tmp_path: Path) -> None:
    """Chains and trees of the model itself and of n-grams: each node chooses experts as it would alone."""
    folder = write_sparse(tmp_path / family, family)
    bench, rng = Bench.of(folder, folder, numbers), random.Random(7)
    count = 3 if "by torch" in numbers else 4  # oneDNN takes a millisecond for a small product of 8 bits
    chosen = [asked(i, [rng.randrange(3, 512) for _ in range(rng.randrange(1, 90))]) for i in range(count)]
    plain = decode_plain(bench, chosen)
    for speculation, chunk in ((Speculation(5), 512), (Speculation(3, 3, 9), 40), (STATIC, 17)):
        got = decode(bench, chosen, speculation, bench.model_drafter(), max_num_seqs=6, chunk_tokens=chunk)
        assert got.answers == plain
        assert got.stats.num_accepted > 50
    assert decode(bench, chosen, Speculation(4, 2, 8), NgramDrafter(), chunk_tokens=9).answers == plain

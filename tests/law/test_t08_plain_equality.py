"""The promise itself: plain and speculative decoding give the same tokens, without tolerance.

Real models, fp32 and bf16; chains of every depth and trees; batches of every size; prompts read in any chunks;
preemption. Prompts near the end of the target's context lie beyond the draft model's own, where its depth is 0. A
sample runs always, all of it as a long proof.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz import Bench, run, threads
from torch import Tensor

from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.draft.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.models.config import read_config
from forerun.models.decoder import Decoder
from forerun.models.runner import Runner
from forerun.sampling.params import SamplingParams

DTYPES = ["float32", "bfloat16"]
NUM_PROMPTS = 200
WISHES = [*(Speculation(depth=k) for k in range(1, 9)), Speculation(4, 3, 12), Speculation(3, 2, 14), Speculation(2, 4)]


@pytest.fixture(scope="module", params=DTYPES)
def bench(request: pytest.FixtureRequest, target_dir: Path, draft_dir: Path) -> Bench:
    return Bench.of(target_dir, draft_dir, request.param)


@pytest.fixture(scope="module")
def texts(target_dir: Path, draft_dir: Path) -> list[list[int]]:
    """Texts of the target's own: prompts of 1 to 100 tokens are their beginnings, long ones nearly all of them."""
    bench = Bench.of(target_dir, draft_dir)
    requests, engine = bench.requests(), bench.engine(options=EngineOptions(max_batch=8))
    params = [SamplingParams(seed=i, max_tokens=520, ignore_eos=True) for i in range(8)]
    return run(engine, [requests.sequences([1], p)[0] for p in params])


def prompts(texts: list[list[int]], count: int) -> list[list[int]]:
    """Every tenth of 480 to 511 tokens."""
    rng = random.Random(count)
    lengths = [rng.randrange(480, 512) if i % 10 == 9 else rng.randrange(1, 100) for i in range(count)]
    starts = [0 if n > 100 else rng.randrange(0, 300) for n in lengths]
    return [texts[i % len(texts)][first : first + n] for i, (n, first) in enumerate(zip(lengths, starts, strict=True))]


def decode(
    bench: Bench,
    chosen: list[list[int]],
    wish: Speculation | bool,
    drafter: Drafter | None = None,
    *,
    num_tokens: int = 8192,
    max_batch: int = 8,
    chunk_tokens: int = 512,
) -> tuple[list[list[int]], Engine, list[Sequence]]:
    """All prompts, 64 tokens each, half of them greedy."""
    requests = bench.requests()
    options = EngineOptions(max_batch=max_batch, chunk_tokens=chunk_tokens)
    engine = bench.engine(drafter, num_tokens, options=options)
    sequences = [
        requests.sequences(p, SamplingParams(temperature=i % 2, seed=i, max_tokens=64), wish)[0]
        for i, p in enumerate(chosen)
    ]
    return run(engine, sequences), engine, sequences


@pytest.fixture(scope="module")
def plain(bench: Bench, texts: list[list[int]]) -> list[list[int]]:
    """Plain decoding, each prompt alone in the engine."""
    return decode(bench, prompts(texts, NUM_PROMPTS)[:20], False, max_batch=1)[0]


@pytest.mark.parametrize("wish", [WISHES[0], WISHES[4], WISHES[8]], ids=["chain 1", "chain 5", "tree"])
def test_a_sample(bench: Bench, texts: list[list[int]], plain: list[list[int]], wish: Speculation) -> None:
    chosen = prompts(texts, NUM_PROMPTS)[:20]
    got, engine, _ = decode(bench, chosen, wish, bench.model_drafter(8192), max_batch=5, chunk_tokens=77)
    assert got == plain
    assert engine.stats.num_accepted > 100


def test_under_preemption(bench: Bench, texts: list[list[int]], plain: list[list[int]]) -> None:
    chosen = prompts(texts, NUM_PROMPTS)[:20]
    got, engine, sequences = decode(bench, chosen, WISHES[2], NgramDrafter(), num_tokens=700, chunk_tokens=400)
    assert got == plain
    assert sum(s.num_preempted for s in sequences) > 0
    assert engine.stats.num_accepted > 20


@pytest.fixture(scope="module")
def plain_all(bench: Bench, texts: list[list[int]]) -> list[list[int]]:
    return decode(bench, prompts(texts, NUM_PROMPTS), False, max_batch=1)[0]


@pytest.mark.full
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_every_depth_and_tree(
    bench: Bench, texts: list[list[int]], plain_all: list[list[int]], wish: Speculation
) -> None:
    """200 prompts, the batch and the chunks of another size for every shape."""
    number = WISHES.index(wish)
    options = {"max_batch": 1 + number % 8, "chunk_tokens": [512, 400, 64, 33][number % 4]}
    chosen = prompts(texts, NUM_PROMPTS)
    with threads(1 + number % 2):
        got, engine, _ = decode(bench, chosen, wish, bench.model_drafter(8192), **options)
    assert got == plain_all
    assert engine.stats.num_accepted > 2000


@pytest.mark.full
@pytest.mark.parametrize("max_batch", range(1, 9))
def test_every_batch_size(bench: Bench, texts: list[list[int]], plain_all: list[list[int]], max_batch: int) -> None:
    """A chunk of 400 tokens in one go; a cache that preempts; n-grams, in trees' budgets too."""
    chosen = prompts(texts, NUM_PROMPTS)
    wish, num_tokens = WISHES[max_batch], 640
    got, _, sequences = decode(
        bench, chosen, wish, NgramDrafter(), num_tokens=num_tokens, max_batch=max_batch, chunk_tokens=400
    )
    assert got == plain_all
    assert max_batch < 4 or sum(s.num_preempted for s in sequences) > 0


def random_pair(dtype: torch.dtype, target_dir: Path, draft_dir: Path) -> Bench:
    """The target's shape with 1,200 positions and a window, random weights, logits as spread as a real model's."""
    bench = Bench.of(target_dir, draft_dir, str(dtype).removeprefix("torch."))
    config = replace(read_config(target_dir), max_positions=1200, windows=(None, 600, None, 40, None))
    generator = torch.Generator().manual_seed(9)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        scale = 3.0 if name.startswith("model.embed") else 1.0
        return scale * shape[-1] ** -0.5 * torch.randn(shape, generator=generator)

    decoder = Decoder(config, take, dtype)
    runner = Runner(decoder, bench.runner.cache)
    return Bench(replace(bench.target, config=config), bench.draft, runner, bench.reader)


@pytest.mark.parametrize("edge", [pytest.param(512), pytest.param(1024, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=DTYPES)
def test_across_key_blocks(dtype: torch.dtype, edge: int, target_dir: Path, draft_dir: Path) -> None:
    """Prompts that end just before the cache's key blocks do, drafted across the edge."""
    bench, rng = random_pair(dtype, target_dir, draft_dir), random.Random(edge)
    chosen = [[rng.randrange(3, 512) for _ in range(edge - rng.randrange(1, 40))] for _ in range(6)]
    plain, engine, _ = decode(bench, chosen, False, max_batch=1)
    for wish, chunk in ((Speculation(5), 512), (Speculation(3, 3, 9), 400), (Speculation(8), 61)):
        self_draft = bench.with_cache(bench.runner, 16384)
        drafter = type(bench.model_drafter())(self_draft, 512)
        got, engine, _ = decode(bench, chosen, wish, drafter, max_batch=6, chunk_tokens=chunk, num_tokens=16384)
        assert got == plain
        assert engine.stats.num_accepted > 200

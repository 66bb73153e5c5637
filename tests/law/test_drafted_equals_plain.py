"""The promise itself: plain and speculative decoding give the same tokens and log-probabilities, without tolerance.

Real models in every format; chains of every depth and trees; batches of every size; prompts read in any chunks;
preemption. Prompts near the end of the target's context lie beyond the draft model's own, where its depth is 0. A
sample runs always, all of it as a long proof.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equality import FOLDERS, FORMATS, STATIC, WISHES, Answer, Asked, decode, decode_plain
from fuzz import Bench, number_format, run
from torch import Tensor

from forerun.config import EngineOptions, Speculation
from forerun.draft.text.ngram import NgramDrafter
from forerun.models.choice import cpu_backend
from forerun.models.config import read_config
from forerun.models.decoder import Decoder
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.reading import threads
from kit.sparse import DENSE, FAMILIES, write_sparse

NUM_PROMPTS, NUM_SAMPLED = 200, 10  # the tenth is a long one
# What torch's operators compute is sampled on the bundled models alone; int4 is sampled for int8, with its head, and
# bfloat16 for float16.
LONG_ONLY = {"int8", "float16", *(f for f in FORMATS if "by torch" in f)}
SAMPLED = [pytest.param(f, marks=pytest.mark.full) if f in LONG_ONLY else f for f in FORMATS]


@pytest.fixture(scope="module", params=[*SAMPLED, *FOLDERS])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench.of(dtype=request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Texts of the target's own: prompts of 1 to 100 tokens are their beginnings, long ones nearly all of them."""
    bench = Bench.of()
    requests, engine = bench.requests(), bench.engine(options=EngineOptions(max_num_seqs=8))
    params = [SamplingParams(seed=i, max_tokens=520, ignore_eos=True) for i in range(8)]
    return run(engine, [requests.sequences(Request.of([1], p))[0] for p in params])


def prompts(texts: list[list[int]], count: int) -> list[list[int]]:
    """Every tenth of 480 to 511 tokens."""
    rng = random.Random(count)
    lengths = [rng.randrange(480, 512) if i % 10 == 9 else rng.randrange(1, 100) for i in range(count)]
    starts = [0 if n > 100 else rng.randrange(0, 300) for n in lengths]
    return [texts[i % len(texts)][first : first + n] for i, (n, first) in enumerate(zip(lengths, starts, strict=True))]


def asked(chosen: list[list[int]]) -> list[Asked]:
    """64 tokens each with their log-probabilities, half of them greedy."""
    return [
        Asked(p, SamplingParams(temperature=i % 2, seed=i, max_tokens=64, logprobs=0)) for i, p in enumerate(chosen)
    ]


@pytest.fixture(scope="module")
def plain(bench: Bench, texts: list[list[int]]) -> list[Answer]:
    return decode_plain(bench, asked(prompts(texts, NUM_PROMPTS)[:NUM_SAMPLED]))


@pytest.mark.short("float32-tree")
@pytest.mark.parametrize("wish", [WISHES[0], WISHES[4], WISHES[8]], ids=["chain 1", "chain 5", "tree"])
def test_a_sample(bench: Bench, texts: list[list[int]], plain: list[Answer], wish: Speculation) -> None:
    chosen = asked(prompts(texts, NUM_PROMPTS)[:NUM_SAMPLED])
    got = decode(bench, chosen, wish, bench.model_drafter(8192), max_num_seqs=5, chunk_tokens=77)
    assert got.answers == plain
    assert got.stats.num_accepted > 100


@pytest.mark.short("bfloat16")
def test_under_preemption(bench: Bench, texts: list[list[int]], plain: list[Answer]) -> None:
    chosen = asked(prompts(texts, NUM_PROMPTS)[:NUM_SAMPLED])
    got = decode(bench, chosen, WISHES[2], NgramDrafter(), num_tokens=700, chunk_tokens=400)
    assert got.answers == plain
    assert got.num_preempted > 0
    assert got.stats.num_accepted > 20


@pytest.fixture(scope="module")
def plain_all(bench: Bench, texts: list[list[int]]) -> list[Answer]:
    return decode_plain(bench, asked(prompts(texts, NUM_PROMPTS)))


@pytest.mark.full
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_every_depth_and_tree(bench: Bench, texts: list[list[int]], plain_all: list[Answer], wish: Speculation) -> None:
    """200 prompts, the batch and the chunks of another size for every shape."""
    number = WISHES.index(wish)
    options = {"max_num_seqs": 1 + number % 8, "chunk_tokens": [512, 400, 64, 33][number % 4]}
    chosen = asked(prompts(texts, NUM_PROMPTS))
    with threads(1 + number % 2):
        got = decode(bench, chosen, wish, bench.model_drafter(8192), **options)
    assert got.answers == plain_all
    assert got.stats.num_accepted > 2000


@pytest.mark.full
@pytest.mark.parametrize("max_num_seqs", range(1, 9))
def test_every_batch_size(bench: Bench, texts: list[list[int]], plain_all: list[Answer], max_num_seqs: int) -> None:
    """A chunk of 400 tokens in one go; a cache that preempts; n-grams, in trees' budgets too."""
    chosen = asked(prompts(texts, NUM_PROMPTS))
    limits = {"num_tokens": 640, "max_num_seqs": max_num_seqs, "chunk_tokens": 400}
    got = decode(bench, chosen, WISHES[max_num_seqs], NgramDrafter(), **limits)
    assert got.answers == plain_all
    assert max_num_seqs < 4 or got.num_preempted > 0


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
    decoder = Decoder(config, take, dtype, cpu_backend(chosen["kernels"], dtype), chosen["quantize"])
    runner = Runner(decoder, bench.runner.cache)
    return Bench(replace(bench.target, config=config), bench.draft, runner, bench.reader)


@pytest.mark.short("bfloat16-512")
@pytest.mark.parametrize("edge", [pytest.param(512), pytest.param(1024, marks=pytest.mark.full)])
@pytest.mark.parametrize("numbers", SAMPLED)
def test_across_key_blocks(numbers: str, edge: int) -> None:
    """Prompts that end just before the cache's key blocks do, drafted across the edge."""
    bench, rng = random_pair(numbers), random.Random(edge)
    chosen = asked([[rng.randrange(3, 512) for _ in range(edge - rng.randrange(1, 40))] for _ in range(6)])
    plain = decode_plain(bench, chosen)
    for wish, chunk in ((Speculation(5), 512), (Speculation(3, 3, 9), 400), (Speculation(8), 61)):
        self_draft = bench.with_cache(bench.runner, 16384)
        drafter = type(bench.model_drafter())(self_draft, 512)
        got = decode(bench, chosen, wish, drafter, max_num_seqs=6, chunk_tokens=chunk, num_tokens=16384)
        assert got.answers == plain
        assert got.stats.num_accepted > 200


OF_FAMILIES = [  # torch's operators take a minute for quantised experts
    pytest.param(family, numbers, id=f"{family} {numbers}", marks=[pytest.mark.full] * ("by torch" in numbers))
    for family in (*FAMILIES, *DENSE)
    for numbers in FORMATS
]


@pytest.mark.short("qwen3_moe int8", "gemma2 float32", "ministral3 bfloat16")
@pytest.mark.parametrize(("family", "numbers"), OF_FAMILIES)
def test_of_every_family(family: str, numbers: str, tmp_path: Path) -> None:
    """Guesses of the model's own, and n-grams, in chains and trees: each node chooses experts as it would alone."""
    folder = write_sparse(tmp_path / family, family)
    bench, rng = Bench.of(folder, folder, numbers), random.Random(7)
    count = 3 if "by torch" in numbers else 6  # oneDNN takes a millisecond for a small product of 8 bits
    chosen = asked([[rng.randrange(3, 512) for _ in range(rng.randrange(1, 90))] for _ in range(count)])
    plain = decode_plain(bench, chosen)
    for wish, chunk in ((Speculation(5), 512), (Speculation(3, 3, 9), 40), (STATIC, 17)):
        got = decode(bench, chosen, wish, bench.model_drafter(), max_num_seqs=6, chunk_tokens=chunk)
        assert got.answers == plain
        assert got.stats.num_accepted > 50
    assert decode(bench, chosen, Speculation(4, 2, 8), NgramDrafter(), chunk_tokens=9).answers == plain

"""The promise itself on the models that ship: 200 prompts of code they have not seen, plain and drafted, no tolerance.

The prompts are cut from held-out files of the standard library that runs the tests, so another Python asks others. A
tenth of them ends just before each border of the attention's key blocks, at 512 and 1,024 tokens, and is drafted
across it. They come in parts of 20, each a proof of its own. A sample runs always, all of it as long proofs.
"""

import random
from functools import cache

import pytest
from equality import CHAINS, FORMATS, TREES, WISHES, Answer, Asked, Decoded, decode, decode_plain
from fuzz import Bench
from recipes.stdlib.corpus import read_corpus, standard_library

from forerun.config import Speculation
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.models.bundled import BUNDLED
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from kit.reading import threads

NUM_PROMPTS, NUM_PARTS, NUM_NEW = 200, 10, 40
SMALLEST, LONGEST, LEAST_FILES = 16, 1023, 8
DRAFT, MIDDLE = "model:stdlib-draft", "model:stdlib-middle"
SETTINGS = [
    *({"temperature": 0.0}, {"temperature": 1.0}) * 2,
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
]
LONG_ONLY = ("int8 by torch", "int4 by torch", "float16")
all_parts = pytest.mark.parametrize("part", range(NUM_PARTS))
all_formats = pytest.mark.parametrize("dtype", FORMATS)


@cache
def bench_of(dtype: str) -> Bench:
    return Bench.of(BUNDLED["stdlib"], BUNDLED["stdlib-draft"], dtype)


def drafter_of(spec: str, dtype: str, num_tokens: int = 8192) -> Drafter:
    """A drafter as a user spells it, with a cache for so many tokens."""
    target = bench_of(dtype).target
    plan = plan_drafter(spec, DraftContext(target, target.tokenizer()))
    drafter = plan.build(dict.fromkeys(plan.models, num_tokens), None, bench_of(dtype).runner)
    assert drafter is not None, f"{spec} builds no drafter"
    return drafter


@cache
def held_out_texts() -> list[list[int]]:
    """The tokens of every held-out file that the longest prompts can be cut from."""
    tokenizer = Tokenizer.load(BUNDLED["stdlib"])
    files = [file for file in read_corpus(standard_library()) if file.held_out]
    texts = [tokens for file in files if len(tokens := tokenizer.encode(file.text)) >= LONGEST]
    if len(texts) < LEAST_FILES:
        pytest.skip(f"this Python's library has {len(texts)} held-out files of {LONGEST} tokens, under {LEAST_FILES}")
    return texts


@cache
def requests() -> list[Asked]:
    """The fifth of every ten prompts ends before the first border, the tenth before the second."""
    rng, texts, asked = random.Random(NUM_PROMPTS), held_out_texts(), []
    for i in range(NUM_PROMPTS):
        length = {4: rng.randint(480, 511), 9: rng.randint(1000, LONGEST)}.get(i % 10, rng.randint(SMALLEST, 200))
        text = texts[i % len(texts)]
        start = rng.randint(0, len(text) - length)
        setting = SETTINGS[(i + i // 10) % len(SETTINGS)]  # every kind of prompt meets every setting
        params = SamplingParams(**setting, seed=i, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
        asked.append(Asked(text[start : start + length], params))
    return asked


def part_of(part: int) -> list[Asked]:
    each = NUM_PROMPTS // NUM_PARTS
    return requests()[part * each : (part + 1) * each]


@cache
def plain(dtype: str, part: int) -> list[Answer]:
    return decode_plain(bench_of(dtype), part_of(part))


def drafted(dtype: str, part: int, drafter: Drafter, wish: Speculation) -> Decoded:
    """In a batch, chunks and threads of any number."""
    rng = random.Random(f"{part} {wish}")
    limits = {"max_num_seqs": rng.randint(1, 8), "chunk_tokens": rng.choice([512, 400, 64, 33])}
    with threads(rng.randint(1, 2)):
        return decode(bench_of(dtype), part_of(part), wish, drafter, **limits)


@pytest.mark.short("bfloat16")
@pytest.mark.parametrize(
    ("dtype", "wish"),
    [
        pytest.param(*each, marks=pytest.mark.full if each[0] in LONG_ONLY else (), id=each[0])
        for each in zip(
            FORMATS,
            [CHAINS[4], TREES[1], CHAINS[3], CHAINS[5], TREES[0], CHAINS[2], *TREES[2:], CHAINS[6]],
            strict=True,
        )
    ],
)
def test_a_sample(dtype: str, wish: Speculation) -> None:
    slow = "by torch" in dtype  # one for each border among them, or for the second
    chosen, bench = part_of(0)[8 if slow else 4 : 10], bench_of(dtype)
    got = decode(bench, chosen, wish, drafter_of(DRAFT, dtype), max_num_seqs=5, chunk_tokens=77)
    assert got.answers == decode_plain(bench, chosen)
    assert 30 < got.stats.num_accepted < got.stats.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("wishes", [CHAINS[:4], CHAINS[4:], TREES], ids=["shallow", "deep", "trees"])
@all_parts
@all_formats
def test_every_depth_and_tree(dtype: str, part: int, wishes: list[Speculation]) -> None:
    """One drafter for all, which every run leaves as it found it."""
    drafter = drafter_of(DRAFT, dtype)
    for wish in wishes:
        got = drafted(dtype, part, drafter, wish)
        assert got.answers == plain(dtype, part), wish
        assert 100 < got.stats.num_accepted < got.stats.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("spec", [MIDDLE, "ngram"])
@all_parts
@all_formats
def test_other_drafters(dtype: str, part: int, spec: str) -> None:
    """Two depths and a tree for each part, every one of them somewhere."""
    drafter = drafter_of(spec, dtype)
    for wish in (CHAINS[part % 8], CHAINS[(part + 4) % 8], TREES[part % 3]):
        got = drafted(dtype, part, drafter, wish)
        assert got.answers == plain(dtype, part), wish
        assert 50 < got.stats.num_accepted < got.stats.num_drafted


@pytest.mark.full
@all_parts
@all_formats
def test_under_preemption(dtype: str, part: int) -> None:
    """A cache hardly larger than the longest text, and a drafter that has to give up rows too."""
    bench, drafter = bench_of(dtype), drafter_of(DRAFT, dtype, 1280)
    got = decode(bench, part_of(part), WISHES[part], drafter, num_tokens=1072, chunk_tokens=400)
    assert got.answers == plain(dtype, part)
    assert got.num_preempted > 0
    assert got.stats.num_accepted > 50

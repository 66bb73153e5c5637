"""The conformance suite in the engine: with every drafter, and with drafters that break every rule, the output is that
of plain decoding, token for token.

In float32, bfloat16 and float16; chains of every depth and trees; alone and in batches; prompts in chunks; with
sequences sent back and resumed; under every rule of verification where all of them promise the same tokens.
"""

import random
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice

import pytest
import torch

from forerun.config import Speculation, Verification
from forerun.control.controller import FixedDepth
from forerun.device import Placement
from forerun.draft.many.mix import MixDrafter
from forerun.draft.model.model import ModelDrafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from kit.checkpoints import SMALL, TARGET
from kit.texts import PROMPTS, VOCAB, story
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, DTYPES, EVERY_DTYPE, as_draft, built, context
from law.equality import Answer, Asked, decode, decode_plain
from law.faulty import Faulty
from law.fuzz import bench_of
from law.hostile import HOSTILE, Hostile
from law.rebuilt import size_of, without_past

CHAIN, TREE, WIDE = Speculation(3), Speculation(3, 2, 8), Speculation(5, 3, 15)
STATIC = Speculation(tree=StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0]]))
BATCHES = (
    *((CHAIN, 1), (TREE, 1)),
    *((Speculation(depth), 8) for depth in (0, 1, 3, 7)),
    *((TREE, 8), (WIDE, 8), (STATIC, 8)),
    *((Speculation(), 1), (Speculation(), 8), (Speculation(width=2), 8)),  # the engine chooses the depth
)
NUM_TOKENS = 24

every_dtype = pytest.mark.parametrize("dtype", EVERY_DTYPE)
full = pytest.mark.full
above_all_float32, above_all_bfloat16 = (
    pytest.mark.parametrize("dtype", [d if d == above_all else pytest.param(d, marks=full) for d in DTYPES])
    for above_all in ("float32", "bfloat16")
)
every_drafter = pytest.mark.parametrize("name", DRAFTERS)
GREEDY, SAMPLED, MIXED = (0.0,), (1.0,), (1.0, 0.0, 1.0, 1.0, 0.0)


def asked(temperatures: Sequence[float], batch: int, num_tokens: int = NUM_TOKENS) -> list[SamplingParams]:
    """Parameters and seeds, one for each row."""
    return [
        SamplingParams(temperature=t, seed=seed, max_tokens=num_tokens, ignore_eos=True)
        for seed, t in enumerate(islice(cycle(temperatures), batch))
    ]


def answers(
    llm: LLM,
    temperatures: Sequence[float],
    batch: int,
    speculation: bool | Speculation = True,
    num_tokens: int = NUM_TOKENS,
) -> list[tuple[int, ...]]:
    """The generated tokens of each row; the prompts repeat."""
    prompts = list(islice(cycle(PROMPTS), batch))
    found = llm.generate(prompts, asked(temperatures, batch, num_tokens), speculation=speculation)
    return [result.outputs[0].token_ids for result in found]


@cache
def plain(temperatures: Sequence[float], dtype: str = "float32") -> list[tuple[int, ...]]:
    """Plain decoding of 8 rows, one at a time."""
    llm = LLM(str(TARGET), dtype=dtype)
    rows = zip(cycle(PROMPTS), asked(temperatures, 8), strict=False)
    return [llm.generate([prompt], [params])[0].outputs[0].token_ids for prompt, params in rows]


@cache
def full_texts(temperatures: Sequence[float], dtype: str) -> list[list[int]]:
    """Prompts and plain answers, joined; oracles draft from them."""
    prompts = cycle(context().tokenizer.encode(prompt) for prompt in PROMPTS)
    return [prompt + list(answer) for prompt, answer in zip(prompts, plain(temperatures, dtype), strict=False)]


@pytest.mark.short("model:stories280k-float32", "eagle-bfloat16")
@above_all_float32
@every_drafter
def test_the_output_is_that_of_plain_decoding(name: str, dtype: str) -> None:
    llm = LLM(str(TARGET), as_draft(name), dtype=dtype)
    empty = size_of(llm.engine.drafter)
    for speculation, batch in BATCHES:
        with unchecked():
            found = answers(llm, MIXED, batch, speculation)
        assert found == plain(MIXED, dtype)[:batch], (speculation, batch)
        assert llm.engine.drafter is not None
        assert size_of(without_past(llm.engine.drafter)) == empty, (speculation, batch)
    assert llm.stats.num_drafted > 50
    assert llm.stats.num_accepted > 0


CROWD = [
    Asked(story(length, seed), SamplingParams(temperature=seed % 3 / 2, seed=seed, max_tokens=36, logprobs=0))
    for seed, length in enumerate((40, 1, 9, 30, 3, 22, 12, 5))
]


@cache
def plain_crowd(dtype: str) -> list[Answer]:
    return decode_plain(bench_of(dtype), CROWD)


@pytest.mark.short("hydra-bfloat16", "mix-of-3-float32")
@above_all_bfloat16
@every_drafter
def test_chunks_and_preemption_change_no_output(name: str, dtype: str) -> None:
    """Log-probabilities too, in a cache that the rows outgrow together, and with faulty drafts among the others."""
    rng = random.Random(name)

    def drafter(target: Runner) -> Faulty:
        answers = [answer.tokens for answer in plain_crowd(dtype)]
        return Faulty([built(name, target, dtype, 256)], rng, lambda: answers)

    for speculation in (CHAIN, TREE):
        got = decode(bench_of(dtype), CROWD, speculation, drafter, num_tokens=192, chunk_tokens=29)
        assert got.answers == plain_crowd(dtype)
        assert got.num_preempted > 0
        assert got.stats.num_drafted > 0


@pytest.mark.short("ngram-block-float32", "hydra-token-float32", "cascade-of-heads-block-float32")
@above_all_float32
@pytest.mark.parametrize("verification", ["token", "block"])
@every_drafter
def test_greedy_output_under_rejection_rules_is_that_of_plain_decoding(
    name: str, verification: Verification, dtype: str
) -> None:
    llm = LLM(str(TARGET), as_draft(name), dtype=dtype, verification=verification)
    for speculation in (CHAIN, TREE):
        with unchecked():
            found = answers(llm, GREEDY, 5, speculation, 9)
        assert found == [a[:9] for a in plain(GREEDY, dtype)[:5]]
    assert llm.stats.num_drafted > 0


@pytest.mark.short(
    "oracle-bfloat16",
    "always_wrong-float32",
    "ids_out_of_range-float32",
    "parents_at_random-float32",
    "wrong_roots-float32",
    "one_dimension-float32",
    "nan_confidence-float32",
    "law_of_-1.0-bfloat16",
)
@every_dtype
@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_drafter_changes_the_output(name: str, dtype: str) -> None:
    """Alone, and in a mix."""
    drafter = Hostile(HOSTILE[name], full_texts(MIXED, dtype))
    mix = MixDrafter([NgramDrafter(), drafter], ["ngram", "hostile"])
    for draft in (drafter, mix):
        controller = FixedDepth() if draft is mix else None  # which merges all drafts of a mix
        llm, drafter.num_proposed = LLM(str(TARGET), draft, dtype=dtype, controller=controller), 0
        for speculation in (Speculation(4), Speculation(3, 3, 9)):
            assert answers(llm, MIXED, 5, speculation, 10) == [a[:10] for a in plain(MIXED, dtype)[:5]]
        assert drafter.num_proposed > 2
        assert llm.engine.drafter is draft, "its drafts raised errors, and drafting was switched off"


@pytest.mark.short(
    "oracle-block",
    "half_right-token",
    "twins-token",
    "holes-block",
    "unequal_shapes-token",
    "nan_logits-token",
    "law_of_inf-token",
    "law_of_0.0-block",
)
@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_drafter_changes_greedy_output_under_rejection_rules(name: str, verification: Verification) -> None:
    drafter = Hostile(HOSTILE[name], full_texts(GREEDY, "float32"))
    llm = LLM(str(TARGET), drafter, dtype="float32", verification=verification)
    assert answers(llm, GREEDY, 5, num_tokens=10) == [a[:10] for a in plain(GREEDY)[:5]]


@pytest.mark.parametrize("temperatures", [GREEDY, SAMPLED])
def test_every_draft_token_of_an_oracle_is_accepted(temperatures: Sequence[float]) -> None:
    texts = full_texts(temperatures, "float32")
    llm = LLM(str(TARGET), Hostile(HOSTILE["oracle"], texts), dtype="float32")
    answers(llm, temperatures, 5, Speculation(7))
    assert llm.stats.num_accepted == llm.stats.num_drafted > 0
    rounds_each = 1 + -(-(NUM_TOKENS - 1) // 8)  # the first, with the prompt, is not drafted
    assert llm.stats.num_rounds <= 5 * rounds_each
    wrong = LLM(str(TARGET), Hostile(HOSTILE["always_wrong"], texts), dtype="float32")
    answers(wrong, temperatures, 5, Speculation(7))
    assert wrong.stats.num_accepted == 0 < wrong.stats.num_drafted


FIXED_BATCHES = ((CHAIN, 1), (TREE, 8), (Speculation(5), 8))


@pytest.mark.short("cascade-of-heads", "mix-of-3")
@pytest.mark.parametrize("name", DRAFTERS)
def test_passes_of_fixed_shape_give_the_output_of_plain_decoding(name: str) -> None:
    """As on a GPU."""
    llm = LLM(str(TARGET), as_draft(name), dtype="float32", device=Placement(torch.device("cpu"), fixed=True))
    for speculation, batch in FIXED_BATCHES:
        with unchecked():
            found = answers(llm, MIXED, batch, speculation)
        assert found == plain(MIXED, "float32")[:batch], (speculation, batch)
    assert llm.stats.num_accepted > 0


@every_dtype
def test_a_target_as_its_own_draft_model_is_always_accepted(dtype: str) -> None:
    llm = LLM(str(TARGET), f"model:{TARGET}", dtype=dtype)
    answers(llm, MIXED, 5, Speculation(4))
    assert llm.stats.num_accepted == llm.stats.num_drafted > 0


@pytest.mark.parametrize("lower", [None, "early-exit:4"])
def test_decoding_goes_on_beyond_the_drafters_context(lower: str | None) -> None:
    """The drafter has 256 positions, the target 290: past 256 only a cascade's lower member drafts."""
    prompt, to_the_end = story(230, 0), SamplingParams(temperature=1.0, seed=5, max_tokens=None, ignore_eos=True)
    expected = LLM(str(TARGET), dtype="float32", max_model_len=290).generate(prompt, to_the_end)[0].outputs[0]
    draft = f"cascade[{lower},model:{SMALL}]" if lower else f"model:{SMALL}"
    llm = LLM(str(TARGET), draft, dtype="float32", max_model_len=290)
    found = llm.generate(prompt, to_the_end, speculation=Speculation(4))[0].outputs[0]
    assert found.token_ids == expected.token_ids
    assert len(prompt) + len(found.token_ids) == 290
    assert llm.stats.num_drafted > 0
    assert (llm.stats.num_drafted > 4 * (256 - 230 + 1)) == (lower is not None)


@every_dtype
def test_a_drafter_short_of_memory_changes_no_token(dtype: str) -> None:
    small = Blueprint.of(str(SMALL), dtype=dtype)
    for num_tokens in (0, 64, 192):
        drafter = ModelDrafter(small.load(num_tokens), VOCAB)
        llm = LLM(str(TARGET), drafter, dtype=dtype)
        assert answers(llm, MIXED, 5, Speculation(4, 2, 8)) == plain(MIXED, dtype)[:5]
        assert (llm.stats.num_drafted > 0) == (num_tokens > 0)
        drafter.runner.cache.check()
        assert drafter.runner.cache.num_free_tokens == num_tokens

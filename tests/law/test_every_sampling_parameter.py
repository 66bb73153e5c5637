"""Every sampling parameter, alone and in random combinations, in batches whose rows all differ.

Plain decoding must give the tokens of a slow reference that shares only the model's raw logits and the noise's hash
with the engine. Drafted decoding must give the tokens of plain decoding: with chains and trees, n-grams, a model, and
an oracle, whose long accepted runs need the sampling state of each node's own path.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from forerun.config import Speculation, Verification
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.output import RequestOutput
from forerun.sampling.noise import gumbel, mix, signed
from forerun.sampling.params import LogitsProcessor, SamplingParams
from kit.assertions import tokens_of
from kit.checkpoints import SMALL, TARGET
from kit.laws import Reals, edited_logits, filtered_logits
from kit.oracles import Oracle, exact_parts
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, DTYPES, as_draft

VOCAB, EOS = 512, 2
BATCH = 9
LENGTH = 12
TEMPERATURES = (0.0, 0.7, 1.3)
PROMPTS = ("Once upon a time", "Lily and Tom went to the park. Lily and Tom", "The", "One day, a big dog", "")
CHAIN, TREE = Speculation(4), Speculation(4, 3, 9)
T = TypeVar("T")
U = TypeVar("U")


def no_repeated_pairs(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """No pair of tokens occurs twice: depends on the whole text."""
    after = [second for first, second in itertools.pairwise(tokens) if first == tokens[-1]]
    return logits.index_fill(0, torch.tensor(after, dtype=torch.long), -math.inf)


def alternate(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Even ids follow odd ones and odd ones even; written into the very tensor that was given."""
    logits[tokens[-1] % 2 :: 2] = -math.inf
    return logits


@dataclass(frozen=True)
class Fade:
    """The longer the text, the flatter the law; and each token's sum of ids so far lifts one token."""

    by: float

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        lifted = torch.zeros_like(logits)
        lifted[sum(tokens) % VOCAB] = 3.0
        return logits / (1 + self.by * len(tokens)) + lifted


# Common tokens of the stories, so that lists of ids matter.
SOME = (403, 407, 261, 378, 411, 429, 271, 286, 318, 395)

WORDS = ("the", "was", "Lily", "little girl", "named", "to play")
SHAPED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.7},
    {"presence_penalty": -0.6},
    {"frequency_penalty": 1.2},
    {"frequency_penalty": -0.4},
    {"logit_bias": {SOME[0]: 6.0, SOME[1]: -5.0, SOME[2]: -math.inf}},
    {"banned_tokens": SOME},
    {"bad_words": WORDS},
    {"min_tokens": 9, "logit_bias": {EOS: 12.0}},
    {"min_tokens": 5, "stop_token_ids": SOME},
    {"logits_processors": (no_repeated_pairs,)},
    {"logits_processors": (alternate,)},
    {"logits_processors": (Fade(0.02), alternate, no_repeated_pairs)},
)
NARROWED: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 8},
    {"top_p": 0.35},
    {"top_p": 0.95},
    {"min_p": 0.08},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
)


def alone() -> list[SamplingParams]:
    """Every transform by itself, at every temperature at which it means something."""
    warm = [(kind, t) for t in TEMPERATURES[1:] for kind in NARROWED]
    every = [(kind, t) for kind in SHAPED for t in TEMPERATURES] + warm
    return [SamplingParams(temperature=t, seed=seed, max_tokens=LENGTH, **kind) for seed, (kind, t) in enumerate(every)]


def combined(seed: int, count: int) -> list[SamplingParams]:
    """Random combinations of random strengths, each of a few transforms."""
    rng = random.Random(seed)

    def maybe(value: T, off: U) -> T | U:
        return value if rng.random() < 0.35 else off

    def one() -> SamplingParams:
        ids = [*rng.sample(SOME, 3), *rng.sample(range(3, VOCAB), 30)]
        kinds: list[LogitsProcessor] = [no_repeated_pairs, alternate, Fade(rng.random() / 20)]
        return SamplingParams(
            temperature=rng.choice(TEMPERATURES),
            top_k=maybe(rng.choice([1, 2, 5, 20, 100, 511, 512, 9999]), 0),
            top_p=maybe(rng.uniform(0.05, 1), 1.0),
            min_p=maybe(rng.uniform(0, 0.3), 0.0),
            repetition_penalty=maybe(rng.uniform(0.6, 2), 1.0),
            presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
            frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
            logit_bias=maybe({token: rng.uniform(-9, 9) for token in [*ids[:12], EOS]}, None),
            banned_tokens=maybe(ids[8:], ()),
            bad_words=maybe(rng.sample(WORDS, 3), ()),
            min_tokens=maybe(rng.randint(1, LENGTH), 0),
            max_tokens=LENGTH,
            stop_token_ids=maybe(rng.sample(SOME, 2), ()),
            ignore_eos=rng.random() < 0.3,
            seed=rng.getrandbits(64),
            logits_processors=maybe(rng.sample(kinds, rng.randint(1, 3)), ()),
        )

    return [one() for _ in range(count)]


def prompts_for(params: Sequence[SamplingParams]) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]


@cache
def plain(dtype: str = "float32") -> LLM:
    return LLM(str(TARGET), dtype=dtype, max_num_seqs=BATCH)


def reference_token(logits: Reals, text: list[int], num_prompt: int, params: SamplingParams) -> int:
    """The next token: the largest logit, or the largest under the noise of its position."""
    words = [ids for word in params.bad_words for ids in plain().tokenizer.spellings(word)]
    logits = edited_logits(logits, text, num_prompt, params, (EOS,), words)
    if params.temperature == 0:
        return int(logits.argmax())
    assert params.seed is not None
    key = mix((params.seed, 0, 0, 0, 0, len(text)))  # seed, sample, coupled noise, no level, no round, position
    noise = gumbel(torch.tensor([signed(key)]), VOCAB)[0].double().numpy()
    return int((filtered_logits(logits, params) + noise).argmax())


def reference(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], dtype: str) -> list[tuple[int, ...]]:
    """All answers, one token per pass, every row on its own path through a model of its own."""
    runner = Blueprint.of(str(TARGET), dtype=dtype).load(len(prompts) * 128)
    texts, going = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    unread = {row: list(prompts[row]) for row in going}
    while going:
        rows = sorted(going)
        states = runner.read([Read(row, unread[row], judged=[len(unread[row]) - 1]) for row in rows])
        runner.keep(rows, [range(len(unread[row])) for row in rows])
        for row, logits in zip(rows, states.logits.double().numpy(), strict=True):
            text, asked, num_prompt = texts[row], params[row], len(prompts[row])
            text.append(reference_token(logits, text, num_prompt, asked))
            unread[row] = text[-1:]
            ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else (EOS,))}
            ended = text[-1] in ends and len(text) - num_prompt > asked.min_tokens
            if ended or len(text) - num_prompt == asked.max_tokens:
                going.discard(row)
    return [tuple(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]


def checked_plain(params: Sequence[SamplingParams], dtype: str = "float32") -> list[RequestOutput]:
    """Plain answers, after asserting that they are those of the reference."""
    with unchecked():
        results = plain(dtype).generate(prompts_for(params), params)
        right = reference([result.prompt_token_ids for result in results], params, dtype)
    for asked, tokens, expected in zip(params, tokens_of(results), right, strict=True):
        assert tokens == expected, asked
    return results


@cache
def plain_alone(dtype: str = "float32") -> tuple[list[SamplingParams], list[RequestOutput]]:
    params = alone()
    return params, checked_plain(params, dtype)


@cache
def plain_combined(dtype: str) -> tuple[list[SamplingParams], list[RequestOutput]]:
    params = combined(7, 2 * BATCH)
    return params, checked_plain(params, dtype)


def check_drafted(
    draft: str, params: Sequence[SamplingParams], expected: Sequence[RequestOutput], dtype: str = "float32"
) -> None:
    """Assert that drafted answers equal plain ones, with chains and trees."""
    oracle = Oracle(errs=lambda place: place % 7 == 6)
    oracle.learn(expected, params)
    llm = LLM(str(TARGET), oracle if draft == "oracle" else as_draft(draft), dtype=dtype, max_num_seqs=BATCH)
    for shape in (CHAIN,) if draft == "ngram" else (CHAIN, TREE):  # n-grams are chains in any case
        with unchecked():
            found = llm.generate(prompts_for(params), params, speculation=shape)
        for asked, one, other in zip(params, found, expected, strict=True):
            assert exact_parts(one) == exact_parts(other), (shape, asked)
    assert llm.stats.num_drafted > 0
    if draft == "oracle":
        assert llm.stats.num_accepted > llm.stats.num_rounds
    assert llm.engine.runner.cache.num_rows == 0


every_drafter = pytest.mark.parametrize("draft", [*DRAFTERS, "oracle"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.short("float32-ngram", "float32-oracle")
@every_drafter
@every_dtype
def test_every_parameter_alone_gives_the_tokens_of_plain_decoding(draft: str, dtype: str) -> None:
    check_drafted(draft, *plain_alone(dtype), dtype)


@pytest.mark.full
@every_drafter
@every_dtype
def test_combined_parameters_give_the_tokens_of_plain_decoding(draft: str, dtype: str) -> None:
    check_drafted(draft, *plain_combined(dtype), dtype)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(100, 140))])
def test_random_combinations_give_the_tokens_of_the_reference(seed: int) -> None:
    params = combined(seed, (5 if seed else 2) * BATCH)
    expected = checked_plain(params)
    for draft in ("ngram", "model:stories280k", "oracle"):
        check_drafted(draft, params, expected)


@pytest.mark.short("token")
@pytest.mark.parametrize("verification", ["token", "block"])
def test_greedy_output_is_that_of_plain_decoding_under_rejection_rules(verification: Verification) -> None:
    """A point mass is accepted or rejected without chance: the same tokens under every rule."""
    params = [asked for asked in [*plain_alone()[0], *combined(9, BATCH)] if asked.temperature == 0]
    prompts = prompts_for(params)
    expected = plain().generate(prompts, params)
    oracle = Oracle(errs=lambda place: place % 7 == 6)
    oracle.learn(expected, params)
    for draft in (f"model:{SMALL}", oracle):
        llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=BATCH, verification=verification)
        for shape in (CHAIN, TREE):
            assert list(map(exact_parts, llm.generate(prompts, params, speculation=shape))) == list(
                map(exact_parts, expected)
            )
        assert llm.stats.num_accepted > 0

"""Wherever a text ends, drafted decoding ends it as plain decoding does: the same tokens, text, reasons and
log-probabilities, to the bit.

An oracle that drafts the right answer, and tokens past its end, chooses the position of the end in a draft. After a
prompt of several tokens the first round emits one token, and every later round DEPTH accepted tokens and a bonus token.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from forerun.accept.commit import Origin
from forerun.config import Speculation, Verification
from forerun.draft.base import Budget
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.output import RequestOutput
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RowSampling
from kit.checkpoints import EMBEDDING, SMALL, TARGET, rewritten
from kit.engines import plain
from kit.oracles import Oracle, exact_parts, never

DEPTH = 4
SHAPES = (Speculation(DEPTH), Speculation(DEPTH, 3, 10))
EOS, CONTEXT = 2, 512
PROMPT = "Once upon a time"
LONGEST = 18


@dataclass(frozen=True)
class ForceToken:
    """A logits processor that forces `token` when the text has `at` tokens."""

    at: int
    token: int

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        return torch.where(torch.arange(len(logits)) == self.token, 99.0, -99.0) if len(tokens) == self.at else logits


def num_tokens(prompt: str) -> int:
    return len(plain().tokenizer.encode(prompt))


def params_with(temperature: float = 0.0, seed: int = 0, **others: Any) -> SamplingParams:
    """Parameters with log-probabilities; a larger `max_tokens` gives a longer answer with the same beginning."""
    return SamplingParams(**{"temperature": temperature, "seed": seed, "max_tokens": LONGEST, "logprobs": 3} | others)


def endless(params: SamplingParams) -> SamplingParams:
    """The parameters without end conditions: an oracle drafts this answer, past the end of the real one."""
    return replace(params, stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=LONGEST, min_tokens=0)


def drafted(
    prompts: Sequence[str | list[int]],
    params: Sequence[SamplingParams],
    errs: Callable[[int], bool] = never,
    past: Callable[[SamplingParams], SamplingParams] = endless,
    shapes: Sequence[Speculation] = SHAPES,
) -> list[RequestOutput]:
    """Answers drafted by an oracle as chains and as trees, in one batch; asserts that they equal plain decoding."""
    expected = plain().generate(prompts, params)
    oracle = Oracle(errs=errs)
    oracle.learn(plain().generate(prompts, [past(q) for q in params]), params)
    llm = LLM(str(TARGET), oracle, dtype="float32", max_num_seqs=32)
    found = [result for shape in shapes for result in llm.generate(prompts, params, speculation=shape)]
    for one, other in zip(found, [*expected] * len(shapes), strict=True):
        assert exact_parts(one) == exact_parts(other)
    assert llm.engine.runner.cache.num_rows == 0
    assert not llm.engine.recovery.strikes, "no round failed"
    assert not oracle.known
    return found


PLACES = {
    "first": (1, Origin.DRAFTED),
    "middle": (2, Origin.DRAFTED),
    "last": (DEPTH, Origin.DRAFTED),
    "recovered": (3, Origin.RECOVERED),
    "bonus": (DEPTH + 1, Origin.BONUS),
    "first of a later round": (DEPTH + 2, Origin.DRAFTED),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_text_ends_correctly_at_any_position_of_a_draft(place: str) -> None:
    """Eos alone, eos with a stop id that does not occur, and stop ids."""
    index, origin = PLACES[place]
    at = num_tokens(PROMPT) + index
    params = [
        params_with(t, seed=index, logits_processors=[ForceToken(at, token)], **others)
        for t in (0.0, 1.0)
        for token, others in ((EOS, {}), (EOS, {"stop_token_ids": [509]}), (300, {"stop_token_ids": [300, 301]}))
    ]
    # The drafted answer goes on past the end: tokens accepted there must not be emitted.
    errs = never if origin is not Origin.RECOVERED else index.__eq__
    num_exact = 0
    for found in drafted([PROMPT] * len(params), params, errs):
        answer = found.outputs[0]
        assert answer.token_ids[-1] == answer.stop_reason
        assert answer.stop_reason in (EOS, 300)
        assert answer.finish_reason == "stop"
        if not set(answer.token_ids[:index]) & {EOS, 300, 301}:
            assert len(answer.token_ids) == index + 1
            assert answer.origins[-1] is origin
            num_exact += 1
    assert num_exact >= 2 * 3, "too many of the texts end by themselves"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_end_a_text_across_tokens_and_rounds(temperature: float, include: bool) -> None:
    """Every border between two tokens of an answer lies within a stop string, short or long."""
    full = plain().generate(PROMPT, params_with(temperature, seed=5))[0].outputs[0]
    decoder = plain().tokenizer.decoder(after=plain().tokenizer.encode(PROMPT))
    pieces = [decoder.push(token) for token in full.token_ids]
    borders = [sum(map(len, pieces[: i + 1])) for i in range(8)]
    params = [
        params_with(
            temperature, seed=5, stop=full.text[max(0, at - reach) : at + reach], include_stop_str_in_output=include
        )
        for at in borders
        for reach in (1, 4)
    ]
    for asked, found in zip(params * 2, drafted([PROMPT] * len(params), params), strict=True):
        answer, (stop,) = found.outputs[0], asked.stop
        at = full.text.index(stop)
        assert answer.text == full.text[: at + len(stop) * include]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_is_respected_within_a_draft(temperature: float) -> None:
    """An end token of high bias is emitted as soon as it is allowed: after exactly `min_tokens` tokens."""
    end_bias = {EOS: 300.0, 400: 80.0}
    params = [params_with(temperature, min_tokens=n, logit_bias=end_bias) for n in range(8)]
    params += [params_with(temperature, min_tokens=n, logit_bias=end_bias, stop_token_ids=[400]) for n in range(8)]
    params += [params_with(temperature, min_tokens=n, stop=["a", "e"]) for n in range(8)]
    # The oracle knows the answer up to its end: without `min_tokens` the answer would differ.
    for asked, found in zip(params * 2, drafted([PROMPT] * len(params), params, past=lambda q: q), strict=True):
        answer = found.outputs[0]
        assert answer.finish_reason == "stop"
        if asked.stop:
            assert len(answer.token_ids) > asked.min_tokens
        else:
            assert len(answer.token_ids) == asked.min_tokens + 1
            assert answer.stop_reason == EOS


def test_drafts_are_no_deeper_than_max_tokens_allows() -> None:
    """No tokens are drafted past `max_tokens`: one round for the prompt, one for the rest of the answer."""
    params = [params_with(t, seed=3, max_tokens=n) for t in (0.0, 1.0) for n in (1, 2, 6)]
    drafted([PROMPT] * len(params), params, shapes=[Speculation(64), Speculation(64, 4, 200)])
    oracle, six = Oracle(), params_with(max_tokens=6)
    oracle.learn(plain().generate([PROMPT], six), [six])
    llm = LLM(str(TARGET), oracle, dtype="float32")
    llm.generate([PROMPT], six, speculation=Speculation(64))
    assert (llm.stats.num_rounds, llm.stats.num_drafted, llm.stats.num_accepted) == (2, 4, 4)


def test_prompts_of_one_token_are_drafted_and_empty_token_lists_refused() -> None:
    params = [params_with(t, seed) for t in (0.0, 1.0) for seed in range(3)]
    drafted([[1], [403]] * 3, params)
    drafted([[1], [403]] * 3, params, errs=lambda place: place % 3 == 0)
    with pytest.raises(InvalidRequest, match="prompt: it is empty") as error:
        plain().generate([[]])
    assert error.value.field == "prompt"
    # Text without a token starts from the first token, if the tokenizer has one.
    assert exact_parts(plain().generate([""], params_with())[0]) == exact_parts(
        plain().generate([[1]], params_with())[0]
    )


@cache
def long_text() -> list[int]:
    """512 tokens of the target's own text, which repeats itself."""
    story = plain().tokenizer.encode((TARGET / "expected_greedy_200.txt").read_text())
    return (story * 4)[:CONTEXT]


@pytest.mark.short("0.0-oracle", "1.0-ngram")
@pytest.mark.parametrize("draft", ["oracle", "ngram", f"model:{SMALL}", f"model:{TARGET}"], ids=lambda d: d[-11:])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_answers_end_at_the_context_limit(draft: str, temperature: float) -> None:
    """Prompts of 505 to 511 tokens in a context of 512; the smaller drafter has 256 positions and cannot follow."""
    prompts = [long_text()[:length] for length in range(505, CONTEXT)]
    params = [params_with(temperature, seed, max_tokens=None, ignore_eos=True) for seed in range(len(prompts))]
    expected = plain().generate(prompts, params)
    oracle = Oracle()
    oracle.learn(expected, params)
    llm = LLM(str(TARGET), oracle if draft == "oracle" else draft, dtype="float32")
    for speculation in (*SHAPES, Speculation(9, 2, 20)):
        found = llm.generate(prompts, params, speculation=speculation)
        assert list(map(exact_parts, found)) == list(map(exact_parts, expected))
    for result in expected:
        assert len(result.prompt_token_ids) + len(result.outputs[0].token_ids) == CONTEXT
        assert result.outputs[0].finish_reason == "length"
    assert (llm.stats.num_drafted == 0) == (draft == f"model:{SMALL}")


def random_ends(seed: int, count: int) -> tuple[list[str], list[SamplingParams]]:
    """Requests with random combinations of end conditions, taken from the answers without them."""
    rng = random.Random(seed)
    prompts = [rng.choice([PROMPT, "The", "", "Lily and Tom went to the park."]) for _ in range(count)]
    bare = [params_with(rng.choice([0.0, 0.8, 1.2]), rng.getrandbits(64)) for _ in range(count)]
    params = []
    for answer, asked in zip(plain().generate(prompts, list(map(endless, bare))), bare, strict=True):
        output, max_tokens = answer.outputs[0], rng.randint(1, LONGEST)
        starts = [rng.randrange(len(output.text)) for _ in range(rng.randint(0, 2))]
        ends: dict[str, Any] = {
            "stop": [output.text[start : start + rng.randint(1, 6)] for start in starts],
            "stop_token_ids": rng.sample(output.token_ids, rng.randint(0, 2)),
            "logit_bias": {EOS: rng.uniform(0, 9)},
            "max_tokens": max_tokens,
            "min_tokens": rng.randint(0, max_tokens),
            "ignore_eos": rng.random() < 0.3,
            "include_stop_str_in_output": rng.random() < 0.5,
        }
        params.append(replace(asked, **ends))
    return prompts, params


def past_ends(params: SamplingParams) -> SamplingParams:
    """Without end conditions where `min_tokens` is 0: an oracle drafts past the end then."""
    return params if params.min_tokens else endless(params)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(100, 160))])
def test_random_combinations_of_end_conditions(seed: int) -> None:
    prompts, params = random_ends(seed, 24)
    # Past an end, under the same bias, an oracle mostly drafts how the target would have gone on.
    shapes = (Speculation(2), Speculation(3, 2, 6), Speculation(7))
    drafted(prompts, params, errs=lambda place: (place * 7 + seed) % 5 == 0, past=past_ends, shapes=shapes)


NUM_PADS = 64


def padded(source: Path, folder: Path) -> Path:
    """The same model with 64 more ids than its tokenizer has, made to be the likeliest of all nearly everywhere.

    The tied rows are long vectors along each axis and against it: one of them agrees with any state.
    """
    shutil.copytree(source, folder)
    table = load_file(folder / "model.safetensors")[EMBEDDING]
    assert len(table) == CONTEXT
    half = torch.eye(table.shape[1])[: NUM_PADS // 2] * 100
    return rewritten(folder, {EMBEDDING: torch.cat([table, half, -half])}, {"vocab_size": CONTEXT + NUM_PADS})


def to_zeros(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """A processor that ignores padding ids."""
    return torch.zeros_like(logits)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(TARGET, tmp_path_factory.mktemp("wide") / "target")


@pytest.fixture(scope="module")
def wide_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded(SMALL, tmp_path_factory.mktemp("wide") / "small")


def padding_params() -> list[SamplingParams]:
    """Requests under which padding ids have the largest logits, or the same as all others."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}, {"repetition_penalty": 1.5}]
    kinds += [{"logits_processors": [to_zeros]}, {"banned_tokens": range(3, 500)}]
    kinds = [kind | {"ignore_eos": True, "max_tokens": 9} for kind in kinds]
    asked = [params_with(t, seed, **kind) for t in (0.0, 1.0, 50.0) for seed, kind in enumerate(kinds)]
    return [*asked, *(params_with(1.0, seed, **kinds[4]) for seed in range(50, 54))]


def test_padding_ids_are_never_generated_even_if_likeliest(wide: Path, wide_small: Path) -> None:
    """The answers and log-probabilities are those of the model without padding."""
    params = padding_params()
    unaware = LLM(str(wide), dtype="float32")
    unaware.engine.num_ids = None
    likeliest = unaware.generate([PROMPT], params_with(0.0, 0, max_tokens=9, ignore_eos=True))[0].outputs[0].token_ids
    assert min(likeliest) >= CONTEXT, "the padding is not likely enough to matter"
    narrow = plain().generate([PROMPT] * len(params), params)
    expected = LLM(str(wide), dtype="float32", max_num_seqs=32).generate([PROMPT] * len(params), params)
    for wide_one, narrow_one in zip(expected, narrow, strict=True):
        assert max(wide_one.outputs[0].token_ids) < CONTEXT
        assert wide_one.outputs[0].token_ids == narrow_one.outputs[0].token_ids
        assert wide_one.outputs[0].logprobs == narrow_one.outputs[0].logprobs
        assert wide_one.prompt_logprobs == narrow_one.prompt_logprobs
    oracle = Oracle()
    oracle.learn(expected, params)
    for draft, shape in ((oracle, 1), (f"model:{wide_small}", 1), (f"model:{SMALL}", 0), (Padding(), 0)):
        llm = LLM(str(wide), draft, dtype="float32", max_num_seqs=32)
        found = llm.generate([PROMPT] * len(params), params, speculation=SHAPES[shape])
        assert list(map(exact_parts, found)) == list(map(exact_parts, expected))
        assert llm.stats.num_drafted > 0
    narrow_drafted = LLM(str(TARGET), f"model:{wide_small}", dtype="float32", max_num_seqs=32, speculation=4)
    found = narrow_drafted.generate([PROMPT] * len(params), params)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]
    assert narrow_drafted.stats.num_accepted > 0


@pytest.mark.short("block")
@pytest.mark.parametrize("verification", ["token", "block"])
def test_padding_ids_are_never_generated_under_rejection_rules(
    wide: Path, wide_small: Path, verification: Verification
) -> None:
    for draft, shape in ((f"model:{wide_small}", 0), (f"model:{wide_small}", 1), (Padding(), 0)):
        llm = LLM(str(wide), draft, dtype="float32", max_num_seqs=32, verification=verification)
        for result in llm.generate([PROMPT] * len(padding_params()), padding_params(), speculation=SHAPES[shape]):
            assert max(result.outputs[0].token_ids) < CONTEXT


class Padding(Oracle):
    """Drafts padding ids only."""

    @override
    def grow(self, row: RowSampling, budget: Budget) -> tuple[list[int], list[int]]:
        return [row.tokens[-1], 512, 575], [-1, 0, 1]


def test_padding_ids_are_refused_in_prompts_and_parameters(wide: Path) -> None:
    llm = LLM(str(wide), dtype="float32")
    for prompt in ([1, CONTEXT], [CONTEXT + NUM_PADS - 1], [CONTEXT + NUM_PADS], [-1]):
        with pytest.raises(InvalidRequest, match=f"{prompt[-1]} is not a token id from 0 to 511"):
            llm.generate([prompt])
    refused: dict[str, Any] = {"logit_bias": {512: 1.0}, "banned_tokens": [512], "stop_token_ids": [575]}
    for field, value in refused.items():
        with pytest.raises(InvalidRequest, match=f"{field}.*below the vocabulary size, 512"):
            llm.generate(PROMPT, params_with(**{field: value}))
    with pytest.raises(InvalidRequest, match="all 512 are banned"):
        llm.generate(PROMPT, params_with(banned_tokens=range(CONTEXT)))

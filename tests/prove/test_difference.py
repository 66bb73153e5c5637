"""The report of a difference: its place, the logits there, and whether rounding can explain it."""

from dataclasses import replace

import pytest
import torch

from forerun.config import Speculation
from forerun.llm import LLM
from forerun.output import CompletionOutput
from forerun.prove.equality import PLAIN, Divergence, ProofRequest, answers, find_difference
from forerun.prove.plain import last_logits, logits_in_chunks, rounding_noise, scores_after
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TARGET), f"model:{SMALL}")


def request(temperature: float) -> ProofRequest:
    return ProofRequest(0, (1, 403, 407), SamplingParams(temperature=temperature, seed=5, max_tokens=12, logprobs=0))


def plain(llm: LLM, asked: ProofRequest) -> CompletionOutput:
    return answers(llm, [asked], 1, PLAIN, lambda what, done: None)[0]


def found(
    llm: LLM, asked: ProofRequest, one: CompletionOutput, other: CompletionOutput, tolerance: float = 0.0
) -> Divergence | None:
    return find_difference(llm, asked, 8, Speculation(3), one, other, tolerance)


def changed(answer: CompletionOutput, position: int, token: int, logprob: float) -> CompletionOutput:
    """The same answer with another token in one place, reported with this log-probability."""
    changed = replace(answer.logprobs[position], logprob=logprob)
    return replace(
        answer,
        token_ids=(*answer.token_ids[:position], token, *answer.token_ids[position + 1 :]),
        logprobs=(*answer.logprobs[:position], changed, *answer.logprobs[position + 1 :]),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_are_what_plain_decoding_takes_the_largest_of(llm: LLM, temperature: float) -> None:
    asked = request(temperature)
    answer = plain(llm, asked)
    for i, token in enumerate(answer.token_ids):
        text = asked.prompt + answer.token_ids[:i]
        scores = scores_after(llm, text, 3, asked.params, last_logits(llm, [text]).float())
        assert scores.argmax() == token


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_place_logits_and_gap(llm: LLM, temperature: float) -> None:
    asked = request(temperature)
    answer = plain(llm, asked)
    text = asked.prompt + answer.token_ids[:7]
    logits = last_logits(llm, [text]).float()
    scores = scores_after(llm, text, 3, asked.params, logits)
    second = int(scores.topk(2).indices[1])
    logprob = float(logits[0].log_softmax(0)[second])
    other = changed(answer, 7, second, logprob)
    difference = found(llm, asked, answer, other)
    assert difference is not None
    assert (difference.position, difference.batch, difference.shape) == (7, 8, Speculation(3))
    assert (difference.plain.token_id, difference.drafted.token_id) == (answer.token_ids[7], second)
    assert difference.plain.logit == logits[0, answer.token_ids[7]].item()
    assert difference.plain.text == llm.tokenizer.surface(answer.token_ids[7])
    gap = float(scores.topk(2).values[0] - scores.topk(2).values[1]) * (temperature or 1)
    assert difference.gap == pytest.approx(gap)
    assert difference.drift_from is None
    assert not difference.explained
    near = found(llm, asked, answer, other, tolerance=1.01 * gap)
    assert near is not None
    assert near.explained
    far = found(llm, asked, answer, other, tolerance=0.99 * gap)
    assert far is not None
    assert not far.explained
    misread = found(llm, asked, answer, changed(answer, 7, second, logprob + 0.5))
    assert misread is not None
    assert misread.drift_from == 7, "the logits it was chosen from were others"


def test_an_answer_that_ends_early(llm: LLM) -> None:
    asked = request(0.7)
    answer = plain(llm, asked)
    short = replace(answer, token_ids=answer.token_ids[:4], logprobs=answer.logprobs[:4])
    difference = found(llm, asked, answer, short)
    assert difference is not None
    assert difference.position == 4
    assert (difference.drafted.token_id, difference.gap, difference.explained) == (None, None, False)


def test_log_probabilities_alone(llm: LLM) -> None:
    asked = request(0.7)
    answer = plain(llm, asked)
    assert found(llm, asked, answer, answer) is None
    off = replace(answer.logprobs[3], logprob=answer.logprobs[3].logprob + 0.25)
    other = replace(answer, logprobs=(*answer.logprobs[:3], off, *answer.logprobs[4:]))
    difference = found(llm, asked, answer, other)
    assert difference is not None
    assert difference.drift == pytest.approx(0.25)
    assert (difference.position, difference.drift_from) == (3, 3)
    assert difference.plain == difference.drafted
    assert not difference.explained
    assert found(llm, asked, answer, other, tolerance=0.13) is None


def test_rounding_is_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none on a CPU; a decoder whose logits depend on the number of rows is found."""
    texts = [(1, 403, 407, 261, 378), (1, 5, 6)]
    assert rounding_noise(llm, texts) == 0
    assert torch.equal(logits_in_chunks(llm, texts[0], 2)[-1], last_logits(llm, texts)[0])
    decoder = llm.engine.runner.decoder
    true = type(decoder).logits
    monkeypatch.setattr(type(decoder), "logits", lambda self, hidden: true(self, hidden) + 1e-3 * len(hidden))
    assert rounding_noise(llm, texts) > 9e-4

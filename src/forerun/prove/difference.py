"""Where a drafted answer differs from the plain one, and whether rounding can explain it.

This file decides how two answers are compared and what is reported about the first position where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from forerun.config import Speculation
from forerun.llm import LLM
from forerun.output import CompletionOutput
from forerun.prove.cells import TokenIds
from forerun.prove.plain import last_logits, scores_after
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """One prompt with its parameters, as it is asked plain and drafted; `number` counts from 0."""

    number: int
    prompt: TokenIds
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token that one of the runs chose, and the target's logit for it in the plain run; None where it had ended."""

    token_id: int | None
    text: str | None
    logit: float | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a drafted answer is not the plain one; `position` counts new tokens from 0.

    `gap` is by how much the plain run preferred its own choice, in units of logits, the draw's noise included; None
    where one answer had ended or could not choose the other's token. `drift` is the largest difference of
    log-probabilities of the tokens before, and `drift_from` where it begins: None if they are the same to the bit.
    Where only log-probabilities differ, both choices are the same.
    """

    request: int
    seed: int
    temperature: float
    batch: int
    shape: Speculation
    position: int
    plain: ChosenToken
    drafted: ChosenToken
    gap: float | None
    drift: float
    drift_from: int | None
    explained: bool


def find_difference(
    llm: LLM,
    request: ProofRequest,
    batch: int,
    shape: Speculation,
    plain: CompletionOutput,
    drafted: CompletionOutput,
    tolerance: float,
) -> Divergence | None:
    """What differs, looked into; None where nothing does. Logits closer than `tolerance` count as equal."""
    pairs = enumerate(zip_longest(plain.token_ids, drafted.token_ids))
    parting = next((i for i, (one, other) in pairs if one != other), None)
    both = zip(plain.logprobs[:parting], drafted.logprobs[:parting], strict=True)
    drifts = [abs(one.logprob - other.logprob) for one, other in both]
    drift, drift_from = max(drifts, default=0.0), next((i for i, drift in enumerate(drifts) if drift), None)
    steady = drift <= 2 * tolerance  # a log-probability is a logit less the logarithm of a sum of logits
    position = drift_from if parting is None else parting
    if position is None or (parting is None and steady):
        return None
    text = request.prompt + plain.token_ids[:position]
    logits = last_logits(llm, [text]).float()
    ours, theirs = (answer.token_ids[position : position + 1] for answer in (plain, drafted))
    if drift_from is None and theirs:  # all agrees before: does it where the choice was made?
        off = drafted.logprobs[position].logprob - float(logits[0].log_softmax(0)[theirs[0]])
        drift_from = position if abs(off) > 2 * tolerance else None
    gap = None
    if ours and theirs:
        scores = scores_after(llm, text, len(request.prompt), request.params, logits)
        scale = 1.0 if request.params.greedy else request.params.temperature
        gap = scale * float(scores[ours[0]] - scores[theirs[0]])
    return Divergence(
        request=request.number,
        seed=request.params.resolve_seed(),
        temperature=request.params.temperature,
        batch=batch,
        shape=shape,
        position=position,
        plain=choice(llm, ours, logits[0].tolist()),
        drafted=choice(llm, theirs, logits[0].tolist()),
        gap=gap if gap is not None and gap < float("inf") else None,
        drift=drift,
        drift_from=drift_from,
        explained=steady and gap is not None and gap <= tolerance,
    )


def choice(llm: LLM, token: TokenIds, logits: list[float]) -> ChosenToken:
    """A chosen token, or none."""
    if not token:
        return ChosenToken(None, None, None)
    return ChosenToken(token[0], llm.tokenizer.surface(token[0]), logits[token[0]])

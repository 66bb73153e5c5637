"""Equality: with and without speculation, the same seeds must give the same tokens and log-probabilities.

Every drafted run is compared with one plain run per temperature, which runs one request at a time. At the first
difference between two answers, the file determines whether rounding can explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest

from forerun.annotations import ProgressCallback
from forerun.config import Speculation
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.output import CompletionOutput
from forerun.prove.cells import TokenIds
from forerun.prove.plain import last_logits, rounding_noise, scores_after
from forerun.prove.workload import ProofWorkload, engine_as
from forerun.sampling.params import SamplingParams

PLAIN = Speculation(depth=0)
NOISE_TEXTS, NOISE_TOKENS = 2, 96


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """A prompt with its sampling parameters; `number` counts from 0."""

    number: int
    prompt: TokenIds
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token chosen by a run, and its logit in the plain run; None if the answer had ended."""

    token_id: int | None
    text: str | None
    logit: float | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a drafted answer from the plain one; `position` counts new tokens from 0.

    `gap`: the difference of the plain run's logits, including the sampling noise, between its token and the other one;
    None if an answer had ended or could not choose the other's token. `drift`: the largest difference of
    log-probabilities before this position; `drift_from`: the position where it starts, None if they are bit-equal. If
    only log-probabilities differ, both tokens are the same. `explained`: whether rounding explains the difference.
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
    """The first difference, analysed; None if there is none. Logits within `tolerance` count as equal."""
    pairs = enumerate(zip_longest(plain.token_ids, drafted.token_ids))
    differs_at = next((i for i, (one, other) in pairs if one != other), None)
    both = zip(plain.logprobs[:differs_at], drafted.logprobs[:differs_at], strict=True)
    drifts = [abs(one.logprob - other.logprob) for one, other in both]
    drift, drift_from = max(drifts, default=0.0), next((i for i, drift in enumerate(drifts) if drift), None)
    is_small = drift <= 2 * tolerance  # a log-probability is a logit minus the log-sum-exp of all logits
    position = drift_from if differs_at is None else differs_at
    if position is None or (differs_at is None and is_small):
        return None
    text = request.prompt + plain.token_ids[:position]
    logits = last_logits(llm, [text]).float()
    ours, theirs = (answer.token_ids[position : position + 1] for answer in (plain, drafted))
    if drift_from is None and theirs:  # nothing differs before this position: compare it with the drafted run's
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
        explained=is_small and gap is not None and gap <= tolerance,
    )


def choice(llm: LLM, token: TokenIds, logits: list[float]) -> ChosenToken:
    """The chosen token with its logit; empty if the answer had ended."""
    if not token:
        return ChosenToken(None, None, None)
    return ChosenToken(token[0], llm.tokenizer.surface(token[0]), logits[token[0]])


@dataclass(frozen=True, slots=True)
class Equality:
    """The result of `num_runs` drafted runs of `num_requests` requests each, with `num_tokens` tokens in total.

    `rounding_noise`: how much the logits of a position depend on chunking and batching. On an `exact_backend` it must
    be 0, and any difference is a fault.
    """

    num_runs: int
    num_requests: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    exact_backend: bool
    rounding_noise: float
    differences: tuple[Divergence, ...]

    @property
    def same_logits(self) -> bool:
        """Whether logits are independent of chunks and batches, if the backend promises it."""
        return not (self.exact_backend and self.rounding_noise > 0)

    @property
    def same_tokens(self) -> bool:
        """Whether rounding explains all differences."""
        return all(difference.explained for difference in self.differences)


def prove_equality(
    llm: LLM, prompts: Sequence[TokenIds], workload: ProofWorkload, progress: ProgressCallback
) -> Equality:
    """Run every temperature plain, and drafted in every batch size and shape, and compare the answers."""
    exact = llm.engine.runner.device.type == "cpu"
    before = llm.stats.num_drafted, llm.stats.num_accepted
    drafted_runs = list(product(workload.batches, workload.shapes))
    step, num_steps = 0, len(workload.temperatures) * (1 + len(drafted_runs))
    noise: float | None = None
    num_tokens, differences = 0, list[Divergence]()

    def report(_what: str, done: float) -> None:
        progress("equality", (step + done) / num_steps)

    for temperature in workload.temperatures:
        common = SamplingParams(temperature=temperature, max_tokens=workload.max_tokens, logprobs=0)
        requests = [
            ProofRequest(i, prompt, replace(common, seed=workload.seed + i)) for i, prompt in enumerate(prompts)
        ]
        plain = answers(llm, requests, 1, PLAIN, report)
        step += 1
        if noise is None:
            texts = [request.prompt + one.token_ids for request, one in zip(requests, plain, strict=True)]
            noise = rounding_noise(llm, [text[:NOISE_TOKENS] for text in texts[:NOISE_TEXTS]])
        tolerance = 0.0 if exact else 2 * noise
        for batch, shape in drafted_runs:
            drafted = answers(llm, requests, batch, shape, report)
            step += 1
            num_tokens += sum(len(answer.token_ids) for answer in drafted)
            for request, one, other in zip(requests, plain, drafted, strict=True):
                difference = find_difference(llm, request, batch, shape, one, other, tolerance)
                differences += [difference] if difference else []
    num_drafted = llm.stats.num_drafted - before[0]
    if num_drafted == 0:
        raise InvalidRequest(
            "draft",
            "it drafted no tokens on these prompts, so nothing would be proven: use longer prompts or answers,"
            " or another drafter",
        )
    return Equality(
        num_runs=len(workload.temperatures) * len(drafted_runs),
        num_requests=len(prompts),
        num_tokens=num_tokens,
        num_drafted=num_drafted,
        num_accepted=llm.stats.num_accepted - before[1],
        exact_backend=exact,
        rounding_noise=noise or 0.0,
        differences=tuple(differences),
    )


def answers(
    llm: LLM, requests: Sequence[ProofRequest], batch: int, shape: Speculation, progress: ProgressCallback
) -> list[CompletionOutput]:
    """The answers to all requests, at this batch size."""
    with engine_as(llm.engine, "coupled", batch):
        prompts = [list(request.prompt) for request in requests]
        results = llm.generate(prompts, [request.params for request in requests], speculation=shape, progress=progress)
    return [result.outputs[0] for result in results]

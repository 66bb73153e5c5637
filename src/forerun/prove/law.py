"""A chi-square test of the law of tokens under `token` and `block` verification against the target's law.

This file decides which contexts are tested, how the engine samples texts in them, and what is reported. The exact law
is computed by plain passes over enumerated prefixes of texts; the cells are chosen from it before sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.config import Speculation, Verification
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.prove.cells import Cells, TokenIds, choose_cells
from forerun.prove.chi_square import LEVEL, holm, smallest_bias
from forerun.prove.plain import last_logits, law_after
from forerun.prove.workload import ProofWorkload, engine_as
from forerun.sampling.params import MOST_SAMPLES, SamplingParams

TOP_K = 8
TEMPERATURES = (1.0, 1.5, 2.0)  # the lowest one at which texts vary enough is used
ENOUGH_CELLS = 16
OPENING_TOKENS = 24
SEED_STEP = 2**32  # between the requests of one test; tests have consecutive seeds
MOST_OPENINGS = 8  # prompts evaluated for the choice


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A logits processor that fixes the first token after the prompt, which the engine never drafts."""

    num_prompt: int
    token: int

    def __call__(self, text: Sequence[int], logits: Tensor) -> Tensor:
        if len(text) > self.num_prompt:
            return logits
        fixed = torch.full_like(logits, -math.inf)
        fixed[self.token] = 0.0
        return fixed


@dataclass(frozen=True, slots=True)
class Opening:
    """A context whose continuations are counted: the start of a prompt, and the fixed token after it."""

    prompt: TokenIds
    token: int
    temperature: float
    cells: Cells

    def params(self, num_texts: int, seed: int) -> list[SamplingParams]:
        """Parameters for `num_texts` texts: the fixed token, the counted ones, and one more that can be drafted."""
        params = SamplingParams(
            temperature=self.temperature,
            top_k=TOP_K,
            max_tokens=self.cells.num_tokens + 2,
            logits_processors=[FirstToken(len(self.prompt), self.token)],
        )
        counts = [min(MOST_SAMPLES, num_texts - first) for first in range(0, num_texts, MOST_SAMPLES)]
        return [replace(params, n=count, seed=seed + i * SEED_STEP) for i, count in enumerate(counts)]


@dataclass(frozen=True, slots=True)
class LawResult:
    """One test: the first `num_tokens` tokens of `num_texts` texts, sampled under a rule, against the exact law.

    `p_value` is 0 if a text of probability 0 was sampled; `adjusted_p` is corrected for the number of tests.
    Probabilities with a relative error of `smallest_bias` (root mean square) would be detected in 95 of 100 runs.
    """

    verification: Verification
    shape: Speculation
    opening: str
    temperature: float
    top_k: int
    num_texts: int
    num_tokens: int
    num_cells: int
    statistic: float
    freedom: int
    p_value: float
    adjusted_p: float
    smallest_bias: float
    num_impossible: int
    num_drafted: int
    num_accepted: int

    @property
    def holds(self) -> bool:
        """Whether the law is not rejected."""
        return self.adjusted_p >= LEVEL


def prove_laws(
    llm: LLM, openings: Sequence[Opening], workload: ProofWorkload, progress: ProgressCallback
) -> tuple[LawResult, ...]:
    """One test for every rule, shape and opening, corrected for their number."""
    tests = [(rule, shape, opening) for opening in openings for rule, shape in workload.laws]
    results = []
    for number, (rule, shape, opening) in enumerate(tests):

        def report(_what: str, done: float, number: int = number) -> None:
            progress("distribution", (number + done) / len(tests))

        params = opening.params(workload.num_texts, workload.seed + number)
        results.append(prove_law(llm, rule, shape, opening, params, report))
    adjusted = holm([result.p_value for result in results])
    return tuple(
        replace(r, adjusted_p=p, smallest_bias=smallest_bias(r.freedom, r.num_texts, len(results)))
        for r, p in zip(results, adjusted, strict=True)
    )


def prove_law(
    llm: LLM,
    rule: Verification,
    shape: Speculation,
    opening: Opening,
    params: Sequence[SamplingParams],
    progress: ProgressCallback,
) -> LawResult:
    """Sample the texts with the engine and test their counts."""
    before = llm.stats.num_drafted, llm.stats.num_accepted
    with engine_as(llm.engine, rule, llm.engine.scheduler.max_num_seqs):
        prompts = [list(opening.prompt) for _ in params]
        answers = llm.generate(prompts, params, speculation=shape, progress=progress)
    token_ids = [completion.token_ids for answer in answers for completion in answer.outputs]
    cells, texts = opening.cells, [text[1:] for text in token_ids]
    num_impossible = sum(text[0] != opening.token or cells.excludes(text[1:]) for text in token_ids)
    tested = cells.test(texts)
    return LawResult(
        verification=rule,
        shape=shape,
        opening=llm.tokenizer.decode([*opening.prompt, opening.token], skip_special_tokens=True),
        temperature=opening.temperature,
        top_k=TOP_K,
        num_texts=len(texts),
        num_tokens=cells.num_tokens,
        num_cells=len(cells.chances),
        statistic=tested.statistic,
        freedom=tested.freedom,
        p_value=0.0 if num_impossible else tested.p_value,
        adjusted_p=1.0,
        smallest_bias=0.0,
        num_impossible=num_impossible,
        num_drafted=llm.stats.num_drafted - before[0],
        num_accepted=llm.stats.num_accepted - before[1],
    )


def choose_openings(llm: LLM, prompts: Sequence[TokenIds], workload: ProofWorkload) -> list[Opening]:
    """The prompts whose continuations vary most, according to their law, at the lowest sufficient temperature."""
    best: list[Opening] = []
    for temperature in TEMPERATURES:
        at_this = sorted(openings_at(llm, prompts, workload, temperature), key=num_cells, reverse=True)
        best = max(best, at_this, key=lambda openings: num_cells(openings[0]) if openings else 0)
        if best and num_cells(best[0]) >= ENOUGH_CELLS:
            break
    if not best:
        problem = f"of {workload.num_texts} texts, no two prefixes are expected ten times each"
        raise InvalidRequest("num_texts", f"{problem}: use more texts, or other prompts")
    return best[: workload.num_openings]


def num_cells(opening: Opening) -> int:
    """The number of cells of an opening."""
    return len(opening.cells.chances)


def openings_at(
    llm: LLM, prompts: Sequence[TokenIds], workload: ProofWorkload, temperature: float
) -> Iterator[Opening]:
    """The starts of the first prompts as openings, if they have enough cells."""
    most = min(OPENING_TOKENS, llm.requests.max_length // 2)
    params = SamplingParams(temperature=temperature, top_k=TOP_K, seed=workload.seed)
    for prompt in list(dict.fromkeys(prompt[:most] for prompt in prompts))[:MOST_OPENINGS]:
        logits = last_logits(llm, [prompt])[0, : llm.requests.num_ids]
        logits[list(llm.requests.eos_ids)] = -math.inf
        token = int(logits.argmax())

        def laws(
            texts: Sequence[TokenIds], start: TokenIds = (*prompt, token), num_prompt: int = len(prompt)
        ) -> list[dict[int, float]]:
            table = law_after(llm, [start + text for text in texts], num_prompt, params).tolist()
            return [{v: p for v, p in enumerate(row) if p > 0} for row in table]

        cells = choose_cells(laws, workload.num_texts, llm.requests.eos_ids)
        if cells.enough:
            yield Opening(prompt, token, temperature, cells)

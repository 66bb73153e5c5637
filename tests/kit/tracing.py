"""Traced answers for several test modules: every drafter, verification mode and shape of draft."""

from functools import cache

import pytest

from forerun.config import Speculation, Verification
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.trace.record import trace
from forerun.trace.values import Trace
from kit.checkpoints import SMALL, TARGET

MODEL, CHAIN, TREE = f"model:{SMALL}", Speculation(4), Speculation(3, 2, 8)
PROMPT = "Tom and Lily went to the park. Tom and"
TOP_K = 40
Case = tuple[str | None, Verification, Speculation, float]  # drafter, verification, speculation, temperature
CASES: list[Case] = [
    (MODEL, "coupled", CHAIN, 1.0),
    (MODEL, "coupled", TREE, 0.8),
    (MODEL, "coupled", CHAIN, 0.0),
    (MODEL, "coupled", TREE, 0.0),
    ("ngram", "coupled", CHAIN, 0.4),
    (None, "coupled", CHAIN, 1.0),
    (MODEL, "token", CHAIN, 1.0),
    (MODEL, "token", TREE, 1.0),
    (MODEL, "token", CHAIN, 0.0),
    ("ngram", "token", CHAIN, 0.4),
    (MODEL, "block", Speculation(7), 0.8),
    (MODEL, "block", TREE, 1.0),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{str(c[0])[:5]}-{c[1]}-{c[2].depth}x{c[2].width}-{c[3]}")


@cache
def llm_of(draft: str | None, verification: Verification = "coupled") -> LLM:
    return LLM(str(TARGET), draft, dtype="float32", verification=verification, max_num_seqs=1)


def params_with(temperature: float, seed: int, **others: object) -> SamplingParams:
    options = {"temperature": temperature, "seed": seed, "top_k": TOP_K, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(**(options | others))  # type: ignore[arg-type]


@cache
def traces(case: Case) -> list[Trace]:
    """The traces of two answers of a case."""
    draft, verification, speculation, temperature = case
    llm = llm_of(draft, verification)
    return [trace(llm, PROMPT, params_with(temperature, seed), speculation) for seed in (1, 2)]

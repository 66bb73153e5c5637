"""Every drafter on the GPU, with one product: the output is plain decoding's there, token for token."""

from functools import cache
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.config import Speculation
from kit.checkpoints import TARGET
from kit.texts import PROMPTS
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, as_draft

PARAMS = [
    SamplingParams(temperature=t, seed=seed, max_tokens=24, ignore_eos=True) for seed, t in enumerate((1, 0, 1, 1, 0))
]
OPTIONS: dict[str, Any] = {"device": "cuda", "one_gemm": True, "max_model_len": 256}

NEVER_ACCEPTED = {"model:experts"}  # random weights: none of 1,155 draft tokens was accepted on a GPU


def answers(llm: LLM, speculation: bool | Speculation) -> list[tuple[int, ...]]:
    with unchecked():
        found = llm.generate(PROMPTS[: len(PARAMS)], PARAMS[: len(PROMPTS)], speculation=speculation)
    return [result.outputs[0].token_ids for result in found]


@cache
def plain(dtype: str) -> list[tuple[int, ...]]:
    return answers(LLM(str(TARGET), dtype=dtype, **OPTIONS), False)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        llm = LLM(str(TARGET), as_draft(name), dtype=dtype, **OPTIONS)
        for speculation in (Speculation(3), Speculation(3, 2, 8)):
            assert answers(llm, speculation) == plain(dtype), (dtype, speculation)
        assert llm.stats.num_drafted > 0
        assert llm.stats.num_accepted > 0 or name in NEVER_ACCEPTED

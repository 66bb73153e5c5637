"""float16 is served on a CPU by torch, and a row's bits are its own there as in every other format."""

from functools import cache
from pathlib import Path

import torch

from forerun import LLM, SamplingParams
from forerun.output import RequestOutput

TARGET = Path(__file__).resolve().parents[1] / "data" / "stories260k"
PROMPTS = ["Once upon a time", "The dog ran and ran and", "Lily", "One day a big cat sat on the mat. The cat"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=3, ignore_eos=True)


@cache
def llm() -> LLM:
    return LLM(str(TARGET), "ngram", dtype=torch.float16, max_num_seqs=4, chunk_tokens=7)


def answered(results: list[RequestOutput]) -> list[object]:
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def test_answers_in_float16_are_the_same_to_the_bit_in_any_company() -> None:
    assert llm().format.startswith("float16")
    together = answered(llm().generate(PROMPTS, PARAMS, speculation=6, use_tqdm=False))
    alone = [answered(llm().generate(p, PARAMS, speculation=False, use_tqdm=False))[0] for p in PROMPTS]
    assert together == alone


def test_float16_is_no_other_format_in_disguise() -> None:
    logits = {}
    for dtype in ("half", "float32"):
        other = LLM(str(TARGET), dtype=dtype, max_num_seqs=1)
        logits[dtype] = other.generate("Once upon a time", PARAMS, use_tqdm=False)[0].outputs[0].logprobs[0]
        assert other.engine.runner.decoder.dtype == (torch.float16 if dtype == "half" else torch.float32)
    assert logits["half"] != logits["float32"]

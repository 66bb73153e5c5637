"""Every family's layers on the GPU: the CPU's logits nearly, and with one_gemm drafted tokens to the bit."""

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.config import Speculation
from forerun.models.families import FAMILIES
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from kit.assertions import tokens_of
from kit.sparse import write_architecture

PROMPTS = ["Once upon a time", "The little dog", "One day, Tim", "Lily and her mom"]
TREE = [5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 2]
LENGTH = 60


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_nearly_those_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    folder = str(write_architecture(tmp_path / "target", architecture))
    options = ({"kernels": "torch"}, {"device": "cuda", "one_gemm": True})
    plain, on_gpu = (
        Blueprint.of(folder, dtype="float32", **each).load(LENGTH + 20, max_model_len=LENGTH + 20) for each in options
    )
    for tokens, parents in ((list(range(3, 3 + LENGTH)), None), TREE):
        read = Read(0, tokens, parents, range(len(tokens)), scratch=0 if parents is None else 3)
        wanted, found = plain.read([read]).logits, on_gpu.read([read]).logits.cpu()
        assert (wanted - found).abs().max() <= 2e-3
        for runner in (plain, on_gpu):
            runner.keep([0], [range(LENGTH) if parents is None else [0, 2, 5]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Gemma2", "Cohere2", "Olmo2", "GptOss", "Qwen2Moe", "Qwen3Moe"])
def test_with_one_gemm_drafted_tokens_are_those_of_plain_decoding(family: str, dtype: str, tmp_path: Path) -> None:
    folder = str(write_architecture(tmp_path / "target", f"{family}ForCausalLM"))
    params = [SamplingParams(temperature=t, seed=3, max_tokens=32, ignore_eos=True) for t in (0, 1, 0.8, 1.5)]

    def made(draft: str | None, shape: int | Speculation) -> LLM:
        return LLM(folder, draft, dtype=dtype, device="cuda", one_gemm=True, speculation=shape, max_model_len=128)

    wanted = tokens_of(made(None, 1).generate(PROMPTS, params))
    for shape in (3, Speculation(depth=3, width=2)):
        llm = made("early-exit:2", shape)
        assert tokens_of(llm.generate(PROMPTS, params)) == wanted
        assert llm.stats.num_accepted > 0

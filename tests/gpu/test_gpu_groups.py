"""Weights in groups on the GPU: they are what they stand for, rows are strangers, and drafted tokens are plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import Quantization, Speculation
from forerun.models.backends.gpu.ops import TritonOps, load_kernels
from kit.checkpoints import TARGET
from kit.quantized_folders import write_mxfp4
from kit.sparse import write_sparse
from models.group_laws import FORMS, check_numbers, check_products, check_products_of_experts
from models.kernel_laws import check_experts, check_runs_have_the_bits_of_splits, random_case

RUNS = [
    {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64, "lengths": (0, 1500)},
    {"heads": 3, "kv_heads": 1, "head_dim": 24, "lengths": (600, 0), "window": 300, "sinks": True},
    {"heads": 4, "kv_heads": 2, "head_dim": 256, "lengths": (700,), "cap": 5.0},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unpacked_numbers_are_those_of_the_format(form: tuple[str, int, int, bool]) -> None:
    check_numbers(form, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_is_that_of_the_weights_and_its_rows_are_independent(
    form: tuple[str, int, int, bool], dtype: torch.dtype
) -> None:
    biased = FORMS.index(form) % 2 == (dtype == torch.float32)  # kernels compile for seconds, and minutes count there
    check_products(form, biased, "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_experts_have_the_bits_of_their_experts_layers(
    form: tuple[str, int, int, bool], dtype: torch.dtype
) -> None:
    check_products_of_experts(form, FORMS.index(form) % 2 == (dtype != torch.float32), "cuda", dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_quantised_experts_follow_their_definition_and_rows_are_independent(
    quantize: Quantization, dtype: torch.dtype, tolerance: float
) -> None:
    check_experts(TritonOps(load_kernels()), "cuda", dtype, tolerance, quantize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(len(RUNS)))
def test_attention_over_long_reads_has_the_bits_of_single_rows(seed: int, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = RUNS[seed] | {"branching": 0.0, "most_nodes": 150}
    check_runs_have_the_bits_of_splits(
        TritonOps(load_kernels()), random_case(seed, dtype=dtype, device="cuda", **shape)
    )


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_with_one_gemm_drafted_tokens_are_those_of_plain_decoding(quantize: str) -> None:
    check_drafted(str(TARGET), f"model:{TARGET}", dtype="bfloat16", quantize=quantize)


@pytest.mark.parametrize("quantize", [None, "int8", "int4", "fp8"])
def test_with_one_gemm_drafted_tokens_of_quantised_experts_are_those_of_plain_decoding(
    quantize: str | None, tmp_path: Path
) -> None:
    """In captured passes, which serve any choice; as they are stored, in MXFP4, and rounded."""
    source = write_sparse(tmp_path / "source", "gpt_oss", intermediate_size=96, torch_dtype="bfloat16")
    if quantize is None:
        write_mxfp4(source, tmp_path / "stored")
    check_drafted(str(source if quantize else tmp_path / "stored"), "early-exit:2", quantize=quantize)


def check_drafted(model: str, draft: str, **options: Any) -> None:
    """One sampled and one greedy text, with and without drafts."""
    options |= {"device": "cuda", "one_gemm": True, "max_model_len": 256}
    params = [SamplingParams(temperature=t, seed=3, max_tokens=64) for t in (0, 1)]
    prompts = ["Once upon a time", "Lily and her mom"]
    plain, drafted = LLM(model, **options), LLM(model, draft, **options)
    for each in params:
        answers = [
            [c.token_ids for r in llm.generate(prompts, each, speculation=Speculation(3)) for c in r.outputs]
            for llm in (plain, drafted)
        ]
        assert answers[0] == answers[1]
    assert drafted.stats.num_accepted > 0

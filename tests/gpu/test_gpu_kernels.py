"""The kernels on the GPU: attention is torch's attention, and a row has the bits that it would have alone."""

import pytest
import torch
from torch.nn import functional

from forerun.models.device_linear import OneGemmLinear
from forerun.models.ops import TorchOps, TritonOps, load_kernels
from models.kernel_laws import check_attention, check_row_work, check_rows_are_strangers, random_case, scattered

SHAPES = [
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16},
    {"heads": 3, "kv_heads": 3, "head_dim": 24, "window": 7},
    {"heads": 7, "kv_heads": 1, "head_dim": 64, "block_size": 8, "window": 300, "lengths": (400, 3)},
    {"heads": 8, "kv_heads": 2, "head_dim": 80, "lengths": (255, 256, 0, 1000)},
    {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64, "lengths": (5000, 17), "most_nodes": 60},
    {"heads": 4, "kv_heads": 4, "head_dim": 128, "lengths": (250, 600), "branching": 0.0, "most_nodes": 20},
]
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(load_kernels())


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_attention_is_torchs(ops: TritonOps, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    case = random_case(seed, dtype=dtype, device="cuda", **SHAPES[seed])
    check_attention(ops, case, tolerance)
    check_attention(ops, scattered(case, seed), tolerance)
    check_attention(TorchOps(), case, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_a_node_of_a_tree_attends_to_the_bit_as_plain_decoding_would(
    ops: TritonOps, seed: int, dtype: torch.dtype
) -> None:
    check_rows_are_strangers(ops, random_case(seed, dtype=dtype, device="cuda", **SHAPES[seed]))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_row_work_is_torchs(ops: TritonOps, dtype: torch.dtype, tolerance: float) -> None:
    check_row_work(ops, "cuda", dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_gemm_is_a_linear_layer_whose_rows_are_strangers(
    dtype: torch.dtype, tolerance: float, biased: bool
) -> None:
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1000, generator=noise).to("cuda", dtype) for n in (70, 520))
    bias = torch.randn(520, generator=noise).to("cuda", dtype) if biased else None
    layer = OneGemmLinear(load_kernels(), weight, bias)
    together = layer(x)
    assert (together - functional.linear(x, weight, bias)).abs().max() <= tolerance
    for rows in (1, 2, 5, 16, 33):
        assert torch.equal(layer(x[:rows]), together[:rows])
        assert torch.equal(layer(x[-rows:]), together[-rows:])

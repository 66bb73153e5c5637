"""The kernels on the GPU: attention is torch's attention, and a row has the bits that it would have alone."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from forerun.device import running_sum, softmax
from forerun.models.backends.gpu.backend import OneGemmLinear, tiles_agree
from forerun.models.backends.gpu.ops import TorchOps, TritonOps, load_kernels
from forerun.sampling.transforms import keep_nucleus
from models.kernel_laws import (
    check_activations,
    check_attention,
    check_experts,
    check_norms,
    check_rotation,
    check_rows_are_independent,
    check_tiles_of_experts,
    random_case,
    scattered,
)

SHAPES: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16},
    {"heads": 3, "kv_heads": 3, "head_dim": 24, "window": 7},
    {"heads": 7, "kv_heads": 1, "head_dim": 64, "block_size": 8, "window": 300, "lengths": (400, 3)},
    {"heads": 8, "kv_heads": 2, "head_dim": 80, "lengths": (255, 256, 0, 1000)},
    {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64, "lengths": (5000, 17), "most_nodes": 60},
    {"heads": 4, "kv_heads": 4, "head_dim": 128, "lengths": (250, 600), "branching": 0.0, "most_nodes": 20},
    {"heads": 4, "kv_heads": 2, "head_dim": 32, "window": 9, "cap": 2.0, "lengths": (260, 3)},
    {"heads": 8, "kv_heads": 1, "head_dim": 64, "window": 128, "sinks": True, "lengths": (300, 0)},
    {"heads": 4, "kv_heads": 2, "head_dim": 256, "sinks": True, "cap": 50.0, "lengths": (300, 7)},
]
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(load_kernels())


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_attention_is_that_of_torch(ops: TritonOps, seed: int, dtype: torch.dtype, tolerance: float) -> None:
    case = random_case(seed, dtype=dtype, device="cuda", **SHAPES[seed])
    check_attention(ops, case, tolerance)
    check_attention(ops, scattered(case, seed), tolerance)
    check_attention(TorchOps(), case, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_attention_of_a_tree_node_has_the_bits_of_plain_decoding(ops: TritonOps, seed: int, dtype: torch.dtype) -> None:
    check_rows_are_independent(ops, random_case(seed, dtype=dtype, device="cuda", **SHAPES[seed]))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_experts_follow_their_definition_and_rows_are_independent(
    ops: TritonOps, dtype: torch.dtype, tolerance: float
) -> None:
    check_experts(ops, "cuda", dtype, tolerance)


def test_tiles_of_experts_agree(ops: TritonOps) -> None:
    check_tiles_of_experts(ops, "cuda", torch.bfloat16, 300)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_row_operations_follow_their_definition(ops: TritonOps, dtype: torch.dtype, tolerance: float) -> None:
    for check in (check_norms, check_rotation, check_activations):
        check(ops, "cuda", dtype, tolerance)
        check(TorchOps(), "cuda", dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1000, 520), (4096, 14_336)])
def test_one_gemm_is_a_linear_layer_with_independent_rows(
    dtype: torch.dtype, tolerance: float, biased: bool, inputs: int, outputs: int
) -> None:
    """Over the sizes at which other tiles are taken."""
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=noise).to("cuda", dtype) for n in (300, outputs))
    bias = torch.randn(outputs, generator=noise).to("cuda", dtype) if biased else None
    assert tiles_agree(torch.device("cuda", 0)), "then the smallest tile serves all, slower: say so in docs/gpu.md"
    layer = OneGemmLinear(load_kernels(), weight, bias, tiled=True)
    together = layer(x)
    assert (together - functional.linear(x, weight, bias)).abs().max() <= tolerance * (inputs / 1000) ** 0.5
    for rows in (1, 2, 5, 16, 17, 33, 64, 65, 128, 299):
        assert torch.equal(layer(x[:rows]), together[:rows])
        assert torch.equal(layer(x[-rows:]), together[-rows:])


@pytest.mark.parametrize("columns", [512, 4096, 50_257, 128_256])
def test_sampling_operations_on_a_row_have_the_same_bits_in_any_batch(columns: int) -> None:
    """torch's own cumsum has not: an H100 gave other bits for one row than for two."""
    logits = torch.randn(40, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 3
    top_p = torch.linspace(0.1, 0.99, 40, device="cuda")[:, None]
    whole = running_sum(softmax(logits)), keep_nucleus(logits, top_p), softmax(logits, log=True)
    for rows in (1, 2, 3, 5, 16, 33):
        part = logits[:rows].clone()
        alone = running_sum(softmax(part)), keep_nucleus(part, top_p[:rows]), softmax(part, log=True)
        assert [torch.equal(a, w[:rows]) for a, w in zip(alone, whole, strict=True)] == [True] * 3


def test_a_row_at_an_odd_index_has_the_bits_of_an_even_one() -> None:
    """Rows of an odd width begin at other alignments, by which torch's own softmax adds up otherwise."""
    rows = torch.randn(50_257, device="cuda").expand(7, -1).contiguous()
    for body in (lambda x: running_sum(softmax(x)), softmax, lambda x: softmax(x, log=True)):
        found = body(rows)
        assert torch.equal(found, found[:1].expand(7, -1))

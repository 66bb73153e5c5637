"""The kernels on a CPU, in Triton's interpreter: attention is torch's attention, and rows do not know each other."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from forerun.config import Quantization
from forerun.device import Placement
from forerun.models.backends.gpu.backend import OneGemmLinear
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.groups import PackedExperts
from forerun.models.backends.gpu.ops import Ops, TorchOps, TritonOps, load_kernels
from forerun.models.backends.gpu.tiles import (
    FEW_ROWS,
    LARGE,
    NARROW,
    SLENDER,
    SLIM,
    SMALLEST,
    SOME_ROWS,
    TILES,
    WIDE,
    Tile,
    tile_for,
)
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from kit.checkpoints import TARGET
from kit.interpreted import products  # noqa: F401 (a fixture)
from kit.quantized_folders import write_mxfp4
from kit.sparse import write_sparse
from models.kernel_laws import (
    EXPERTS,
    check_activations,
    check_attention,
    check_experts,
    check_norms,
    check_rotation,
    check_rows_are_independent,
    check_runs_have_the_bits_of_splits,
    check_tiles_of_experts,
    random_case,
    scattered,
)

SHAPES: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16},
    {"heads": 3, "kv_heads": 3, "head_dim": 24, "block_size": 64, "window": 7},
    {"heads": 7, "kv_heads": 1, "head_dim": 64, "block_size": 8, "window": 300, "lengths": (400, 3)},
    {"heads": 8, "kv_heads": 2, "head_dim": 80, "lengths": (255, 256, 0)},
    {"heads": 2, "kv_heads": 2, "head_dim": 128, "lengths": (513,), "most_nodes": 40},
    {"heads": 4, "kv_heads": 1, "head_dim": 32, "lengths": (250, 600), "branching": 0.0, "most_nodes": 20},
    {"heads": 4, "kv_heads": 2, "head_dim": 32, "window": 9, "cap": 2.0, "lengths": (260, 3)},
    {"heads": 8, "kv_heads": 1, "head_dim": 64, "window": 128, "sinks": True, "lengths": (300, 0)},
    {"heads": 4, "kv_heads": 2, "head_dim": 256, "sinks": True, "cap": 50.0, "lengths": (300, 7)},
]


RUNS = [
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "lengths": (0, 260, 3)},
    {"heads": 3, "kv_heads": 1, "head_dim": 24, "lengths": (600, 0), "window": 300, "sinks": True},
    {"heads": 2, "kv_heads": 2, "head_dim": 64, "lengths": (230,), "cap": 5.0},
]


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(load_kernels())


@pytest.mark.short("7")
@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_attention_is_that_of_torch_over_random_trees_in_ragged_batches(ops: TritonOps, seed: int) -> None:
    case = random_case(seed, **SHAPES[seed])
    for made in (ops, TorchOps()):
        check_attention(made, case, 1e-5)
        check_attention(made, scattered(case, seed), 1e-5)


def test_attention_in_bfloat16_differs_by_its_rounding(ops: TritonOps) -> None:
    check_attention(ops, random_case(5, head_dim=64, dtype=torch.bfloat16), 2e-2)


@pytest.mark.short("0-dtype0")
@pytest.mark.parametrize(
    ("seed", "dtype"),
    [(0, torch.float32), (1, torch.float32), (5, torch.bfloat16), (6, torch.float32), (7, torch.bfloat16)],
)
def test_attention_of_a_tree_node_has_the_bits_of_plain_decoding(ops: TritonOps, seed: int, dtype: torch.dtype) -> None:
    check_rows_are_independent(ops, random_case(seed, dtype=dtype, **SHAPES[seed]))


def test_the_check_of_independent_rows_can_fail(ops: TritonOps) -> None:
    class Sociable(TritonOps):
        """Adds what the first row holds, rounded away nearly everywhere."""

        @override
        def attend(self, query, keys, values, where, window, sinks=None, cap=None):
            out = super().attend(query, keys, values, where, window, sinks, cap)
            return out + 1e-7 * out[:1]

    with pytest.raises(AssertionError, match="row"):
        check_rows_are_independent(Sociable(ops.kernels), random_case(0, lengths=(0, 5), most_nodes=3))


@pytest.mark.short("1-dtype1")
@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.bfloat16)])
def test_attention_over_long_reads_has_the_bits_of_single_rows(ops: TritonOps, seed: int, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = RUNS[seed] | {"branching": 0.0, "most_nodes": 40}
    check_runs_have_the_bits_of_splits(ops, random_case(seed, dtype=dtype, **shape))


@pytest.mark.short("None-dtype0-1e-05-normalised", "None-dtype0-1e-05-shared", "None-dtype0-1e-05-clamped")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # of unused pairs
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])  # it cuts, not rounds
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts_follow_their_definition_and_rows_are_independent(
    ops: TritonOps, quantize: Quantization | None, dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    check_experts(ops, "cpu", dtype, tolerance, quantize, [kind])


@pytest.mark.full
def test_tiles_of_experts_agree(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.backends.gpu.experts.MANY_ROWS", 1)
    check_tiles_of_experts(ops, "cpu", torch.float32, 70)


@pytest.mark.short("dtype0-1e-05")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])  # it cuts, not rounds
def test_row_operations_follow_their_definition(ops: TritonOps, dtype: torch.dtype, tolerance: float) -> None:
    either: tuple[Ops, Ops] = (ops, TorchOps())
    for made, check in product(either, (check_norms, check_rotation, check_activations)):
        check(made, "cpu", dtype, tolerance)


@pytest.mark.full
def test_attention_of_some_heads_at_a_time_has_the_same_bits(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(3, **SHAPES[3])
    at_once = case.attended(ops)
    monkeypatch.setattr("forerun.models.backends.gpu.ops.SCRATCH_BYTES", 1)
    assert torch.equal(case.attended(ops), at_once)


@pytest.mark.short("False-tile3-33", "True-tile0-70", "True-tile5-70", "True-tile7-33")
@pytest.mark.parametrize("rows", [1, 5, 33, 70])
@pytest.mark.parametrize("tile", [SMALLEST, *TILES])
@pytest.mark.parametrize("biased", [False, True])
def test_one_gemm_is_a_linear_layer_with_independent_rows(rows: int, tile: Tile, biased: bool) -> None:
    noise = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 200, generator=noise), torch.randn(70, 200, generator=noise)
    bias = torch.randn(70, generator=noise) if biased else None
    layer = OneGemmLinear(load_kernels(), weight, bias)
    together = layer.product(x, tile)
    assert (together - functional.linear(x, weight, bias)).abs().max() <= 1e-4
    for i in range(0, rows, 1 + rows // 8):
        assert torch.equal(layer.product(x[i : i + 1], tile)[0], together[i])


def test_tiles_grow_with_the_rows_as_long_as_there_are_enough() -> None:
    """What cards were fastest with, of the layers of Llama 3 8B."""
    best = {(16, 4096): FEW_ROWS, (32, 4096): SOME_ROWS, (64, 4096): SLENDER, (64, 6144): SLIM, (64, 28672): WIDE,
            (128, 4096): NARROW, (128, 6144): NARROW, (128, 28672): LARGE, (128, 128256): LARGE, (32, 1024): FEW_ROWS,
            (512, 4096): LARGE, (512, 28672): LARGE}  # fmt: skip
    assert {shape: tile_for(*shape) for shape in best} == best
    for rows in range(1, 2049):
        for outputs in (8, 1000, 4096, 151_936):
            tile = tile_for(rows, outputs)
            assert tile is FEW_ROWS or (rows > tile.rows // 2 and tile.num_programs(rows, outputs) >= 64)


ONE_GEMM, TEXT = Placement(torch.device("cpu"), fixed=True, one_gemm=True), [403, 407, 261, 378]


@pytest.mark.full
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_model_reads_chunks_and_trees_to_the_same_bits(ops: TritonOps, quantize: Quantization | None) -> None:
    """A text read token by token, at once, and as a path of a tree in a batch has the same logits."""
    decoder = Blueprint.of(str(TARGET), dtype="float32", quantize=quantize, device=ONE_GEMM).load(64).decoder
    decoder.layers = decoder.layers[:2]
    check_reads(ops, decoder)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # of unused pairs
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "fp8"])
def test_quantised_experts_read_chunks_and_trees_to_the_same_bits(
    ops: TritonOps, quantize: Quantization | None, tmp_path: Path
) -> None:
    """Those of gpt-oss as they are stored, in MXFP4, and experts that are rounded: the logits of torch's operators."""
    source = write_sparse(tmp_path / "source", "gpt_oss", num_hidden_layers=1, intermediate_size=64)
    if quantize is None:
        write_mxfp4(source, tmp_path / "stored")
    folder = str(source if quantize else tmp_path / "stored")
    placements = ONE_GEMM, replace(ONE_GEMM, one_gemm=False)
    decoder, by_torch = (Blueprint.of(folder, quantize=quantize, device=each).load(64).decoder for each in placements)
    stacked = decoder.layers[0].mlp.stacked
    assert stacked is not None
    assert {each.weight.kind for each in (stacked.gate_up, stacked.down) if isinstance(each, PackedExperts)} == {
        {None: "E2M1", "int8": "INT8", "int4": "INT4", "fp8": "E4M3"}[quantize]
    }
    found = check_reads(ops, decoder)
    wanted = GraphRunner.of(by_torch, 128, block_size=16).read([Read(0, TEXT, judged=range(4))]).logits
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert 4 * 3 < decoder.num_experts_read <= 4 * 3 + 2 * 8  # of four rows, and of a chunk and a tree at most


def check_reads(ops: TritonOps, decoder: Decoder) -> Tensor:
    """The logits of TEXT, which are the same bits however it is read."""

    def fresh() -> GraphRunner:
        runner = GraphRunner.of(decoder, 128, block_size=16)
        assert isinstance(runner, GraphRunner)
        runner.ops = ops
        return runner

    single, at_once, tree = fresh(), fresh(), fresh()
    wanted = []
    for token in TEXT:
        wanted.append(single.read([Read(0, [token], judged=[0])]).logits)
        single.keep([0], [[0]])
    assert torch.equal(at_once.read([Read(0, TEXT, judged=range(4))]).logits, torch.cat(wanted))
    tokens, parents = [TEXT[0], 9, TEXT[1], 8, TEXT[2], TEXT[3]], [-1, 0, 0, 2, 2, 4]
    reads = [Read(1, [5, 6, 7]), Read(0, tokens, parents, judged=[0, 2, 4, 5])]
    assert torch.equal(tree.read(reads).logits, torch.cat(wanted))
    tree.keep([0], [[0, 2, 4, 5]])
    runs = [(r.cache.start(0), r.cache.keys[:2]) for r in (single, tree)]
    kept = [keys[:, :, start : start + 4] for start, keys in runs]
    assert torch.equal(*kept)
    return torch.cat(wanted)

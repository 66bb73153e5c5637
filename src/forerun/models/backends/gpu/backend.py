"""GpuBackend: linear layers on a GPU, by cuBLAS or by batch-invariant Triton kernels.

This file chooses between them. cuBLAS selects a kernel, and with it the order of summation, by the number of rows, so a
token alone and the same token in a batch differ in their last bits. `OneGemmLinear` sums over the inputs in one fixed
order, so the bits of a row depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.config import Quantization
from forerun.device import Placement, stages
from forerun.models.backends.base import DecoderParts
from forerun.models.backends.gpu.experts import ExpertWeights, LibraryLinear
from forerun.models.backends.gpu.fixed import FixedExecutor
from forerun.models.backends.gpu.groups import GroupLinear, PackedExperts, PackedGroups
from forerun.models.backends.gpu.ops import load_kernels, ops_for
from forerun.models.backends.gpu.tiles import SMALLEST, TILES, Tile, choose_tiles, fitting, rows_measured, tile_for
from forerun.models.backends.torch_cpu.backend import TorchBackend
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.backends.torch_cpu.linear import CappedLinear
from forerun.models.backends.torch_cpu.quantized import GROUP, quantize_groups, quantize_rows
from forerun.models.layer import Bias, ExpertLayers, GatedMlp, Linear, StackedExperts, WeightMatrix

AT_ONCE = 1 << 24  # weights that are quantized at a time: bounds the float32 copies
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
TRIAL = (160, 256, 1024)  # rows, outputs and inputs of the product that compares tile sizes


class OneGemmLinear:
    """A linear layer by a Triton kernel that sums over the inputs in one order for any number of rows.

    `tiled`: larger tiles are used for more rows, after `tiles_agree` has checked that all tiles give the same bits.
    """

    def __init__(self, kernels: Any, weight: WeightMatrix, bias: Bias | None = None, tiled: bool = False) -> None:
        self.kernels = kernels
        self.weight = weight.contiguous()
        self.bias = bias
        self.tiled = tiled and weight.dtype == torch.bfloat16
        self.tiles: dict[int, Tile] = {}
        self.shape, self.num_bytes = (len(weight), weight.shape[1]), weight.nbytes
        self.matrix = f"{self.shape[0]} x {self.shape[1]}"

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        with torch.cuda.device_of(x):  # kernels are launched on the current one
            return self.product(x, self.tile_for(len(x)))

    def tile_for(self, rows: int) -> Tile:
        """The tile for a product of this many rows."""
        if not self.tiled:
            return SMALLEST
        return self.tiles.get(rows_measured(rows)) or tile_for(rows, len(self.weight))

    def candidates(self, rows: int, dtype: torch.dtype) -> Sequence[Tile]:
        return fitting(TILES, rows) if self.tiled else [SMALLEST]

    def product(self, x: Float[Tensor, "rows inputs"], tile: Tile) -> Float[Tensor, "rows outputs"]:
        k, x = self.kernels, x.contiguous()
        rows, (outputs, inputs) = len(x), self.shape
        out = x.new_empty(rows, outputs)
        k.one_gemm[-(-rows // tile.rows), -(-outputs // tile.outputs)](
            x, self.weight, self.weight if self.bias is None else self.bias, out, rows, outputs,
            WIDTH=inputs, BIASED=self.bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            num_warps=tile.warps, num_stages=stages(tile.stages), **k.OPTIONS,
        )  # fmt: skip
        return out


@cache
def tiles_agree(device: torch.device) -> bool:
    """Whether all tile sizes give the same bits on this GPU in bfloat16, tested with random numbers.

    Small and large tiles use different tensor-core instructions; on an H100 both sum in the same order.
    """
    rows, outputs, inputs = TRIAL
    noise = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=noise, device=device, dtype=torch.bfloat16) for n in (rows, outputs))
    with torch.cuda.device(device):
        layer = OneGemmLinear(load_kernels(), weight)
        smallest = layer.product(x, SMALLEST)
        return all(torch.equal(layer.product(x, tile), smallest) for tile in TILES)


def quantize_floats(weight: WeightMatrix) -> tuple[Float[Tensor, "outputs inputs"], Float[Tensor, "outputs 1"]]:
    """Weights in FP8 (E4M3) and a scale for each output, which maps its largest magnitude to the largest FP8 number."""
    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / LARGEST_FP8).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


QUANTIZERS = {"int8": quantize_rows, "int4": quantize_groups, "fp8": quantize_floats}


class GpuBackend:
    """The backend of a placement whose passes have fixed shapes; `GraphRunner` runs the passes.

    On a CPU, where only tests use passes of fixed shape, the linear layers are torch's.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    @property
    def name(self) -> str:
        return f"torch, {self.placement.label}"

    @property
    def arithmetic(self) -> str:
        """Triton's version; on a CPU, the properties on which torch's operators depend."""
        graphs, device = self.placement.graphs, self.placement.device
        if device.type == "mps":
            return self.placement.label
        return f"triton {load_kernels().triton.__version__}" if graphs else TorchBackend().arithmetic

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> Linear:
        """A layer whose weights stay quantized in groups; on a CPU without kernels they are dequantized."""
        place = self.placement
        if not (place.graphs or place.one_gemm):
            return LibraryLinear(weight.dense(), None if bias is None else bias.float())
        return GroupLinear(PackedGroups.of(weight, place.device), bias, unpacks=not place.one_gemm)

    def linear(self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None) -> Linear:
        """A layer of this weight, quantized if asked: int4 with groups of GROUP inputs, int8 and fp8 with one scale for
        each output."""
        place = self.placement
        if quantize is not None:
            parts = [QUANTIZERS[quantize](part) for part in weight.split(max(1, AT_ONCE // weight.shape[1]))]
            numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
            form = (4, GROUP) if quantize == "int4" else (8, weight.shape[1])
            return self.grouped(GroupedWeight(numbers, scales, None, *form), bias)
        if not place.one_gemm:
            return LibraryLinear(weight, bias)
        return OneGemmLinear(load_kernels(), weight, bias, tiled=place.graphs and tiles_agree(place.device))

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> StackedExperts:
        """The weights of all experts in one tensor for each linear layer; the experts' own tensors are released."""
        device = self.placement.device
        gate_up, down = (stack([getattr(expert, name) for expert in experts], dtype) for name in ("gate_up", "down"))
        tiled = self.placement.graphs and dtype.itemsize == 2 and type(gate_up) is type(down)
        dense = isinstance(gate_up, ExpertWeights)
        tiled = tiled and not (dense and (dtype != torch.bfloat16 or not tiles_agree(device)))
        form = replace(experts[0], gate_up=gate_up.of(0), down=down.of(0))  # views: holds no weights of its own
        num_read = torch.zeros(1, dtype=torch.int64, device=device)
        return StackedExperts(gate_up, down, form, tiled, num_read)

    def capped(self, head: Linear, limit: float) -> Linear:
        return CappedLinear(head, limit)

    def executor(self, parts: DecoderParts) -> FixedExecutor:
        """The executor for logits of states and for the layers of trained heads; a model's passes are `run_pass`.

        Tile sizes for large matrices are measured here if no earlier measurement is stored.
        """
        if self.placement.graphs:
            dense = [layer.mlp.dense for layer in parts.layers if layer.mlp.dense is not None]
            linears = [linear for layer in parts.layers for linear in (layer.attention.qkv, layer.attention.out)]
            linears += [linear for mlp in dense for linear in (mlp.gate_up, mlp.down)]
            choose_tiles([*linears, parts.head], self.placement.device, parts.embedding.dtype)
        return FixedExecutor(parts, ops_for(self.placement.device))


def stack(layers: Sequence[OneGemmLinear | LibraryLinear | GroupLinear], dtype: torch.dtype) -> ExpertLayers:
    """The layers of all experts as one. If they are not all quantized in the same format, all are dequantized to
    `dtype`."""
    packed = [layer for layer in layers if isinstance(layer, GroupLinear)]
    if len(packed) == len(layers) and (experts := PackedExperts.of_layers(packed)) is not None:
        return experts
    weights = [each.weight.unpacked(dtype) if isinstance(each, GroupLinear) else each.weight for each in layers]
    widest = max((weight.dtype for weight in weights), key=lambda each: each.itemsize)
    biases = [layer.bias.to(widest) for layer in layers if layer.bias is not None]
    return ExpertWeights(torch.stack([w.to(widest) for w in weights]), torch.stack(biases) if biases else None)

"""Linear layers of passes of fixed shape: the library's product, or one configuration for any number of rows.

This file decides which product is used. cuBLAS chooses a kernel by the number of rows, and with it the order of a sum:
that is fast, but a token read alone and the same token read beside others differ in their last bits. `OneGemmLinear`
cuts every product into tiles of one shape and sums over the inputs in one order, so a row's bits depend on the row
alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.device import Placement
from forerun.models.layer import MakeLinear
from forerun.models.ops import load_kernels


class DeviceLinear:
    """The library's product on the weight as it is."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        return functional.linear(x, self.weight, self.bias)


class OneGemmLinear:
    """A Triton product in tiles of one shape; rows that are missing from the last tile count as zeros."""

    def __init__(
        self, kernels: Any, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None = None
    ) -> None:
        self.kernels = kernels
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        k, x = self.kernels, x.contiguous()
        rows, (outputs, inputs) = len(x), self.weight.shape
        out = x.new_empty(rows, outputs)
        grid = (-(-outputs // k.GEMM_OUTPUTS), -(-rows // k.GEMM_ROWS))
        k.one_gemm[grid](
            x, self.weight, self.weight if self.bias is None else self.bias, out, rows, outputs,
            WIDTH=inputs, BIASED=self.bias is not None, ROWS=k.GEMM_ROWS, OUTPUTS=k.GEMM_OUTPUTS, INPUTS=k.GEMM_INPUTS,
            num_warps=4, num_stages=4, **k.OPTIONS,
        )  # fmt: skip
        return out


def device_linears(placement: Placement) -> MakeLinear:
    """How layers are made for this placement. On CPUs, where only tests have passes of fixed shape, by torch."""
    if not placement.one_gemm:
        return DeviceLinear
    kernels = load_kernels()

    def make(weight: Tensor, bias: Tensor | None = None) -> OneGemmLinear:
        return OneGemmLinear(kernels, weight, bias)

    return make

"""Finds the compiled kernels, and checks them on this machine before a model uses them.

In every format the kernels must give the results of the definition, up to rounding, and the bits of a row must not
depend on other rows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from forerun.annotations import ProgressCallback
from forerun.config import CPU_QUANTIZATIONS, KernelChoice, Quantization
from forerun.errors import UnsupportedModel
from forerun.kernels.build import NoKernels
from forerun.kernels.library import library, warn_of_torch
from forerun.models.backends.invariance import cancelling_product
from forerun.models.backends.native import WEIGHTS, NativeBackend
from forerun.models.backends.torch_cpu.grouped import FORMS, GroupedLinear, GroupedWeight
from forerun.models.backends.torch_cpu.quantized import Quantized4Linear


def find_kernels(
    choice: KernelChoice, dtype: torch.dtype, progress: ProgressCallback | None = None
) -> NativeBackend | None:
    """The kernels for weights of `dtype`, compiled if necessary; None if `choice` is "torch" or, with a warning, if it
    is "auto" and there are no kernels. Raises UnsupportedModel if it is "native" and there are none."""
    if choice == "torch":
        return None
    try:
        if dtype not in WEIGHTS:
            raise NoKernels(f"they support float32, bfloat16 and float16, not {dtype}: set dtype to one of these")
        return checked(library(progress))
    except NoKernels as error:
        if choice == "native":
            raise UnsupportedModel(
                f"kernels: 'native' is not possible here: {error}. Use 'auto' or 'torch'."
            ) from error
        warn_of_torch(str(error))
        return None


@cache
def checked(lib: ctypes.CDLL) -> NativeBackend:
    """The backend of a library that passes the checks. Raises NoKernels otherwise."""
    kernels = NativeBackend(lib)
    outputs, inputs, rows = 72, 200, 40
    formats: list[tuple[torch.dtype, Quantization | None]] = [(dtype, None) for dtype in WEIGHTS]
    for dtype, quantize in (*formats, *((torch.float32, each) for each in CPU_QUANTIZATIONS)):
        x, weight = cancelling_product(rows, outputs, inputs, torch.float32)
        layer = kernels.linear(weight := weight.to(dtype), None, quantize)
        alone = torch.cat([layer(row[None]) for row in x])
        exact = torch.eye(inputs)[:rows] * 64
        if quantize == "int4":  # too coarse for a comparison with the unquantized product
            right = torch.equal(layer(exact), Quantized4Linear(weight, None)(exact))
        else:
            right = torch.allclose(layer(exact).double(), exact.double() @ weight.double().T, rtol=0.02, atol=1.0)
        if not (right and torch.equal(layer(x), alone)):
            raise wrong_results(kernels)
    x = torch.linspace(-1, 1, rows * 192).view(rows, 192) ** 3
    for bits, size in FORMS:
        numbers = torch.arange(outputs * 192).view(outputs, 192) % 16
        scales = torch.linspace(0.1, 0.2, outputs * 192 // size).view(outputs, -1)
        grouped = GroupedWeight(numbers.to(torch.int8), scales, -8 * scales, bits, size)
        if not torch.equal(kernels.grouped(grouped)(x), GroupedLinear(grouped, None)(x)):
            raise wrong_results(kernels)
    return kernels


def wrong_results(kernels: NativeBackend) -> NoKernels:
    """The error for a library that fails a check."""
    problem = f"compiled for {kernels.instructions}, they compute wrong results on this machine"
    return NoKernels(f"{problem}: name another compiler in CXX, and please report this")

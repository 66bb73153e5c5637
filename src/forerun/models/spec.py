"""ModelSpec: all options of loading a model, as one frozen value.

This file checks the values; `Blueprint.of` checks whether the checkpoint and the device support them. It does not
import torch, so that commands which only parse options start fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, no_type_check

from forerun.config import KERNEL_CHOICES, QUANTIZATIONS, KernelChoice, Quantization, require_whole
from forerun.errors import InvalidRequest
from forerun.limits import shown

if TYPE_CHECKING:
    import torch

    from forerun.device import Placement

DTYPE_NAMES = {  # accepted names of dtypes, and the canonical one
    **{name: name for name in ("auto", "float32", "float16", "bfloat16")},
    **{"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"},
}


@no_type_check  # the run-time type checks of tests would come before the checks below
@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which checkpoint to load, and in which form.

    `model` is a folder, a bundled name or a hub id, and so is `tokenizer`; None: the model's own. `revision` is the
    branch, tag or commit of a hub id. `dtype` is a name or a torch.dtype, stored as "auto", "float32", "float16" or
    "bfloat16". `quantize` is None, "int8", "int4" or, on GPUs only, "fp8". `kernels` chooses the backend on CPUs.
    `device` is "cpu" (or None), "cuda", "cuda:1", "rocm", "mps", "auto", a torch.device or a Placement. `one_gemm`
    makes GPU passes batch-invariant. `tensor_parallel_size` is the number of processes that share every layer. Raises
    InvalidRequest with the field.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    quantize: Quantization | None = None
    kernels: KernelChoice = "auto"
    device: str | torch.device | Placement | None = None
    one_gemm: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is None and name != "model":
                continue
            text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
            if not isinstance(text, str) or "\0" in text or (name == "revision" and not text):
                raise _unusable(
                    name, value, "must be text, such as a folder or a hub id" + " or None" * (name != "model")
                )
            object.__setattr__(self, name, text)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.quantize not in (None, *QUANTIZATIONS):
            raise _unusable("quantize", self.quantize, f"is not known: use None or {' or '.join(QUANTIZATIONS)}")
        if self.kernels not in KERNEL_CHOICES:
            raise _unusable("kernels", self.kernels, f"must be one of {', '.join(KERNEL_CHOICES)}")
        if not isinstance(self.one_gemm, bool):
            raise _unusable("one_gemm", self.one_gemm, "must be True or False")
        require_whole("tensor_parallel_size", self.tensor_parallel_size, least=1)

    def derive(self, model: str) -> ModelSpec:
        """These options for another checkpoint, such as a draft model: with its own tokenizer, on rank 0 only."""
        return replace(self, model=model, tokenizer=None, revision=None, tensor_parallel_size=1)


def dtype_name(dtype: object) -> str:
    """The canonical name of a dtype, which is a text or a torch.dtype. Raises InvalidRequest."""
    name = DTYPE_NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise _unusable("dtype", dtype, "is not known: use auto, float32, float16 or bfloat16")
    return name


def _unusable(name: str, value: object, fix: str) -> InvalidRequest:
    return InvalidRequest(name, f"{shown(value)} {fix}.")

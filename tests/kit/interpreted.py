"""Triton's interpreter, which is on wherever there is no GPU: a test module that imports this is skipped elsewhere."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("the kernels need triton, which is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the same checks on the GPU", allow_module_level=True)
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by numpy's einsum, which computes all rows of a tile alike, as a GPU does.

    The interpreter calls a BLAS that on some processors (with AVX2 only) gives the last rows of a block other bits.
    And it stores bfloat16 as the upper 16 bits of a float32, and would multiply these as integers.
    """

    def widened(handle: TensorHandle) -> np.ndarray:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, d, *rest):
        product = np.einsum("...ij,...jk->...ik", widened(a), widened(b), dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

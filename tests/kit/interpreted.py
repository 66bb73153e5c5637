"""Triton's interpreter, which is on wherever there is no GPU: a test module that imports this is skipped elsewhere."""

from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("the kernels need triton, which is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu asks the same of the GPU itself", allow_module_level=True)
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of numpy's own, in which all rows of a tile are equal, as they are on a GPU.

    The interpreter asks a BLAS, where on some processors (with AVX2 alone) the last rows of a block have other bits.
    And it keeps bfloat16 as 16 bits of a float32, and multiplies these as whole numbers.
    """

    def widened(handle: TensorHandle) -> np.ndarray:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, d, *rest):
        product = np.einsum("...ij,...jk->...ik", widened(a), widened(b), dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

"""Tests of the compiled kernels need a C++ compiler, as the kernels do."""

from __future__ import annotations

import pytest

from forerun.models.kernels.build import NoKernels, compiler


def require_compiler() -> None:
    """Skip where there is none."""
    try:
        compiler()
    except NoKernels as missing:
        pytest.skip(str(missing))

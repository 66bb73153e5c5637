"""Every kernel compiles for an H100, on any machine that has triton."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton, which is not installed")
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, HERE / "compile_kernels.py"], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr

"""Every launch compiles for GPUs that are not here, without spilling registers, on any machine with triton."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def compiled(folder: Path, *arguments: str) -> str:
    paths = [str(HERE.parents[1] / "src"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(folder)}
    env.pop("TRITON_INTERPRET", None)
    program = [sys.executable, str(HERE / "compile_kernels.py"), *arguments]
    run = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton, which is not installed")
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    kernels = {line.split()[2].rstrip(",") for line in compiled(tmp_path, "90").splitlines()}
    of_experts = {"choose_experts", "sort_by_expert", "expert_gemm", "group_expert_gemm", "add_experts"}
    usual = {"attend_splits", "join_splits", "add_norm", "rotate_store", "activate", "one_gemm"}
    usual |= {"attend_run", "group_gemm", "unpack_groups"}
    assert kernels == usual | of_experts


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton, which is not installed")
@pytest.mark.parametrize("architecture", ["80", "90", "100", "942"])
def test_kernels_of_every_format_and_head_compile_for_every_card(tmp_path: Path, architecture: str) -> None:
    assert "WRONG" not in compiled(tmp_path, "--all", architecture)

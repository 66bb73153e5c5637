"""The GPU benchmark says so where there is no GPU, and its dry run goes through all of it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kit.checkpoints import ROOT, SRC


def run(*arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(SRC)}
    program = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, env=env, check=True).stdout


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
def test_without_a_gpu_it_says_so() -> None:
    assert run().startswith("skipped: torch sees no GPU")


@pytest.mark.full
def test_a_dry_run_ends_in_json() -> None:
    *_, last = run("--dry-run").strip().splitlines()
    report = json.loads(last)
    assert [step["tokens"] for step in report["steps"]] == [1, 2, 4, 5, 8, 16]
    assert {row["draft"] for row in report["widened"]} == {"plain", "model:stdlib-draft", "ngram"}

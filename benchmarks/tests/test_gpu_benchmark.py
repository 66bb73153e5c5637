"""Results of a GPU are saved at once, a failed part does not end the others, and a repeated run continues.

The dry run executes all parts on a CPU, with kernels in Triton's interpreter if that is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import insert, section, tables_of
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.suite import run_file
from benchmarks.gpu.unseen import MODES, Switch, rounds_of

from forerun import LLM
from kit.card import PLACEMENT, imagined
from kit.checkpoints import ROOT, SMALL, SRC, TARGET

HOSTILE = """
import subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.parts import MeasuredPart
from benchmarks.gpu.run import run_parts
from benchmarks.gpu.setting import Setting

folder = Path(sys.argv[1])

def good(setting):
    setting.add("steps", format=setting.part, tokens=1, pass_ms=1.0, v=1.0, weight_bytes=1.0, with_host_ms=1.0)
    print("measured")

def bad(setting):
    good(setting)
    assert (folder / "repaired").exists(), "not on this card"

def endless(setting):
    good(setting)
    with (setting.journal).open("a") as file:
        file.write('{"part": "a line that a kill cuts o')
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "grandchild").write_text(str(child.pid))
    time.sleep(60)

bodies = [("card", good, 9), ("bad", bad, 9), ("endless", endless, 1.5), ("after", good, 9), ("late", good, 999)]
parts = [MeasuredPart(name, "speed", limit_s, body) for name, body, limit_s in bodies]
print(run_parts(parts, Setting(True, folder / "rows.jsonl"), time.monotonic() + 100))
(folder / "repaired").touch()
print(run_parts(parts, Setting(True, folder / "rows.jsonl"), time.monotonic() + 100))
"""


def run(*program: str, status: int = 0) -> str:
    """The output of a program, which must end with this status."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{ROOT}", "PATH": path}
    ended = subprocess.run(program, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="parts are forked, and their processes read from /proc")
def test_a_part_that_fails_or_hangs_leaves_its_rows_and_the_others(tmp_path: Path) -> None:
    first = {"card": "done", "bad": "failed", "endless": "stopped", "after": "done", "late": "skipped"}
    said = run(sys.executable, "-c", HOSTILE, str(tmp_path))
    assert f"\n{first}\n" in said
    assert said.endswith(f"\n{first | {'bad': 'done'}}\n")
    assert "not on this card" in said
    assert not alive(int((tmp_path / "grandchild").read_text()))
    tables = json.loads((tmp_path / "report.json").read_text())
    assert {row["end"]: row["state"] for row in tables["parts"]} == first | {"bad": "done"}
    assert [row["format"] for row in tables["steps"]] == ["card", "bad", "endless", "after"]
    log = (tmp_path / "log.txt").read_text()
    assert [log.count(f"== {name}\n") for name in first] == [1, 2, 2, 1, 0]
    assert "| bad | done |" in (tmp_path / "report.md").read_text()


def test_tests_that_passed_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pathlib\ndef test_a(): pass\ndef test_b():\n"
                    f"    assert pathlib.Path({str(tmp_path)!r}, 'repaired').exists(), 'it is broken'\n")  # fmt: skip
    setting = Setting(True, tmp_path / "rows.jsonl", "tests/test_it")
    with pytest.raises(AssertionError, match="ended with 1"):
        run_file(setting, file)
    rows = tables_of(tmp_path)["tests"]
    assert [row["outcome"] for row in rows] == ["passed", "failed"]
    assert "it is broken" in rows[1]["said"]
    (tmp_path / "repaired").touch()
    run_file(setting, file)
    assert [row["outcome"] for row in tables_of(tmp_path)["tests"]] == ["passed", "passed"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_a_dry_run_measures_kernels_and_passes_and_its_section_goes_into_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["products/one_gemm", "products/int4", "attention", "row work", "steps/library", "texts/library"]
    run("scripts/gpu", "--dry-run", "--output", str(tmp_path), *parts)
    tables = tables_of(tmp_path)
    counts = {name: len(rows) for name, rows in tables.items() if rows}
    assert counts.pop("parts") == 1 + len(parts)
    assert counts == {"card": 1, "products": 2, "attention": 2, "row_work": 3, "steps": 3, "texts": 1}
    assert all(
        row["us"] > 0 and row["bytes"] > 0 for name in ("products", "attention", "row_work") for row in tables[name]
    )
    results, text = tmp_path / "RESULTS.md", section(tables)
    results.write_text("# Results\n\n## Simulated machines\n\nNone.\n")
    for _ in range(2):
        insert(results, text)
        assert results.read_text() == f"# Results\n\n{text}\n## Simulated machines\n\nNone.\n"
    monkeypatch.setattr(sys, "argv", ["scripts/gpu", "--into-results", str(tmp_path)])
    assert main() == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.full
def test_seen_draft_tokens_make_a_round_wait_once_more_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, waits = {}, {}
    with imagined(monkeypatch) as seen, torch.inference_mode():
        llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", device=PLACEMENT, max_model_len=512, speculation=3)
        switch = Switch(llm)
        for mode in MODES:
            switch.set(mode)
            seen.clear()
            runs[mode] = rounds_of(llm, 2, 3, 2)
            waits[mode] = len(seen.waits)
    assert runs["unseen"].answers == runs["waited"].answers == runs["seen"].answers
    assert waits["unseen"] + 3 == waits["waited"] == waits["seen"]  # two rounds are measured, and one is before them


@pytest.mark.full
def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    run("scripts/gpu", "--dry-run", "--output", str(tmp_path))
    tables = tables_of(tmp_path)
    assert {row["state"] for row in tables["parts"]} == {"done"}
    heads = {"early-exit:2:stdlib-early-exit"}  # one of those trained for the target
    assert {row["draft"] for row in tables["family"]} == {"plain", "model:stdlib-draft", "model", "ngram"} | heads
    assert all(rows for name, rows in tables.items() if name != "gaps")


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    assert "torch sees no GPU here" in run("scripts/gpu", "speed", "--output", str(tmp_path), status=1)

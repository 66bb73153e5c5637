"""For a sparse target the benchmark reports how many experts a pass reads, and how many independent tokens would."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.bench import measure
from forerun.cli import app
from forerun.models.experts_config import expected_distinct
from kit.checkpoints import SMALL
from kit.unchecked import unchecked


@pytest.mark.parametrize(("count", "active"), [(8, 2), (128, 8), (256, 8)])
def test_expected_experts_are_those_of_independent_tokens(count: int, active: int) -> None:
    """Against the published table of 1, 2, 4, 8, 16, 32 and 64 tokens, to its digits."""
    table = {
        (8, 2): [2, 3.5, 5.5, 7.2, 7.9, 8, 8],
        (128, 8): [8, 15.5, 29.1, 51.6, 82.4, 111.8, 125.9],
        (256, 8): [8, 15.8, 30.5, 57.4, 102, 163, 222],
    }
    found = [expected_distinct(count, active, 2**i) for i in range(7)]
    assert found == pytest.approx(table[count, active], abs=0.6, rel=0.002)


def test_a_benchmark_reports_experts_for_every_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "bandwidth_bytes_per_s", lambda device: 1e9)
    folder, out, prompts, run = tmp_path / "sparse", tmp_path / "bench.json", tmp_path / "tales.txt", CliRunner()
    prompts.write_text("Once upon a time\n")
    models = ["--model", str(folder), "--draft", f"model:{SMALL}", "--prompts", str(prompts)]
    options = ["--depth", "3", "-n", "12", "--repeats", "1", "-t", "0", "--state", str(tmp_path / "s"), "-o", str(out)]
    with unchecked():
        made = run.invoke(
            app, ["widen", "--model", str(SMALL), "--experts", "8", "--active", "2", "--out", str(folder)]
        )
        assert made.exit_code == 0, made.output
        result = run.invoke(app, ["bench", *models, *options])
    assert result.exit_code == 0, result.output
    cells = {cell["depth"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert cells[0]["experts"]["median"] == pytest.approx(2.0)
    assert cells[0]["expected_experts"] == pytest.approx(2.0)
    assert cells[3]["expected_experts"] == pytest.approx(expected_distinct(8, 2, 4))
    assert 2.0 < cells[3]["experts"]["median"] <= 8.0
    assert "experts read per layer and pass" in result.output

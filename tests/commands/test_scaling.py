"""The commands of docs/scaling.md that need no cluster say what one process says."""

import json
import re
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import ROOT


def asked(line: list[str]) -> Any:
    """What a command prints, as data."""
    result = CliRunner().invoke(cli.app, [*line, "--json", "--seed", "5", "-n", "24"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.full
def test_a_command_on_ranks_says_what_it_says_alone() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^forerun (generate .*--tensor-parallel .*)$", page, re.MULTILINE)
    line = shlex.split(command)
    at = line.index("--tensor-parallel")
    ranks, alone = asked(line), asked(line[:at] + line[at + 2 :])
    assert ranks["token_ids"] == alone["token_ids"]
    assert ranks["fingerprint"] == alone["fingerprint"]
    assert ranks["kernels"] == f"{alone['kernels']} on 2 ranks"

"""The command in this process: its result, or the line that it says of a mistake. And Python in one of its own."""

import os
import subprocess
import sys

import torch
from typer.testing import CliRunner, Result

from forerun import cli
from kit.checkpoints import SRC
from kit.unchecked import unchecked


def command(*words: str, stdin: str | None = None, **env: str | None) -> Result:
    """The result of a command; the number of threads stays what it was."""
    clean = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm", "COLUMNS": "200", "OPENAI_API_KEY": ""}
    before = torch.get_num_threads()
    try:
        with unchecked():
            return CliRunner().invoke(cli.app, list(words), input=stdin, env=clean | env)
    finally:
        torch.set_num_threads(before)


def refusal(*words: str, stdin: str | None = None, **env: str | None) -> str:
    """What a command says of a mistake: one line, status 2, and nothing on standard output."""
    result = command(*words, stdin=stdin, **env)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def apart(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What Python with these arguments says in a process of its own, which finds this package."""
    env = os.environ | {"PYTHONPATH": str(SRC)} | env
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False, timeout=600)

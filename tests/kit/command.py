"""Runs the `forerun` command in this process, for its result or error message; and Python in a new process."""

import os
import re
import subprocess
import sys
from functools import cache
from unittest.mock import patch

import torch
import typer.main
from typer.testing import CliRunner, Result

from forerun import cli
from kit.checkpoints import SRC
from kit.unchecked import unchecked

made = cache(typer.main.get_command)  # of all functions, each time anew, it takes longer than most commands


def command(*words: str, stdin: str | None = None, **env: str | None) -> Result:
    """The result of a command, run in this process; the number of threads is restored."""
    clean = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm", "COLUMNS": "200", "OPENAI_API_KEY": ""}
    before = torch.get_num_threads()
    try:
        with unchecked(), patch("typer.testing._get_command", made):
            return CliRunner().invoke(cli.app, list(words), input=stdin, env=clean | env)
    finally:
        torch.set_num_threads(before)


def refusal(*words: str, stdin: str | None = None, **env: str | None) -> str:
    """The error message of a refused command; asserts one line, status 2 and empty standard output."""
    result = command(*words, stdin=stdin, **env)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def apart(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The result of Python with these arguments in a new process that can import forerun."""
    env = os.environ | {"PYTHONPATH": str(SRC)} | env
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False, timeout=600)


def assert_progress_only(stderr: str) -> None:
    """Standard error without a terminal has lines of progress, if the work takes long, and nothing else."""
    assert not re.sub(r"^.+ \d+%(: .+)?\n", "", stderr, flags=re.MULTILINE)

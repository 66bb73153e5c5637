"""The command in this process: its result, or the line that it says of a mistake."""

import torch
from typer.testing import CliRunner, Result

from forerun import cli
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

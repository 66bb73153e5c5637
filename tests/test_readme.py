"""README.md is true: its Python and its `forerun` lines run, its make targets and paths exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import ROOT
from kit.unchecked import unchecked

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS: dict[str, list[str]] = {}
for language, body in BLOCK.findall(README):
    BLOCKS.setdefault(language, []).append(body)
COMMANDS = [line for body in BLOCKS["sh"] for line in body.splitlines() if line.startswith("forerun ")]
NAMED_PATH = re.compile(r"(?:`|\()((?:\.ci|src|tests|docs|scripts|benchmarks)/[\w./-]*)")


def test_there_is_something_to_run_and_little_to_read() -> None:
    assert BLOCKS["python"]
    assert COMMANDS
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("source", BLOCKS["python"], ids=lambda source: source.splitlines()[0])
def test_python_blocks_run(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("command", COMMANDS)
def test_forerun_commands_run_and_say_something(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command, comments=True)[1:]
    arguments += ["-n", "8", "--num-texts", "100"] if arguments[0] == "prove" else []  # the last one of each counts
    with unchecked():
        run = CliRunner().invoke(cli.app, arguments, env={"NO_COLOR": "1"})
    assert run.exit_code == 0, run.output
    assert len(run.stdout.split()) > 3, run.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_and_paths_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"
    for path in NAMED_PATH.findall(text):
        assert (ROOT / path).exists(), f"{document.name}: {path}"

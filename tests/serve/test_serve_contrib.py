"""The files of contrib say what the command has: their options are its own, and times to stop leave room to drain."""

import json
import re
import shlex

import pytest
import typer.main

from forerun.cli import app
from kit.checkpoints import ROOT

CONTRIB = ROOT / "contrib"


def options() -> set[str]:
    """Every option of the command."""
    group = typer.main.get_command(app)
    command = group.commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts}


def command_of_unit() -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", (CONTRIB / "forerun.service").read_text(), re.MULTILINE)
    return shlex.split(line)


def command_of_container() -> list[str]:
    text = (CONTRIB / "Containerfile").read_text()
    entry, words = (json.loads(re.findall(rf"^{name} (.*)$", text, re.MULTILINE)[0]) for name in ("ENTRYPOINT", "CMD"))
    return [*entry, *words]


@pytest.mark.parametrize("command", [command_of_unit(), command_of_container()], ids=["unit", "container"])
def test_the_options_are_those_of_the_command(command: list[str]) -> None:
    assert command[0].rpartition("/")[2] == "forerun"
    assert command[1] == "serve"
    given = {word for word in command if word.startswith("--")}
    assert given
    assert given <= options()


def test_systemd_waits_longer_than_the_server_drains() -> None:
    command = command_of_unit()
    drain_s = float(command[command.index("--drain-s") + 1])
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", (CONTRIB / "forerun.service").read_text(), re.MULTILINE)
    assert float(stop_s) > drain_s

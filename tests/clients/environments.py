"""Environments: one for each client, made when it is first tried, and again when its line in the table has changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from table import Client

MARK = "installed"


class InstallationFailed(Exception):
    """An environment could not be made; the text is the last lines of pip."""


def environment_python(client: Client, cache: Path) -> Path:
    """The Python of a client's environment, which is made if need be. Raises InstallationFailed."""
    folder = cache / "environments" / client.name
    python, mark = folder / "bin" / "python", folder / MARK
    steps = [step for step in (client.first, client.requirements) if step]
    wanted = "\n".join(" ".join(step) for step in steps)
    if mark.exists() and mark.read_text("utf-8") == wanted:
        return python
    print(f"installing {wanted.splitlines()[-1]} into {folder} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for step in steps:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode:
            raise InstallationFailed("\n".join(pip.stderr.splitlines()[-5:]))
    mark.write_text(wanted, "utf-8")
    return python

"""Environments: one for each client, made when it is first tried, and again when its line in the table has changed."""

from __future__ import annotations

import os
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
    wanted = "\n".join(" ".join(step) for step in client.steps)
    if mark.exists() and mark.read_text("utf-8") == wanted:
        return python
    print(f"installing {client.package} {client.version} into {folder} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for step in client.steps:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step]
        variables = os.environ | dict(client.variables)
        pip = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if pip.returncode:
            raise InstallationFailed("\n".join(pip.stderr.splitlines()[-5:]))
    mark.write_text(wanted, "utf-8")
    return python

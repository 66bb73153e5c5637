#!/usr/bin/env python3
"""Try the server with clients that others wrote, each in an environment of its own, and print the outcomes.

    python tests/clients/run.py                        all clients
    python tests/clients/run.py --only openai,litellm  some of them

It starts `forerun serve` from this checkout on a free port of this machine. The exit status is 1 if anything failed.
Environments are made when they are first needed, from the package registry, and kept under --cache; nothing else is
loaded from a network. `logs/` there has what each client printed, and `server.log` what the server did.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server import CONTEXT, KEY, NAME, ROOT, chat_model, running_server
from table import CLIENTS, Client

MARK = "installed"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
DRAFTING = ["--draft", "model:stdlib-draft", "--depth", "3"]
CLIENT_S = 900
OFFLINE = {  # clients ask nobody but the server
    "AIDER_ANALYTICS": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "*",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one check of a client; `message` is its error, if there is one."""

    tried: str
    message: str
    seconds: float = 0.0


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


def outcomes(client: Client, server: str, model: Path, context: int, cache: Path) -> Iterator[Outcome]:
    """Try a client: one outcome for each of its checks, and one for a script that did not come to its end."""
    try:
        python = environment_python(client, cache)
    except InstallationFailed as error:
        yield Outcome("installation", str(error))
        return
    home, log = cache / "home" / client.name, cache / "logs" / f"{client.name}.txt"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log.parent.mkdir(exist_ok=True)
    report = home / "report.jsonl"
    report.touch()
    asked = {"SERVER": server, "KEY": KEY, "MODEL": NAME, "FOLDER": model, "CONTEXT": context, "REPORT": report}
    environment = {f"CLIENTS_{name}": str(value) for name, value in asked.items()}
    environment |= OFFLINE | {"HOME": str(home), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as out:
        try:
            script = subprocess.run(
                [python, SCRIPTS / client.script], stdout=out, stderr=out, cwd=home, env=environment, timeout=CLIENT_S
            )
            end = f"exit status {script.returncode}" if script.returncode else ""
        except subprocess.TimeoutExpired:
            end = f"more than {CLIENT_S} seconds"
    yield from (Outcome(**json.loads(line)) for line in report.read_text("utf-8").splitlines())
    if end:
        yield Outcome("the script as a whole", f"{end}: {' '.join(log.read_text('utf-8').split()[-40:])}")


def chosen(names: str | None) -> list[Client]:
    """The clients of these names, in the order of the table; all of them without names."""
    known = [client.name for client in CLIENTS]
    asked = names.split(",") if names else known
    if unknown := sorted(set(asked) - set(known)):
        sys.exit(f"--only: there is no {', '.join(unknown)}; there are {', '.join(known)}.")
    return [client for client in CLIENTS if client.name in asked]


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="clients with commas between them")
    parser.add_argument("--cache", type=Path, default=ROOT / ".clients", help="folder of the environments")
    parser.add_argument("--model", type=Path, help="a folder to serve instead of the bundled model")
    parser.add_argument("--draft", help="its drafter, as for forerun serve")
    return parser.parse_args()


def main() -> int:
    """Try what was chosen, and print a line for each check."""
    asked = options()
    cache = asked.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    clients = chosen(asked.only)
    model = asked.model.resolve() if asked.model else chat_model(cache)
    drafting = ["--draft", asked.draft] if asked.draft else [] if asked.model else DRAFTING
    width = max(len(f"{client.name} {client.version}") for client in clients)
    results = []
    with running_server(model, [*drafting, "--max-model-len", str(CONTEXT)], cache) as server:
        for client in clients:
            for outcome in outcomes(client, server, model, CONTEXT, cache):
                results.append(outcome)
                line = f"FAILED  {outcome.tried}: {outcome.message}" if outcome.message else f"ok      {outcome.tried}"
                print(f"{client.name + ' ' + client.version:{width}}  {outcome.seconds:6.1f} s  {line}", flush=True)
    failed = sum(bool(outcome.message) for outcome in results)
    print(f"\n{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

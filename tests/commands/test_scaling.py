"""The commands of docs/scaling.md in which ranks share a model print what one process prints."""

import json
import re
import shlex
import sys
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import ROOT, TARGET
from kit.engines import PATIENCE_S
from kit.machines import FIRST, INSIDE, needs_namespaces, two_machines
from kit.servers import library_answer, until


def asked(line: list[str]) -> Any:
    """What a command prints, as data."""
    result = CliRunner().invoke(cli.app, [*line, "--json", "--seed", "5", "-n", "24"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.full
def test_a_command_on_several_ranks_prints_the_same_as_on_one() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^forerun (generate .*--tensor-parallel .*)$", page, re.MULTILINE)
    line = shlex.split(command)
    at = line.index("--tensor-parallel")
    ranks, alone = asked(line), asked(line[:at] + line[at + 2 :])
    assert ranks["token_ids"] == alone["token_ids"]
    assert ranks["fingerprint"] == alone["fingerprint"]
    assert ranks["kernels"] == f"{alone['kernels']} on 2 ranks"


@pytest.mark.full
@needs_namespaces
def test_ranks_of_two_machines_print_the_same_as_one_process() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = re.findall(r"^torchrun (.*)$", page, re.MULTILINE)
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "temperature": 0.8}
    with ExitStack() as stack:
        machines = stack.enter_context(two_machines())
        for machine, line in zip(machines, lines, strict=True):
            words = shlex.split(line.replace("HOST", FIRST).replace("DIR", str(TARGET)), comments=True)
            words += ["--dtype", "float32", "--host", "0.0.0.0", "--port", "8000", "--allowed-hosts", INSIDE]
            stack.callback(machine.start([sys.executable, "-m", "torch.distributed.run", *words]).wait)
            stack.callback(machine.kill_all)
        with httpx.Client(base_url=f"http://{INSIDE}:8000", timeout=PATIENCE_S, trust_env=False) as http:

            def is_ready() -> bool:
                try:
                    return bool(http.get("/ready").status_code == 200)
                except httpx.TransportError:
                    return False

            until(is_ready, pause_s=0.2)
            choice = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"][0]
    assert choice["token_ids"] == list(library_answer(body).outputs[0].token_ids)

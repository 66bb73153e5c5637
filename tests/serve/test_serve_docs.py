"""docs/serving.md is right: its requests are sent and answered, and its tables agree with the code.

The files of contrib are checked, too: their options exist, and their stop timeouts are long enough to drain.
"""

import json
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import typer.main

from forerun.cli import app
from forerun.llm import LLM
from forerun.serve.schema import KNOWN, SAMPLING, Endpoint
from kit.checkpoints import ROOT
from kit.servers import Running, serving

CONTRIB = ROOT / "contrib"
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- needs a server -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPENAIS: tuple[Endpoint, ...] = ("completions", "chat", "responses", "tokenize", "detokenize")
ADDRESS = "http://127.0.0.1:8000"
server = serving(lambda: LLM("stdlib", "model:stdlib-draft", speculation=3), served_model_name="stdlib")


@pytest.mark.parametrize(("language", "body"), BLOCK.findall(PAGE), ids=lambda value: value.split()[0])
def test_requests_in_the_documentation_are_answered(
    server: Running, language: str, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ADDRESS in body
    body = body.replace(ADDRESS, server.url)
    if language == "python":
        names: dict[str, Any] = {"__name__": "docs"}
        exec(compile(body, "serving.md", "exec"), names)
        names["client"].close()
        assert re.search(r"num_accepted|\d+ of \d+ draft tokens accepted", capsys.readouterr().out)
    elif shutil.which("curl") is None:
        pytest.skip("there is no curl")
    else:
        asked = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True)
        assert '"finish_reason":"length"' in asked.stdout


def test_the_tables_name_every_field_of_their_class() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]
    kinds: dict[str, set[str]] = {}
    for endpoint in OPENAIS:
        for name, field in KNOWN[endpoint].items():
            kinds.setdefault(name, set()).add(field.kind)
    tables = {words: set(re.findall(r"`(\w+)`", names)) for names, words in rows}
    for kind, words in (("idle", "accepted without effect"), ("unserved", "unsupported_parameter")):
        (found,) = (names for heading, names in tables.items() if words in heading)
        assert found == {name for name, of_name in kinds.items() if of_name == {kind}}
    for name in SAMPLING:
        assert f"`{name}`" in PAGE


def test_every_field_that_is_served_is_explained() -> None:
    for endpoint, fields in KNOWN.items():
        missing = {
            name for name, field in fields.items() if field.kind == "served" and not re.search(rf"\b{name}\b", PAGE)
        }
        assert not missing, endpoint


def test_every_metric_of_the_table_is_reported(server: Running) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "def ", "max_tokens": 8, "temperature": 0})
        metrics = http.get("/metrics").text
    for name in re.findall(r"`(forerun:\w+)", PAGE):
        assert name in metrics or name.endswith("_gain")  # these are known where the depth is chosen


def test_every_code_of_an_error_is_in_the_table() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "forerun" / "serve").glob("*.py"))
    codes = set(re.findall(r'code(?:: str =|=)\s?"(\w+)"|"(\w+_(?:parameter|exceeded|long|memory))"', source))
    codes = {one or other for one, other in codes}
    assert {"invalid_value", "unknown_parameter", "queue_full", "invalid_json"} < codes
    for code in codes:
        assert f"`{code}`" in PAGE


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

"""docs/serving.md is true: what it asks a server for is asked and answered, and its tables are those of the code."""

import re
import shutil
import subprocess
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.serve.schema import KNOWN, SAMPLING, Endpoint
from kit.checkpoints import ROOT
from kit.servers import Running, serving

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- needs a server -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPENAIS: tuple[Endpoint, ...] = ("completions", "chat", "responses", "tokenize", "detokenize")
ADDRESS = "http://127.0.0.1:8000"
server = serving(lambda: LLM("stdlib", "model:stdlib-draft", speculation=3), model_name="stdlib")


@pytest.mark.parametrize(("language", "body"), BLOCK.findall(PAGE), ids=lambda value: value.split()[0])
def test_what_is_asked_is_answered(
    server: Running, language: str, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ADDRESS in body
    body = body.replace(ADDRESS, server.url)
    if language == "python":
        names: dict[str, Any] = {"__name__": "docs"}
        exec(compile(body, "serving.md", "exec"), names)
        names["client"].close()
        assert re.search(r"num_accepted|\d+ of \d+ guesses accepted", capsys.readouterr().out)
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
        (found,) = (names for said, names in tables.items() if words in said)
        assert found == {name for name, own in kinds.items() if own == {kind}}
    for name in SAMPLING:
        assert f"`{name}`" in PAGE


def test_every_metric_of_the_table_is_told(server: Running) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": "def ", "max_tokens": 8, "temperature": 0})
        told = http.get("/metrics").text
    for name in re.findall(r"`(forerun:\w+)", PAGE):
        assert name in told or name.endswith("_gain")  # these are known where the depth is chosen


def test_every_code_of_an_error_is_in_the_table() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "forerun" / "serve").glob("*.py"))
    codes = set(re.findall(r'code(?:: str =|=)\s?"(\w+)"|"(\w+_(?:parameter|exceeded|long|memory))"', source))
    codes = {one or other for one, other in codes}
    assert {"invalid_value", "unknown_parameter", "queue_full", "invalid_json"} < codes
    for code in codes:
        assert f"`{code}`" in PAGE

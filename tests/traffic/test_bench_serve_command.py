"""`forerun bench serve` on a real server: its modes give the same answers, and its numbers agree with the server's."""

import json
from pathlib import Path

import pytest

from kit.command import command, refusal
from kit.servers import drafting, running


@pytest.mark.full
def test_modes_of_a_server_are_compared(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "Once upon a time", "category": "tale"}\n{"prompt": "Lily saw", "category": "deed"}\n'
    )
    out = tmp_path / "load.json"
    with drafting() as llm, running(llm) as server:
        asked = ["--url", f"{server.url}/v1/", "--prompts", str(tmp_path / "mine.jsonl"), "-n", "16", "-t", "0.8"]
        asked += ["--speculation", "off,auto,2", "--rate", "100", "--concurrency", "2", "--num-requests", "4"]
        run = command("bench", "serve", *asked, "--repeats", "2", "--sla-between-ms", "60000", "-o", str(out))
        assert (run.exit_code, run.stderr) == (0, "")
        assert "Every mode gave the same answers." in run.stdout
        assert "auto: 100 requests/s, the highest load measured" in run.stdout
        found = json.loads(out.read_text())
        assert found["same_answers"] is True
        assert found["model"]["fingerprint"] == llm.fingerprint
        cells = {(cell["load"]["kind"], cell["mode"]): cell for cell in found["cells"]}
        assert len(cells) == 6
        for (_, mode), cell in cells.items():
            assert cell["times"]["num_answers"] == 8
            assert (cell["acceptance_rate"] is None) <= (mode in ("off", "auto"))
            assert cell["tokens_per_round"] == 1 if mode == "off" else cell["tokens_per_round"] >= 1
            assert cell["by_category"].keys() == {"tale", "deed"}
        assert all(2 <= each["num_tokens"] <= 16 and each["error"] is None for each in found["requests"])
        message = refusal("bench", "serve", "--url", server.url, "--served-model-name", "other")
        assert "name one of stories" in message


def test_mistakes_are_one_line_before_anything_is_asked(tmp_path: Path) -> None:
    for arguments, message in (
        (["--rate", "fast"], "rate: 'fast' must be numbers"),
        (["--rate", "-1"], "rate: -1 must be a number of requests per second above 0"),
        (["--concurrency", "1.5"], "concurrency: 1.5 must be a whole number"),
        (["--speculation", "off,deep"], "speculation: 'deep' must be auto, off, or a depth"),
        (["--body", "[1]"], "body: '[1]' is not an object"),
        (["--body", "[" * 100_000], "body: '[[[["),
        (["--body", '{"seed": 1}'], "body: 'seed' is set by the load test"),
        (["--prompts", str(tmp_path / "none.txt")], "it cannot be read"),
        (["--picture", str(tmp_path / "x.png")], "must be a .svg file"),
        (["--sla-between-ms", "0"], "sla_between_ms: 0 must be a number of milliseconds above 0"),
        (["--url", "http://127.0.0.1:9"], "start the server, or give another address"),
        (["--url", "localhost:9"], "begin it with http:// or https://"),
    ):
        assert message in refusal("bench", "serve", *arguments)

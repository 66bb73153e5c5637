"""Bodies made by schemathesis of the server's own description: none of them is answered with a 5xx.

`FORERUN_FUZZ_S=600 pytest -m full tests/serve/test_serve_schemathesis.py` does so for ten minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.servers import Running, drafting, running, until

SECONDS = float(os.environ.get("FORERUN_FUZZ_S", "10"))
LEAST = 8  # answers that the short suite waits for, however long they take; it stops soon after
PATIENCE_S = 300.0  # to end a hang
RUN = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
CHECKS = ["--checks", "not_a_server_error", "--max-examples", "100000", "--phases", "fuzzing", "--no-color"]


def num_answers(server: Running) -> dict[str, float]:
    """How many answers the server gave so far, by status."""
    with server.http() as http:
        counts = [line for line in http.get("/metrics").text.splitlines() if "http_responses_total{" in line]
    found = {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in counts}
    return {code: count for code, count in found.items() if code != "200"}  # which /metrics has too


def enough(server: Running) -> bool:
    """Whether as many were answered as are wanted at least."""
    return sum(num_answers(server).values()) >= LEAST


@pytest.mark.parametrize(
    ("seconds", "options"),
    [(0.0, ["--seed", "1"]), pytest.param(SECONDS, [], marks=pytest.mark.full)],
    ids=["short", "long"],
)
def test_no_generated_body_causes_a_server_error(seconds: float, options: list[str], tmp_path: Path) -> None:
    with drafting() as llm, running(llm, request_s=60.0) as server:
        command = [*RUN, f"{server.url}/openapi.json", *CHECKS, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
        try:
            until(lambda: enough(server) or process.poll() is not None, PATIENCE_S, pause_s=0.1)
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, _ = process.communicate()
        finally:
            process.kill()
        assert "Server error" not in out, out
        status = num_answers(server)
        assert sum(status.values()) >= LEAST, f"schemathesis has asked: {out}"
        assert not [code for code in status if code >= "500"], status

"""Bodies made by schemathesis of the server's own description: none of them is answered with a 5xx.

`FORERUN_FUZZ_S=600 pytest -m full tests/serve/test_serve_schemathesis.py` does so for ten minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from serve.servers import drafting, needed, running

SECONDS = float(os.environ.get("FORERUN_FUZZ_S", "10"))
RUN = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
CHECKS = ["--checks", "not_a_server_error", "--max-examples", "100000", "--phases", "fuzzing", "--no-color"]


@pytest.mark.full
def test_no_body_is_answered_with_a_fault_of_the_server() -> None:
    needed("schemathesis")
    with drafting() as llm, running(llm, request_s=60.0) as server:
        command = [*RUN, f"{server.url}/openapi.json", *CHECKS]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            out, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, _ = process.communicate()
        assert "Server error" not in out, out
        with server.http() as http:
            counts = [line for line in http.get("/metrics").text.splitlines() if "http_responses_total{" in line]
        status = {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in counts}
        assert sum(status.values()) > SECONDS, f"schemathesis has asked: {out}"
        assert not [code for code in status if code >= "500"], status

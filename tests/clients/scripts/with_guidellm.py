"""GuideLLM: short load tests of completions, chats and responses, whole and streamed."""

import json
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, KEY, MODEL, SERVER, check, equal, run_checks

REQUESTS = 6
OUTPUT_TOKENS = 16


def measured(request_format, stream=True):
    """Run a load test, and raise an AssertionError unless all requests were answered with all their tokens."""
    file = Path.cwd() / "report.json"
    backend = f"kind=openai_http,target={SERVER},model={MODEL},api_key={KEY},request_format={request_format}"
    options = {
        "backend": f"{backend},stream={str(stream).lower()}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={FOLDER}",
        "output": f"kind=json,path={file}",
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr[-700:]
    (report,) = json.loads(file.read_text("utf-8"))["benchmarks"]
    totals = report["metrics"]["request_totals"]
    errors = [request["info"]["error"] for request in report["requests"]["errored"]]
    equal((totals["successful"], errors[:1]), (REQUESTS, []))
    equal({request["output_metrics"]["text_tokens"] for request in report["requests"]["successful"]}, {OUTPUT_TOKENS})


@check("chats, whole")
def chats():
    measured("/v1/chat/completions", stream=False)


@check("chats, streamed")
def streamed_chats():
    measured("/v1/chat/completions")


@check("completions, streamed")
def streamed_completions():
    measured("/v1/completions")


@check("responses, streamed")
def streamed_responses():
    measured("/v1/responses")


run_checks()

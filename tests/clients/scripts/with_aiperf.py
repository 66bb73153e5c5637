"""AIPerf: short load tests of completions, chats, responses and messages, which read the server's metrics too."""

import json
import os
import subprocess
from pathlib import Path

from checks import FOLDER, KEY, MODEL, SERVER, check, equal, run_checks

REQUESTS = 6
# Without a network it takes a folder for a name at the hub, and looks for it in the hub's cache.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}


def measured(kind, *options):
    """Run a load test; its report, once all requests were answered."""
    folder = Path.cwd() / f"{kind}{len(options)}"
    command = ["aiperf", "profile", "--model", MODEL, "--url", SERVER, "--api-key", KEY, "--endpoint-type", kind]
    command += ["--tokenizer", FOLDER, "--concurrency", "2", "--request-count", str(REQUESTS), "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "16", "--no-gpu-telemetry"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, (done.stderr or done.stdout)[-700:]
    report = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    equal((report["request_count"]["avg"], report.get("error_summary") or []), (REQUESTS, []))
    metrics = json.loads((folder / "server_metrics_export.json").read_text("utf-8"))["metrics"]
    assert any(name.startswith("forerun:") for name in metrics), list(metrics)
    return report


@check("chats, streamed, and the server's metrics")
def streamed_chats():
    assert measured("chat", "--streaming")["time_to_first_token"]["avg"] > 0


@check("chats, streamed, with usage in every chunk")
def usage_in_chunks():
    measured("chat", "--streaming", "--use-server-token-count", "--per-chunk-usage")


@check("completions, streamed")
def streamed_completions():
    measured("completions", "--streaming")


@check("responses, streamed")
def streamed_responses():
    measured("responses", "--streaming")


@check("messages of Anthropic's form, streamed")
def streamed_messages():
    measured("messages", "--streaming")


run_checks()

"""The client of vLLM's `vllm bench serve`, which is called without the command, since that loads the engine too."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, KEY, MODEL, SERVER, check, equal, run_checks

REQUESTS = 6
OUTPUT_TOKENS = 16
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def measured(backend, endpoint, *options):
    """Run a load test, and raise an AssertionError unless all requests were answered with all their tokens."""
    file = f"{backend}{len(options)}.json"
    command = [sys.executable, "-c", BENCH, "--backend", backend, "--base-url", SERVER, "--endpoint", endpoint]
    command += ["--model", MODEL, "--tokenizer", FOLDER, "--dataset-name", "random", "--random-input-len", "32"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "2"]
    command += ["--ignore-eos", "--save-result", "--result-filename", file, *options]
    keyed = os.environ | {"OPENAI_API_KEY": KEY}
    done = subprocess.run(command, capture_output=True, text=True, env=keyed, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr[-700:]
    result = json.loads(Path(file).read_text("utf-8"))
    equal((result["completed"], result["total_output_tokens"]), (REQUESTS, REQUESTS * OUTPUT_TOKENS))


@check("completions, streamed")
def completions():
    measured("openai", "/v1/completions")


@check("completions, streamed, with log-probabilities and sampling")
def sampled():
    measured("openai", "/v1/completions", "--logprobs", "1", "--temperature", "0.8", "--top-k", "20", "--min-p", "0.1")


@check("chats, streamed")
def chats():
    measured("openai-chat", "/v1/chat/completions")


run_checks()

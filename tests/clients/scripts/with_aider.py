"""aider: a message about a file of a scratch repository, streamed and whole, in two formats of edits."""

import json
import os
import subprocess
from pathlib import Path

from checks import CONTEXT, KEY, MODEL, SHORT, TEXT, URL, check, run_checks

FAILURES = ("litellm.", "Error:", "Traceback", "API provider", "retry")
SETTINGS = f"""
- name: openai/{MODEL}
  edit_format: whole
  use_temperature: 0
  extra_params: {{max_tokens: 60, extra_body: {json.dumps({**SHORT, "min_tokens": 24})}}}
"""
LIMITS = f'{{"openai/{MODEL}": {{"max_input_tokens": {CONTEXT}, "max_output_tokens": 60, "mode": "chat"}}}}'


def aider(*options):
    """What aider prints of one message. Raises an AssertionError where it tells an error."""
    folder = Path.cwd() / f"repository{len(list(Path.cwd().glob('repository*')))}"
    folder.mkdir()
    (folder / "stack.py").write_text("class Stack:\n    def push(self, item):\n        pass\n", "utf-8")
    (folder / ".aider.model.settings.yml").write_text(SETTINGS, "utf-8")
    (folder / ".aider.model.metadata.json").write_text(LIMITS, "utf-8")
    for words in (["init", "-q"], ["add", "stack.py"], ["commit", "-qm", "A stack"]):
        named = ["-c", "user.name=Me", "-c", "user.email=me@localhost"]
        subprocess.run(["git", *named, *words], cwd=folder, check=True)
    command = ["aider", "--model", f"openai/{MODEL}", "--openai-api-base", URL, "--openai-api-key", KEY]
    command += ["--message", TEXT, "--yes-always", "--no-check-update", "--no-show-release-notes", "--no-auto-commits"]
    command += ["--analytics-disable", "--no-show-model-warnings", "--no-detect-urls", "--no-pretty", *options]
    done = subprocess.run(
        [*command, "stack.py"],
        cwd=folder,
        env=os.environ | {"GIT_AUTHOR_NAME": "Me", "GIT_AUTHOR_EMAIL": "me@localhost"},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    print(done.stdout, done.stderr)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if any(word in line for word in FAILURES)]
    assert done.returncode == 0, errors
    assert not errors, errors
    assert "Tokens:" in done.stdout, done.stdout[-500:]
    return done.stdout


@check("a message, streamed")
def streamed():
    aider("--edit-format", "whole")


@check("a message, whole, in the format of differences")
def whole():
    aider("--edit-format", "diff", "--no-stream")


@check("a question about the repository")
def question():
    aider("--chat-mode", "ask", "--map-tokens", "256")


run_checks()

"""The command `llm`, with the server in its file of further models: prompts, chats that go on, schemas, tools."""

import json
import os
import subprocess
from pathlib import Path

from checks import FORECAST, KEY, MODEL, PROMPT, TEXT, URL, check, equal, is_forecast, plain_chat, run_checks

FOLDER = Path.cwd() / "llm"
FOLDER.mkdir()
SERVED = {"model_name": MODEL, "api_base": URL, "api_key_name": "served"}
MODELS = [
    {**SERVED, "model_id": "chat", "supports_schema": True, "supports_tools": True},
    {**SERVED, "model_id": "completion", "completion": True},
    {**SERVED, "model_id": "responses", "responses": True},
    {**SERVED, "model_id": "other", "model_name": "other"},
]
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS), "utf-8")  # which is YAML too
(FOLDER / "keys.json").write_text(json.dumps({"served": KEY}), "utf-8")
FIXED = ["-o", "seed", "7", "-o", "temperature", "0.8", "-o", "max_tokens", "24"]
TOOL = 'def weather(city: str) -> str:\n    "The weather of a city."\n    return "sunny"\n'


def llm(*options, status=0):
    command = subprocess.run(
        ["llm", *options], capture_output=True, text=True, env=os.environ | {"LLM_USER_PATH": str(FOLDER)}, check=False
    )
    assert command.returncode == status, f"exit status {command.returncode}: {command.stderr}"
    return command.stdout if status == 0 else command.stderr


@check("a prompt, streamed and whole: the text of a plain request")
def prompts():
    expected = plain_chat().strip()
    equal(llm("-m", "chat", TEXT, *FIXED).strip(), expected)
    equal(llm("-m", "chat", TEXT, *FIXED, "--no-stream").strip(), expected)


@check("a chat that goes on, with its usage")
def chats():
    llm("-m", "chat", TEXT, *FIXED, "--usage")
    assert llm("-c", "Go on.", *FIXED).strip()
    assert json.loads(llm("logs", "list", "-n", "1", "--json"))[0]["input_tokens"] > 0


@check("a completion")
def completions():
    assert llm("-m", "completion", PROMPT, *FIXED).strip()


@check("a response")
def responses():
    assert llm("-m", "responses", TEXT, "-o", "max_tokens", "24").strip()


@check("a schema")
def schemas():
    is_forecast(llm("-m", "chat", TEXT, "--schema", json.dumps(FORECAST), "-o", "seed", "7"))


@check("a tool is offered")
def tools():
    assert llm("-m", "chat", TEXT, "--functions", TOOL, *FIXED).strip()


@check("errors: the model, the key")
def errors():
    assert "is not served here" in llm("-m", "other", TEXT, status=1)
    assert "401" in llm("-m", "chat", TEXT, "--key", "wrong", status=1)


run_checks()

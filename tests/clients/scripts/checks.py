"""What the file of every client uses: the server, plain requests to compare with, and checks, which report one by one.

It needs nothing but Python's own library, because it is imported in the environment of each client.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SERVER = os.environ["CLIENTS_SERVER"]
URL = f"{SERVER}/v1"
KEY = os.environ["CLIENTS_KEY"]
MODEL = os.environ["CLIENTS_MODEL"]
FOLDER = os.environ["CLIENTS_FOLDER"]  # the model's files, for clients that count tokens themselves
CONTEXT = int(os.environ["CLIENTS_CONTEXT"])
PATIENCE_S = 300

TEXT = "Write a class of a stack."
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]
PROMPT = "class Stack:\n    def push(self, "
SAMPLING: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
TOO_LONG = "push and pop " * CONTEXT
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "parameters": FORECAST},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST, "strict": True}}
SHORT = {"min_tokens": 4, "logit_bias": {"1": 100}}  # 1 ends an answer, which the bundled model hardly ever does itself
CHECKS: list[tuple[str, Callable[[], Any]]] = []


def check(tried: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put a function, which may be asynchronous, among the checks, under the words that say what it tries."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.append((tried, function))
        return function

    return add


def run_checks() -> None:
    """Run all checks in order, and append a line of JSON for each to the file that the environment names."""
    with open(os.environ["CLIENTS_REPORT"], "a", encoding="utf-8") as report:
        for tried, function in CHECKS:
            start_s = time.monotonic()
            message = fault(function)
            line = {"tried": tried, "message": message, "seconds": round(time.monotonic() - start_s, 2)}
            report.write(json.dumps(line) + "\n")
            report.flush()


def fault(function: Callable[[], Any]) -> str:
    """What went wrong in a check, and where; empty where nothing did."""
    try:
        asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
    except Exception as error:
        traceback.print_exc()
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if "with_" in frame.filename]
        where = f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else ""
        return f"{type(error).__name__}: {error}{where}"
    return ""


def equal(value: object, expected: object) -> None:
    """Raise an AssertionError that shows both where they differ."""
    assert value == expected, f"{value!r} is not {expected!r}"


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """Raise an AssertionError unless the block raises this kind of error, with these words in its text or code."""
    caught: BaseException | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"no {kind} was raised"
    shown = f"{caught} ({getattr(caught, 'code', '')})"
    missing = [word for word in words if word not in shown]
    assert not missing, f"{type(caught).__name__} without {missing}: {shown}"


def plain(path: str, **body: Any) -> Any:
    """The answer to a request without any client. Raises a RuntimeError with the server's text for an error."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = json.dumps({"model": MODEL, **body}).encode() if body else None
    request = urllib.request.Request(f"{SERVER}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from error
    return json.loads(text) if "json" in answer.headers["Content-Type"] else text


def plain_chat(**body: Any) -> str:
    """The text of a chat that was asked for without any client."""
    answer = plain("/v1/chat/completions", **{"messages": MESSAGES, **SAMPLING, **body})
    return str(answer["choices"][0]["message"]["content"])


def plain_completion(**body: Any) -> str:
    """The text of a completion so."""
    return str(plain("/v1/completions", **{"prompt": PROMPT, **SAMPLING, **body})["choices"][0]["text"])


def is_forecast(value: Any) -> None:
    """Raise an AssertionError for what the schema does not allow."""
    value = json.loads(value) if isinstance(value, str) else value
    assert value["city"] in ("Rome", "Oslo"), value
    assert 1 <= value["days"] <= 9, value

"""Logs: what a server writes to standard error, as lines of text or of JSON, and the line of each request.

Nothing of a prompt or an answer is in a line unless ServeSettings.log_prompts asks for it.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from forerun.serve.envelope import ACCESS
from forerun.serve.record import RequestRecord

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
REQUESTS = "forerun.serve.requests"
LEVELS = {"forerun.serve": logging.INFO, "uvicorn.error": logging.ERROR}  # its warnings are of what clients send
OF_ACCESS = (ACCESS, REQUESTS)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


class RequestLog:
    """A line for every request that was read."""

    def __init__(self) -> None:
        self.log = logging.getLogger(REQUESTS)

    def take(self, record: RequestRecord) -> None:
        """Write its line."""
        fields = record.fields()
        shown = {**fields, "request_id": json.dumps(record.request_id)}  # a client may have chosen it
        text = " ".join(f"{name}={value}" for name, value in shown.items() if name != "outcome")
        self.log.info("%s %s", record.outcome, text, extra={"fields": fields})

    def close(self) -> None:
        """There is nothing left to write."""


def log_to_stderr(form: LogFormat, access: bool) -> None:
    """Show what the server has to say, with times; with `access` also a line for each request and each answer."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    for name in OF_ACCESS:
        logging.getLogger(name).disabled = not access
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)

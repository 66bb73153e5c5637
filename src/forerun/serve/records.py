"""Records: one record per finished request, for the log on standard error and for OpenTelemetry traces.

A record contains no text of prompts or answers; those are logged only with ServeSettings.log_prompts. Log lines are
text or JSON.

A trace, sent to a collector over OTLP, has one span `llm_request` for a request, a child of the caller's span if there
is a `traceparent` header, with child spans for the queue, the time to the first token, and generation. Attribute names
follow OpenTelemetry's conventions for generative AI where they exist. Only this file imports opentelemetry.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from forerun.errors import MissingPackage
from forerun.serve.answers import Writer
from forerun.serve.envelope import ACCESS
from forerun.serve.gate import OpenRequest
from forerun.streams import show_note

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Record = Mapping[str, Any]
FINISHED, LEFT = "finished", "client_left"
LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
REQUESTS = "forerun.serve.requests"
LEVELS = {  # forerun.llm logs the memory plan; uvicorn warns of invalid requests
    "forerun.serve": logging.INFO,
    "forerun.llm": logging.INFO,
    "uvicorn.error": logging.ERROR,
}
ATTRIBUTES = {  # of spans: the field of the record
    "gen_ai.operation.name": "endpoint",
    "gen_ai.request.model": "model",
    "gen_ai.response.id": "id",
    "gen_ai.request.choice.count": "num_samples",
    "gen_ai.conversation.id": "session_id",
    "gen_ai.usage.input_tokens": "num_prompt_tokens",
    "gen_ai.usage.output_tokens": "num_output_tokens",
    "gen_ai.latency.time_in_queue": "queue_s",
    "gen_ai.latency.time_to_first_token": "first_token_s",
    "gen_ai.latency.e2e": "total_s",
    **{f"forerun.{name}": name for name in ("outcome", "tenant", "request_id", "num_drafted", "num_accepted", "gain")},
}
EXTRA = "sending traces requires OpenTelemetry's SDK and its OTLP exporter: pip install 'forerun[otel]'"
SET_BY_CLIENTS = ("request_id", "session_id")  # quoted in the log
request_log = logging.getLogger(REQUESTS)
start_log = logging.getLogger("forerun.serve.server")


def record_of(entry: OpenRequest, writer: Writer, outcome: str) -> Record:
    """The record of a request, from its arrival until now.

    `outcome` is "finished", "client_left", or the code of the error that ended it. Times are seconds since the arrival;
    None if the event did not happen. `request_id` is the x-request-id of the answer.
    """
    counts = writer.answers.counts()
    return {
        "id": writer.id,
        "endpoint": writer.parsed.endpoint,
        "tenant": entry.tenant,
        "model": writer.model,
        "outcome": outcome,
        "num_samples": len(writer.answers.sequences),
        "num_prompt_tokens": writer.num_prompt,
        "num_output_tokens": writer.num_output,
        "queue_s": entry.queue_s,
        "first_token_s": entry.first_token_s,
        "total_s": time.perf_counter() - entry.entered_s,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "tokens_per_round": counts.tokens_per_round,
        "gain": counts.gain,
        "request_id": entry.request_id,
        "session_id": entry.session_id or None,
    }


def log_request(record: Record) -> None:
    """Write the log line of a record, with numbers rounded."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in record.items()}
    fields = {name: value for name, value in rounded.items() if name != "model"}
    shown = {**fields, **{name: json.dumps(record[name]) for name in SET_BY_CLIENTS if record[name]}}
    text = " ".join(f"{name}={value}" for name, value in shown.items() if name != "outcome")
    request_log.info("%s %s", record["outcome"], text, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Formats log records as one JSON object per line: time, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one log record."""
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


class LogLines(logging.Handler):
    """Writes to what `sys.stderr` is at the time: a progress bar replaces it, to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one log record."""
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


def log_to_stderr(form: LogFormat, access: bool) -> None:
    """Log to standard error; with `access` also a line for each request and each response.

    The warnings of the whole library are lines of this log too, in place of the command line's own lines.
    """
    handler = LogLines()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    for name in (ACCESS, REQUESTS):
        logging.getLogger(name).setLevel(logging.INFO if access else logging.WARNING)
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    logging.getLogger("forerun").handlers = [handler]


def log_start(form: LogFormat, model: str, address: str, fingerprint: str) -> None:
    """Say on standard error that the server listens, and where: two lines of text, or one JSON object."""
    text = f"{model} at {address}/v1, fingerprint {fingerprint}"
    if form == "text":
        show_note(text)
        show_note(f"page: {address}/")
        return
    fields = {"model": model, "address": f"{address}/v1", "page": f"{address}/", "fingerprint": fingerprint}
    start_log.info("%s", text, extra={"fields": fields})


def require_otel() -> None:
    """Raise MissingPackage if OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise MissingPackage(EXTRA) from error


class SpanSink:
    """Sends every record as a trace to `endpoint`, a collector's OTLP address over HTTP.

    `exporter` replaces the HTTP exporter in tests. Raises MissingPackage if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        require_otel()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self.provider = TracerProvider(resource=Resource.create({"service.name": "forerun"}))
        self.provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("forerun")

    def take(self, record: Record, traceparent: str) -> None:
        """Queue the spans of a request that ends now; a background thread sends them."""
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        arrived_s = time.time() - record["total_s"]
        offsets_s = [0.0, *(record[name] for name in ("queue_s", "first_token_s", "total_s"))]
        times = [None if offset is None else int((arrived_s + offset) * 1_000_000_000) for offset in offsets_s]
        attributes = {name: record[field] for name, field in ATTRIBUTES.items() if record[field] is not None}
        span = self.tracer.start_span(
            "llm_request", context=parent, kind=trace.SpanKind.SERVER, attributes=attributes, start_time=times[0]
        )
        if record["outcome"] != FINISHED:
            span.set_status(Status(StatusCode.ERROR, record["outcome"]))
        within = trace.set_span_in_context(span)
        for name, first, last in zip(("queue", "first token", "generation"), times, times[1:], strict=False):
            if first is not None and last is not None:
                self.tracer.start_span(name, context=within, start_time=first).end(last)
        span.end(times[-1])

    def close(self) -> None:
        """Send the queued spans."""
        self.provider.shutdown()

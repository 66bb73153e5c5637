"""Records: what one request was and what became of it, for the log on standard error and for OpenTelemetry's traces.

A record holds no text: nothing of a prompt or an answer is in a line or in a span, unless ServeSettings.log_prompts
asks for it. Lines are text or JSON.

A trace, sent to a collector over OTLP, has one span for a request, `llm_request`, below the caller's where a
`traceparent` header names it, with spans inside it for the time in the queue, up to the first token, and from there on.
Names of attributes are those of OpenTelemetry's conventions for generative models where they have one. This is the file
that knows opentelemetry.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from forerun.errors import MissingPackage
from forerun.serve.answers import Writer
from forerun.serve.envelope import ACCESS
from forerun.serve.gate import OpenRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Record = Mapping[str, Any]
FINISHED, LEFT = "finished", "client_left"
LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
REQUESTS = "forerun.serve.requests"
LEVELS = {"forerun.serve": logging.INFO, "uvicorn.error": logging.ERROR}  # its warnings are of what clients send
ATTRIBUTES = {  # of a span, by the names of what they tell
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
EXTRA = "sending traces needs OpenTelemetry's SDK and its OTLP exporter: pip install 'forerun[otel]'"
CHOSEN = ("request_id", "session_id")  # by clients: they may hold anything
request_log = logging.getLogger(REQUESTS)


def record_of(visit: OpenRequest, writer: Writer, outcome: str) -> Record:
    """One request that was read, from its arrival until now.

    `outcome` is "finished", "client_left", or the code of the error that ended it. Seconds count from the arrival;
    None stands for what it did not come to. `request_id` is the x-request-id of the answer.
    """
    counts = writer.answers.counts()
    return {
        "id": writer.id,
        "endpoint": writer.asked.endpoint,
        "tenant": visit.tenant,
        "model": writer.model,
        "outcome": outcome,
        "num_samples": len(writer.answers.sequences),
        "num_prompt_tokens": writer.num_prompt,
        "num_output_tokens": writer.num_output,
        "queue_s": visit.queue_s,
        "first_token_s": visit.first_token_s,
        "total_s": time.perf_counter() - visit.entered_s,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "tokens_per_round": counts.tokens_per_round,
        "gain": counts.gain,
        "request_id": visit.request_id,
        "session_id": visit.session_id or None,
    }


def log_request(record: Record) -> None:
    """Write the line of a request that was read, with as many digits as a log needs."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in record.items()}
    fields = {name: value for name, value in rounded.items() if name != "model"}
    shown = {**fields, **{name: json.dumps(record[name]) for name in CHOSEN if record[name]}}
    text = " ".join(f"{name}={value}" for name, value in shown.items() if name != "outcome")
    request_log.info("%s %s", record["outcome"], text, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
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


def log_to_stderr(form: LogFormat, access: bool) -> None:
    """Show what the server has to say, with times; with `access` also a line for each request and each answer."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    for name in (ACCESS, REQUESTS):
        logging.getLogger(name).disabled = not access
    for name, level in LEVELS.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)


def require_otel() -> None:
    """Raise MissingPackage where OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise MissingPackage(EXTRA) from error


class SpanSink:
    """Sends every record as a trace to `endpoint`, the collector's OTLP address for traces over HTTP.

    `exporter` takes the collector's place in tests. Raises MissingPackage where OpenTelemetry is not installed.
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
        """Queue the spans of a request that ends now; another thread sends them."""
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        began_s = time.time() - record["total_s"]
        marks = [0.0, *(record[name] for name in ("queue_s", "first_token_s", "total_s"))]
        times = [None if mark is None else int((began_s + mark) * 1_000_000_000) for mark in marks]
        attributes = {name: record[field] for name, field in ATTRIBUTES.items() if record[field] is not None}
        span = self.tracer.start_span(
            "llm_request", context=above, kind=trace.SpanKind.SERVER, attributes=attributes, start_time=times[0]
        )
        if record["outcome"] != FINISHED:
            span.set_status(Status(StatusCode.ERROR, record["outcome"]))
        within = trace.set_span_in_context(span)
        for name, first, last in zip(("queue", "first token", "generation"), times, times[1:], strict=False):
            if first is not None and last is not None:
                self.tracer.start_span(name, context=within, start_time=first).end(last)
        span.end(times[-1])

    def close(self) -> None:
        """Send what is queued."""
        self.provider.shutdown()

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from forerun.accept.outcome import Counts
from forerun.errors import MissingPackage
from forerun.serve.envelope import ACCESS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

FINISHED, LEFT = "finished", "client_left"
LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
REQUESTS = "forerun.serve.requests"
LEVELS = {"forerun.serve": logging.INFO, "uvicorn.error": logging.ERROR}  # its warnings are of what clients send
OF_REQUEST = (
    "id",
    "endpoint",
    "tenant",
    "outcome",
    "num_samples",
    "num_prompt_tokens",
    "num_output_tokens",
    "queue_s",
    "first_token_s",
    "total_s",
)
OF_COUNTS = ("num_drafted", "num_accepted", "tokens_per_round", "gain")
EXTRA = "sending traces needs OpenTelemetry's SDK and its OTLP exporter: pip install 'forerun[otel]'"
request_log = logging.getLogger(REQUESTS)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was read, from its arrival to its end.

    `outcome` is "finished", "client_left", or the code of the error that ended it. Seconds count from the arrival;
    None stands for what it did not come to. `traceparent` is the header of that name; `request_id` is the x-request-id
    of the answer.
    """

    id: str
    endpoint: str
    tenant: str
    model: str
    outcome: str
    num_samples: int
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float
    counts: Counts
    traceparent: str = ""
    request_id: str = ""
    ended_s: float = field(default_factory=time.time)  # since 1970

    def fields(self) -> dict[str, Any]:
        """The record as names and numbers, with as many digits as a log needs."""
        values = {name: getattr(self, name) for name in OF_REQUEST}
        values |= {name: getattr(self.counts, name) for name in OF_COUNTS}
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        return rounded | {"request_id": self.request_id}


def log_request(record: RequestRecord) -> None:
    """Write the line of a request that was read."""
    fields = record.fields()
    shown = {**fields, "request_id": json.dumps(record.request_id)}  # a client may have chosen it
    text = " ".join(f"{name}={value}" for name, value in shown.items() if name != "outcome")
    request_log.info("%s %s", record.outcome, text, extra={"fields": fields})


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

    def take(self, record: RequestRecord) -> None:
        """Queue one request's spans; another thread sends them."""
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        began_s = record.ended_s - record.total_s
        began, ended = nanoseconds(began_s), nanoseconds(began_s + record.total_s)
        span = self.tracer.start_span(
            "llm_request", context=above, kind=trace.SpanKind.SERVER, attributes=attributes(record), start_time=began
        )
        if record.outcome != FINISHED:
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        within = trace.set_span_in_context(span)
        marks = [0.0, record.queue_s, record.first_token_s, record.total_s]
        for name, first_s, last_s in zip(("queue", "first token", "generation"), marks, marks[1:], strict=False):
            if first_s is not None and last_s is not None:
                part = self.tracer.start_span(name, context=within, start_time=nanoseconds(began_s + first_s))
                part.end(nanoseconds(began_s + last_s))
        span.end(ended)

    def close(self) -> None:
        """Send what is queued."""
        self.provider.shutdown()


def attributes(record: RequestRecord) -> dict[str, Any]:
    """What a span says of its request."""
    found = {
        "gen_ai.operation.name": record.endpoint,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.id,
        "gen_ai.request.choice.count": record.num_samples,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "gen_ai.latency.e2e": record.total_s,
        "forerun.outcome": record.outcome,
        "forerun.tenant": record.tenant,
        "forerun.request_id": record.request_id,
        "forerun.num_drafted": record.counts.num_drafted,
        "forerun.num_accepted": record.counts.num_accepted,
        "forerun.gain": record.counts.gain,
    }
    return {name: value for name, value in found.items() if value is not None}


def nanoseconds(seconds: float) -> int:
    """A time as OpenTelemetry counts it."""
    return int(seconds * 1_000_000_000)

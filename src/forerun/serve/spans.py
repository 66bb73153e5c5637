"""Spans: requests as OpenTelemetry traces, sent to a collector over OTLP; the file that knows opentelemetry.

A request is one span, `llm_request`, below the caller's where a `traceparent` header names it, with spans inside it for
the time in the queue, up to the first token, and from there on. Names of attributes are those of OpenTelemetry's
conventions for generative models where they have one. A span holds numbers and names, and no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.errors import MissingPackage
from forerun.serve.record import FINISHED, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXTRA = "sending traces needs OpenTelemetry's SDK and its OTLP exporter: pip install 'forerun[otel]'"
SECOND_NS = 1_000_000_000


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
        began_s = record.arrived_s
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
    return int(seconds * SECOND_NS)

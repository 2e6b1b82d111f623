"""A trace on its way to an OTLP endpoint, by OpenTelemetry's exporter (the extra ``otel``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from commbench import __version__
from commbench.errors import UsageError
from commbench.harness.views.spans import Span

EXTRA = "pip install 'commbench[otel]'"
_EXPORT_S = 5.0  # that an endpoint may take for one batch, repetitions included
_BATCH = 512


def check_endpoint(endpoint: str) -> str:
    """The address that spans are posted to: the endpoint, with the standard's path where it has none.

    Raises UsageError for what is no http or https address.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--otlp-endpoint {endpoint}: {error}; write http://localhost:4318") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"--otlp-endpoint {endpoint} is no http address; write http://localhost:4318")
    return endpoint if parts.path not in ("", "/") else f"{endpoint.rstrip('/')}/v1/traces"


def exporter_to(endpoint: str) -> Any:
    """OpenTelemetry's exporter to an endpoint. Raises UsageError for a bad one, and where the extra is missing."""
    address = check_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UsageError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing): {EXTRA}; --trace alone writes trace.json"
        ) from error
    return OTLPSpanExporter(endpoint=address, timeout=_EXPORT_S)


def export(exporter: Any, trace_id: str, processes: Iterable[tuple[dict[str, Any], list[Span]]]) -> str:
    """Send all spans; gives what went wrong, "" if nothing. The first batch that fails ends it."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    said = _Said()
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3")]
    before = [(logger.propagate, logger.handlers[:]) for logger in loggers]
    for logger in loggers:  # the caller warns, once
        logger.propagate, logger.handlers = False, [said]
    try:
        for resource, spans in processes:
            made = _open_telemetry(trace_id, resource, spans)
            for start in range(0, len(made), _BATCH):
                if exporter.export(made[start : start + _BATCH]) is not SpanExportResult.SUCCESS:
                    return said.first or "the endpoint did not take it"
    finally:
        exporter.shutdown()
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers
    return ""


class _Said(logging.Handler):
    """Keeps the first warning: of a connection that fails, the system's word for it."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first and record.levelno >= logging.WARNING:
            line = record.getMessage().splitlines()[0]
            found = re.search(r"\[Errno -?\d+\] ([^\"')]+)", line)
            self.first = found[1] if found else line[:300]


def _open_telemetry(trace_id: str, resource: Mapping[str, Any], spans: Iterable[Span]) -> list[Any]:
    """Spans as the SDK's own, with the ids and times that they have already."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: str) -> SpanContext:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))

    origin = Resource(dict(resource))
    scope = InstrumentationScope("commbench", __version__)
    return [
        ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent_id) if span.parent_id else None,
            resource=origin,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )
        for span in spans
    ]

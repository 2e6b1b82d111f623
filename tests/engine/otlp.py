"""An OTLP receiver: an HTTP server that takes what the protocol says, and keeps the spans."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Receiver:
    """endpoint: as ``--otlp-endpoint`` takes it. spans: (attributes of the resource, span) as they came in."""

    endpoint: str = ""
    paths: list[str] = field(default_factory=list)
    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    received = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.paths.append(self.path)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in group.scope_spans:
                    received.spans += [(_plain(group.resource.attributes), span) for span in scope.spans]
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return _plain(span.attributes)

"""Spans of ended requests, written by OpenTelemetry's SDK.

Attributes have vLLM's names, which begin with ``gen_ai.`` (OpenTelemetry's semantic conventions for
generative AI, and vLLM's additions for latencies). Prompts and answers are not part of a span.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.propagators.textmap import DefaultGetter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import glowplug
from glowplug.core.protocols import EndedRequest

CLOSE_SECONDS = 3.0  #: time for the spans that are left when the server ends
NANOSECONDS = 1_000_000_000
TRACES_PATH = "/v1/traces"  #: path of OTLP over HTTP, for an endpoint without a path


def open_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """Return the exporter for a collector.

    Args:
        endpoint: URL of the collector.
        protocol: "grpc" or "http/protobuf".
    """
    url = urlsplit(endpoint)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=url.netloc, insecure=url.scheme != "https")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    path = url.path if url.path not in ("", "/") else TRACES_PATH
    return HttpExporter(endpoint=url._replace(path=path).geturl())


class SpanWriter:
    """The ``protocols.RequestObserver`` that writes one span for each request.

    A span is queued by ``ended`` and sent by a thread of the SDK. A client's trace context (W3C
    ``traceparent``) becomes the span's parent; a client that does not sample gets no span.

    Args:
        exporter: exporter of finished spans.
        service_name: ``service.name`` of the spans' resource.
    """

    def __init__(self, exporter: SpanExporter, service_name: str) -> None:
        resource = Resource.create(
            {"service.name": service_name, "service.version": glowplug.__version__}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("glowplug", glowplug.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._getter: DefaultGetter = DefaultGetter()

    def ended(self, request: EndedRequest) -> None:
        started = int(request.started * NANOSECONDS)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(request.trace), getter=self._getter),
            kind=SpanKind.SERVER,
            start_time=started,
        )
        if span.is_recording():
            span.set_attributes(attributes_of(request))
            if request.error is not None:
                span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(started + int(request.seconds * NANOSECONDS))

    def close(self) -> None:
        # NOTE: the SDK may wait for an unreachable collector longer than a server should.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def attributes_of(request: EndedRequest) -> dict[str, Any]:
    """Return the attributes of a request's span; times are in seconds."""
    params = request.params
    inference = None
    if request.prefill is not None:
        inference = request.prefill + (request.decode or 0.0)
    found = {
        "gen_ai.operation.name": "chat" if "chat" in request.route else "text_completion",
        "gen_ai.request.id": request.job,
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.n": request.sequences,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.usage.num_sequences": request.sequences,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.output_tokens,
        "gen_ai.usage.cached_tokens": request.cached_tokens,
        "gen_ai.response.finish_reasons": request.finish_reasons or None,
        "gen_ai.latency.e2e": request.seconds,
        "gen_ai.latency.time_to_first_token": request.first_token,
        "gen_ai.latency.time_in_queue": request.queue,
        "gen_ai.latency.time_in_model_prefill": request.prefill,
        "gen_ai.latency.time_in_model_decode": request.decode,
        "gen_ai.latency.time_in_model_inference": inference,
        "http.request.method": "POST",
        "http.route": request.route,
        "http.response.status_code": request.status,
        "error.type": request.error,
        "glowplug.request_id": request.id,
        "glowplug.stream": request.streamed,
    }
    return {name: value for name, value in found.items() if value is not None}

"""Traces: one span for each request that generates, with the client's trace as its parent."""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import EndedRequest
from tests.e2e.serving import HTTP, Served, served
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "say:abc"}], "max_tokens": 9, "temperature": 0.5}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """An OTLP collector over HTTP: ``spans`` has the spans received, in order."""

    def __init__(self) -> None:
        collector = self
        self.spans: list[Any] = []
        self.paths: list[str] = []
        self.resources: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.receive(self.path, data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def receive(self, path: str, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.paths.append(path)
        for batch in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append(
                {item.key: item.value.string_value for item in batch.resource.attributes}
            )
            self.spans += [span for scope in batch.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    one = Collector()
    yield one
    one.close()


def spans_of(collector: Collector, *requests: dict[str, Any], **tracing: Any) -> list[Any]:
    """Serve requests, stop the server and return the spans that the collector received."""
    options = {"endpoint": collector.url, **tracing}
    with served(tracing=options, plugins=load_plugins(entry_points=False)) as one:
        for request in requests:
            HTTP.post(one.url + CHAT, **{"json": BODY, **request})
    return collector.spans


def test_a_request_becomes_a_span_with_vllm_s_attributes(collector: Collector) -> None:
    (span,) = spans_of(collector, {"headers": {"X-Request-Id": "mine"}}, service_name="answers")
    assert span.name == "llm_request" and not span.parent_span_id
    found = attributes(span)
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.response.model"] == found["gen_ai.request.model"] == "fake"
    assert found["gen_ai.usage.prompt_tokens"] == len("say:abc") + 3
    assert found["gen_ai.usage.completion_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (9, 0.5)
    assert (found["http.route"], found["http.response.status_code"]) == (CHAT, 200)
    first, whole = found["gen_ai.latency.time_to_first_token"], found["gen_ai.latency.e2e"]
    assert 0 < first <= whole
    assert found["gen_ai.latency.time_in_queue"] >= 0
    inference = found["gen_ai.latency.time_in_model_inference"]
    assert inference == pytest.approx(
        found["gen_ai.latency.time_in_model_prefill"] + found["gen_ai.latency.time_in_model_decode"]
    )
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(
        whole * 1e9, abs=1e4
    )
    assert not any("say:" in str(value) for value in found.values()), "prompts are not exported"
    assert collector.paths == ["/v1/traces"]
    assert collector.resources[0]["service.name"] == "answers"


def test_the_client_s_trace_is_continued(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
    (span,) = spans_of(collector, {"headers": headers})
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    assert span.trace_state == "vendor=x"


def test_a_client_that_does_not_sample_gets_no_span(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert len(spans_of(collector, {"headers": headers}, {})) == 1


def test_a_broken_trace_context_starts_a_new_trace(collector: Collector) -> None:
    broken = ("", "00-zz-1-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 4096, "\xff" * 55)
    requests = [{"headers": [("traceparent", value.encode("latin-1"))]} for value in broken]
    spans = spans_of(collector, *requests)
    assert len(spans) == len(broken) and not any(span.parent_span_id for span in spans)


def test_a_failed_request_is_an_error_and_polls_have_no_span(collector: Collector) -> None:
    failing = {**BODY, "messages": [{"role": "user", "content": "fail:nan"}]}
    with served(
        tracing={"endpoint": collector.url}, plugins=load_plugins(entry_points=False)
    ) as one:
        HTTP.get(one.url + "/health")
        HTTP.post(one.url + CHAT, json={})  # refused: no sequence ran
        HTTP.post(one.url + CHAT, json=failing)
    (span,) = collector.spans
    assert span.status.code == 2  # error
    assert attributes(span)["error.type"] == "nan_logits"
    assert attributes(span)["http.response.status_code"] == 500


def test_streams_and_choices_are_one_span_each(collector: Collector) -> None:
    spans = spans_of(collector, {"json": {**BODY, "stream": True}}, {"json": {**BODY, "n": 2}})
    streamed, doubled = map(attributes, spans)
    assert streamed["glowplug.stream"] is True and streamed["gen_ai.usage.completion_tokens"] == 4
    assert doubled["gen_ai.usage.num_sequences"] == doubled["gen_ai.request.n"] == 2
    assert doubled["gen_ai.usage.completion_tokens"] == 8


def test_spans_travel_over_grpc() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra otel")
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            received.extend(request.resource_spans[0].scope_spans[0].spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        plugins = load_plugins(entry_points=False)
        with served(tracing={"endpoint": f"grpc://127.0.0.1:{port}"}, plugins=plugins) as one:
            HTTP.post(one.url + CHAT, json=BODY)
    finally:
        server.stop(None)
    assert [span.name for span in received] == ["llm_request"]


def test_a_collector_that_is_away_disturbs_no_request() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    tracing = {"endpoint": "http://127.0.0.1:9/v1/traces"}
    with served(tracing=tracing, plugins=load_plugins(entry_points=False)) as one:
        assert HTTP.post(one.url + CHAT, json=BODY).status_code == 200
    assert one.exit_code == 0


# ---- observers -----------------------------------------------------------------------------------


class Recorder:
    """An observer that keeps the requests, or fails at each."""

    def __init__(self, fails: bool = False) -> None:
        self.requests: list[EndedRequest] = []
        self.closed = False
        self._fails = fails

    def ended(self, request: EndedRequest) -> None:
        self.requests.append(request)
        if self._fails:
            raise RuntimeError("a fault of the observer")

    def close(self) -> None:
        self.closed = True


class Observing:
    """Plugins whose only hook ``request_observers`` returns these observers."""

    def __init__(self, *observers: Recorder) -> None:
        self._observers = list(observers)
        self.calls: list[str] = []

    def call_each(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        self.calls.append(hook)
        return [("observing", self._observers)] if hook == "request_observers" else []

    def find(self, slot: str, name: str) -> None:
        return None


def test_observers_are_registered_at_start_and_called_without_hooks() -> None:
    recorder = Recorder()
    plugins = Observing(recorder)
    with served(plugins=plugins) as one:
        before = list(plugins.calls)
        ask(one)
        ask(one, request_id="named", n=2)
        until(lambda: len(recorder.requests) == 2, "both requests are observed")
        assert plugins.calls == before and before.count("request_observers") == 1
    first, second = recorder.requests
    assert (first.id == first.job, second.job, second.sequences) == (True, "named", 2)
    assert (first.prompt_tokens, first.output_tokens) == (len("say:abc") + 3, 4)
    assert first.model == "fake" and first.finish_reasons == ("stop",) and first.error is None
    assert first.params.max_tokens == 9 and first.trace == {}
    assert recorder.closed


def test_an_observer_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder(fails=True), Recorder()
    with served(plugins=Observing(broken, sound)) as one, caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert ask(one).status_code == 200
        until(lambda: len(sound.requests) == 3, "the other observer is still called")
    assert len(broken.requests) == 1
    assert [r for r in caplog.records if "is not called again" in r.getMessage()].__len__() == 1


def ask(server: Served, **more: Any) -> httpx.Response:
    return HTTP.post(server.url + CHAT, json={**BODY, **more})


def test_the_trace_id_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with served() as one, caplog.at_level(logging.INFO, "glowplug.request"):
        for value in (f"00-{TRACE}-{PARENT}-01", "00-forged\ttrace-01"):
            HTTP.post(one.url + CHAT, json=BODY, headers={"traceparent": value})
        until(lambda: sum(CHAT in r.getMessage() for r in caplog.records) == 2, "logged")
    said = [r.getMessage() for r in caplog.records if CHAT in r.getMessage()]
    assert [f"trace={TRACE}" in line for line in said] == [True, False]
    assert "trace=" not in said[1]

"""OpenTelemetry traces: a span for each request, sent to an OTLP collector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.requirements import unmet

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.core.protocols import RequestObserver

GRPC_PORT = 4317  #: port of OTLP over gRPC
RELEASE = ">=1.27"
#: protocol -> packages that it needs
NEEDED = {
    "grpc": (
        Package("opentelemetry-sdk", RELEASE),
        Package("opentelemetry-exporter-otlp-proto-grpc", RELEASE),
    ),
    "http/protobuf": (
        Package("opentelemetry-sdk", RELEASE),
        Package("opentelemetry-exporter-otlp-proto-http", RELEASE),
    ),
}


def protocol_of(endpoint: str, stated: str) -> str:
    """Return the protocol of an endpoint: a key of ``NEEDED``.

    Args:
        endpoint: URL of the collector.
        stated: option ``tracing.protocol``.
    """
    if stated != "auto":
        return stated
    url = urlsplit(endpoint)
    return "grpc" if url.scheme == "grpc" or url.port == GRPC_PORT else "http/protobuf"


@hookimpl
def checked_packages() -> list[str]:
    return sorted({package.name for packages in NEEDED.values() for package in packages})


@hookimpl
def check_plan(context: CheckContext) -> list[Refusal]:
    """Refuse an endpoint that is not a URL of a host, or whose exporter is not installed."""
    options = context.config.tracing
    if options.endpoint is None:
        return []
    wrong = _wrong_url(options.endpoint)
    if wrong:
        fix = 'tracing.endpoint = "http://HOST:4318/v1/traces"'
        return [Refusal("tracing", "tracing.endpoint", wrong, fix)]
    protocol = protocol_of(options.endpoint, options.protocol)
    missing = [
        f"{package.name}{package.spec} ({found})"
        for package in NEEDED[protocol]
        if (found := unmet(package, context.facts.software.packages))
    ]
    if not missing:
        return []
    reason = f"traces over {protocol} need {', '.join(missing)}"
    fix = 'pip install "glowplug[otel]", or leave tracing.endpoint out'
    return [Refusal("tracing", "tracing.endpoint", reason, fix)]


def _wrong_url(endpoint: str) -> str:
    """Return why ``endpoint`` is not the URL of a host; "" if it is."""
    try:
        url = urlsplit(endpoint)
        found = bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError as error:
        return f"{endpoint[:200]!r} is not a URL: {error}"
    return "" if found else f"{endpoint[:200]!r} names no host"


@hookimpl
def request_observers(plan: EnginePlan) -> list[RequestObserver]:
    """Return the writer of spans; [] without an endpoint."""
    given: dict[str, Any] = plan.config.get("tracing") or {}
    endpoint = given.get("endpoint")
    if not endpoint:
        return []
    from glowplug.plugins.tracing.otlp_runtime import SpanWriter, open_exporter

    protocol = protocol_of(endpoint, given.get("protocol", "auto"))
    return [SpanWriter(open_exporter(endpoint, protocol), given.get("service_name", "glowplug"))]

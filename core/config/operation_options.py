"""Sections of the configuration for operators: log, metrics and traces. Plan zone: no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.options import Section

#: engines under whose names metrics are exported too
CompatNames = Literal["none", "vllm", "sglang", "all"]


class LogOptions(Section):
    """Options of the log."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level that is shown"
    )
    format: Literal["human", "json"] = Field(
        "human", description="format of log lines; json: one object per line"
    )
    stats_interval: float = Field(
        10.0, ge=0, description="seconds between lines of statistics; 0: none"
    )
    requests: bool = Field(
        True, description="log a line for each HTTP request, never with its prompt"
    )


class MetricsOptions(Section):
    """Options of the metrics."""

    enabled: bool = Field(True, description="serve /metrics")
    compat: Literal["none", "vllm", "sglang", "all"] | tuple[Literal["vllm", "sglang"], ...] = (
        Field(
            "none",
            description="also export the series that mean the same there under the names of vLLM, "
            "of SGLang or of both (docs/metrics.md)",
        )
    )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the other engines' names, in order, each once."""
        if isinstance(self.compat, tuple):
            return tuple(dict.fromkeys(self.compat))
        return {"none": (), "all": ("vllm", "sglang")}.get(self.compat, (self.compat,))

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return {} if self.enabled else {"compat": "metrics.enabled is false"}


class TracingOptions(Section):
    """Options of OpenTelemetry traces: one span for each request that generates."""

    endpoint: str | None = Field(
        None,
        pattern=r"^(https?|grpc)://",
        description="URL of an OTLP collector that receives a span for each request, such as "
        "http://HOST:4318/v1/traces or grpc://HOST:4317; None: no traces",
    )
    protocol: Literal["auto", "grpc", "http/protobuf"] = Field(
        "auto",
        description="OTLP over gRPC or over HTTP; auto: gRPC for grpc:// and for port 4317",
    )
    service_name: str = Field(
        "glowplug", min_length=1, description="service.name of the spans' resource"
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        if self.endpoint is not None:
            return {}
        return dict.fromkeys(("protocol", "service_name"), "tracing.endpoint is not set")

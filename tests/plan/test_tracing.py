"""Traces: refused before loading without the exporter's packages, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from glowplug.core.errors import Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.plugins.tracing.otlp import NEEDED, protocol_of

Planner = Callable[..., EnginePlan]
Refuser = Callable[..., dict[str, Refusal]]
URL = "http://10.0.0.9:4318/v1/traces"


def machine(*packages: str) -> HardwareFacts:
    """Return a machine on which these packages are installed."""
    sheet = read_sheet("cpu")
    return replace(sheet, packages={**(sheet.packages or {}), **dict.fromkeys(packages, "1.30.0")})


@pytest.mark.parametrize("protocol", NEEDED)
def test_missing_packages_are_refused_with_the_fix(refused: Refuser, protocol: str) -> None:
    wanted = [package.name for package in NEEDED[protocol]]
    config = {"tracing": {"endpoint": URL, "protocol": protocol}}
    for missing in wanted:
        here = machine(*(name for name in wanted if name != missing))
        found = refused(config, hardware=here)["tracing.endpoint"]
        assert f"{missing}>=1.27 (not installed)" in found.reason and protocol in found.reason
        assert found.fix.startswith('pip install "glowplug[otel]"')


def test_traces_are_planned_where_the_packages_are(planned: Planner) -> None:
    here = machine(*(package.name for package in NEEDED["http/protobuf"]))
    plan = planned({"tracing": {"endpoint": URL}}, hardware=here)
    assert [d.value for d in plan.decisions if d.field == "tracing.endpoint"] == [URL]


@pytest.mark.parametrize("url", ["http://", "http://:4318", "http://host:99999", "grpc://"])
def test_a_url_without_a_host_is_refused(refused: Refuser, url: str) -> None:
    found = refused({"tracing": {"endpoint": url}}, hardware=machine())["tracing.endpoint"]
    assert "http://HOST:4318" in found.fix


@pytest.mark.parametrize("url", ["host:4317", "ftp://host", ""])
def test_another_scheme_is_refused(refused: Refuser, url: str) -> None:
    assert "tracing.endpoint" in refused({"tracing": {"endpoint": url}})


@pytest.mark.parametrize(
    ("url", "stated", "protocol"),
    [
        ("grpc://host", "auto", "grpc"),
        ("http://host:4317", "auto", "grpc"),
        ("http://host:4318", "auto", "http/protobuf"),
        ("https://host/v1/traces", "auto", "http/protobuf"),
        ("https://host", "grpc", "grpc"),
        ("http://host:4317", "http/protobuf", "http/protobuf"),
    ],
)
def test_the_protocol_follows_from_the_url(url: str, stated: str, protocol: str) -> None:
    assert protocol_of(url, stated) == protocol


def test_vllm_s_flag_sets_the_endpoint() -> None:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    given = read_command_line(parser.parse_args(["--otlp-traces-endpoint", URL]))
    assert given.config == {"tracing": {"endpoint": URL}}


def test_other_options_of_traces_need_an_endpoint(planned: Planner) -> None:
    plan = planned({"tracing": {"service_name": "x"}})
    (found,) = [one for one in plan.decisions if one.field == "tracing.service_name"]
    assert "tracing.endpoint is not set" in found.why

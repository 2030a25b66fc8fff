"""The numeric part of ``glowplug check``: refusals, the measurement, and its output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.model_folder import EMBEDDED
from glowplug.core.plan.plan import EnginePlan
from glowplug.entrypoints.bench.others.report import plain
from glowplug.entrypoints.cli.exit_codes import FAILED, OK, REFUSED
from glowplug.entrypoints.cli.flags.command_line import CommandLine
from glowplug.entrypoints.evaluation.files import read_lines

#: sections that do not change what a model computes, and that only a server reads
SERVER_SECTIONS = ("server", "log", "metrics")


def run_numeric(args: argparse.Namespace, given: CommandLine, plan: EnginePlan) -> int:
    """Compare the configured engine with its reference, and print the report.

    Args:
        args: options of the command.
        given: the command line.
        plan: its plan.

    Returns:
        0 if the engine passes, 1 if it differs, 2 if the texts cannot be read.

    Raises:
        PlanRefused: the engine or its reference cannot run.
    """
    from glowplug.entrypoints.numeric.measure import TEXTS, measure
    from glowplug.entrypoints.numeric.show import as_json, as_text

    refusals = list(_refusals(args, plan))
    if refusals:
        raise PlanRefused(refusals, given.source)
    try:
        texts = TEXTS
        if args.numeric_prompts:
            lines = read_lines(args.numeric_prompts, ("prompt",))
            texts = tuple(one["prompt"] for _, one in lines)
        report = measure(_engine(args, given, plan), given.plugins, texts)
    except ValueError as error:
        print(f"glowplug check --numeric: {error}", file=sys.stderr)
        return REFUSED
    if args.json:
        print(json.dumps(plain({"fingerprint": plan.fingerprint, **as_json(report)}), indent=1))
    else:
        print(as_text(report))
    return FAILED if report.failures else OK


def _engine(args: argparse.Namespace, given: CommandLine, plan: EnginePlan) -> dict[str, Any]:
    """Return the engine's configuration as keywords of ``LLM``."""
    config = {key: value for key, value in given.config.items() if key not in SERVER_SECTIONS}
    config.setdefault("model", EMBEDDED)
    config.setdefault("executor", {"use": "multiprocess" if plan.ranks > 1 else "inline"})
    extra = {"plugins": tuple(args.extra_plugins)} if args.extra_plugins else {}
    return {**config, **extra}


def _refusals(args: argparse.Namespace, plan: EnginePlan) -> Iterator[Refusal]:
    """Yield the reasons why the check cannot run for this plan."""
    by = "numeric check"
    if args.facts:
        yield Refusal(
            by,
            "--facts",
            f"the engine runs on this machine, and the plan is for {plan.facts.hardware.name}",
            "remove --facts, or remove --numeric",
        )
    if args.blocked_plugins:
        yield Refusal(
            by,
            "--block-plugin",
            "engines in this process load every plugin",
            "choose another component with --set SECTION.use=NAME",
        )
    if plan.hosts > 1:
        yield Refusal(
            by,
            "executor.hosts",
            f"the engine has {plan.hosts} hosts, and the check runs on one",
            "check a layout of one host",
        )
    groups = plan.mesh.get("dp", 1)
    if groups > 1:
        yield Refusal(
            by,
            "parallel",
            f"the ranks form {groups} groups with requests of their own, and the streams of one "
            "group are compared",
            "check the layout without data-parallel attention (--dp-size, --enable-dp-attention)",
        )

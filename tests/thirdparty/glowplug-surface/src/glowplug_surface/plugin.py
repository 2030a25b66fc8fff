"""Routes, flags and commands. It imports no server before the app is made."""

from __future__ import annotations

import argparse
from typing import Any

from glowplug.core.api import CommandFlag, EnginePlan, hookimpl
from glowplug.core.protocols import EngineHandle


@hookimpl
def extend_app(app: Any, plan: EnginePlan, engine: EngineHandle) -> None:
    from glowplug_surface.routes import Page, routes

    page = Page()
    app.include_router(routes(engine))
    engine.admin("/continue/load")
    engine.mount("/status", page)
    engine.on_start(page.open)
    engine.on_stop(page.close)


@hookimpl
def command_flags() -> list[CommandFlag]:
    path = "scheduler.max_queued_requests"
    return [CommandFlag("--queue-limit", path, "most waiting requests", int)]


@hookimpl
def extend_cli(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("shout")
    parser.add_argument("text")
    parser.set_defaults(run=shout)


def shout(args: argparse.Namespace) -> int:
    print(args.text.upper())
    return 0

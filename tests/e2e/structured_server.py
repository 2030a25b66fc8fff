"""A server of the embedded model in this process, with structured output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Worker
from glowplug.core.startup.components import build_component
from glowplug.entrypoints.front.model_text import open_tokenizer
from glowplug.entrypoints.front.open_engine import make_executor
from tests.e2e.serving import Served


@contextmanager
def served_model(**config: Any) -> Iterator[Served]:
    """Serve the embedded model; ``config`` has top-level keys of the configuration."""
    plugins = load_plugins(entry_points=False)
    plan = make_plan(
        {"model": "embedded", "executor": {"use": "inline"}, **config}, plugins=plugins
    )
    parsers = [
        build_component(plugins, choice, plan, Worker()) for choice in plan.choices_in("outputs")
    ]
    executor: Any = make_executor(plan, plugins)
    one = Served(executor, parsers, plan, open_tokenizer(plan, plugins), plugins)
    try:
        one.wait_ready()
        yield one
    finally:
        one.stop()
        one.join()

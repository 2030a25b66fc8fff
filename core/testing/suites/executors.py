"""Conformance suite of the ``executor`` slot: frames to the ranks and back.

class TestMine(ExecutorSuite):
    def make(self, plan):
        return MyExecutor(MyOptions(), plan, None)

    def config(self):
        return {"model": FOLDER, "weights": {"use": "random"}, "executor": {"use": "mine"}}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from glowplug.core.errors import EngineDead, GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import Executor
from glowplug.core.step.messages import (
    Abort,
    Control,
    Inbound,
    Outbound,
    Reply,
    StepOutput,
    Submit,
    decode_outbound,
    encode,
)
from glowplug.core.testing.harness.drive import Collected, collect
from glowplug.core.testing.harness.ranks import run_ranks, submit

LONG = 200  #: output tokens of a request that is aborted


class ExecutorSuite:
    """Tests that every executor must pass.

    Attributes:
        seconds: seconds that an answer may take before the test gives up.
    """

    seconds = 60.0

    def make(self, plan: EnginePlan) -> Executor:
        """Return the executor under test, not yet started."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the configuration of a small engine, with the executor's section."""
        raise NotImplementedError

    def plugins(self) -> PluginSet:
        """Return the plugins of the plan."""
        return load_plugins()

    # ---- driving ---------------------------------------------------------------------------------

    @contextmanager
    def started(self) -> Iterator[Executor]:
        plan = make_plan(self.config(), plugins=self.plugins())
        executor = self.make(plan)
        executor.start(plan)
        try:
            yield executor
        finally:
            executor.stop()

    def messages(self, executor: Executor, sent: list[Inbound]) -> Iterator[Outbound]:
        """Send messages in one frame and yield what comes back, for up to ``seconds``."""
        executor.submit(encode(sent))
        limit = time.monotonic() + self.seconds
        while time.monotonic() < limit:
            frame = executor.outputs(0.05)
            if frame is not None:
                yield from decode_outbound(frame)
        raise AssertionError(f"no answer within {self.seconds:g} s")

    def answers(self, executor: Executor, sent: list[Submit]) -> dict[int, Collected]:
        """Send requests and return their results."""
        seen = {one.id: Collected() for one in sent}
        for message in self.messages(executor, list(sent)):
            if isinstance(message, StepOutput):
                collect(seen, message)
            if all(one.finished is not None for one in seen.values()):
                break
        return seen

    def requests(self) -> list[Submit]:
        return [submit(id, [5 + id, 9, 17], 4 + id) for id in range(5)]

    # ---- tests -----------------------------------------------------------------------------------

    def test_tokens_are_those_of_the_ranks(self) -> None:
        """Each request ends once, with the tokens of the same engine in this thread."""
        config = {name: part for name, part in self.config().items() if name != "executor"}
        wanted = run_ranks(config, self.requests())
        with self.started() as executor:
            assert executor.leads
            first = self.answers(executor, self.requests())
            second = self.answers(executor, self.requests())
        for id, one in wanted.items():
            assert first[id].tokens == one.tokens, f"request {id} has other tokens"
            assert second[id].tokens == one.tokens, f"request {id} has other tokens later"

    def test_an_idle_engine_returns_nothing_in_time(self) -> None:
        with self.started() as executor:
            begun = time.monotonic()
            found = []
            while time.monotonic() < begun + 0.3:
                frame = executor.outputs(0.1)
                found += [] if frame is None else decode_outbound(frame)
            assert not any(isinstance(one, StepOutput) and one.ids for one in found)

    def test_an_abort_arrives(self) -> None:
        with self.started() as executor:
            one = submit(1, [5, 6, 7], LONG)
            seen = {1: Collected()}
            for message in self.messages(executor, [one, Abort([1])]):
                if isinstance(message, StepOutput):
                    collect(seen, message)
                if seen[1].finished is not None:
                    break
            assert seen[1].finished is not None and seen[1].finished.reason == "abort"

    def test_a_control_is_answered(self) -> None:
        with self.started() as executor:
            for message in self.messages(executor, [Control(7, "check", {})]):
                if isinstance(message, Reply):
                    assert message.id == 7 and message.ok
                    break

    def test_a_stopped_engine_says_so(self) -> None:
        """``outputs`` raises after ``stop``; a second ``stop`` does nothing."""
        with self.started() as executor:
            executor.stop()
            executor.stop()
            with pytest.raises(EngineDead):
                for _ in range(100):
                    executor.outputs(0.05)

    def test_a_start_that_fails_raises(self) -> None:
        """Ranks whose plugins are not the plan's end the start with an error, not with silence."""
        plan = make_plan(self.config(), plugins=self.plugins())
        plan = replace(plan, plugin_fingerprint="of another environment")
        executor = self.make(plan)
        try:
            with pytest.raises(GlowplugError, match="fingerprint"):
                executor.start(plan)
        finally:
            executor.stop()

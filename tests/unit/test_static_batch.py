"""Times of a static batch from the reports of an engine's groups."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.entrypoints.bench.others.in_process import run_static_batch
from glowplug.entrypoints.front.delta import Delta


@dataclass(eq=False)
class Stream:
    done: bool = False


class GroupedEngine:
    """An engine in whose poll one of its groups reports one token of each of its sequences."""

    def __init__(self, groups: int, tokens: int, prompts: int) -> None:
        self.plan = SimpleNamespace(sizes=SimpleNamespace(groups=groups))
        self._streams: list[Stream] = []
        self._reports = [
            (step == tokens - 1, range(group, prompts, groups))
            for step in range(tokens)
            for group in range(groups)
        ]

    def submit(self, prompt: list[int], params: object) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def poll(self) -> list[tuple[Stream, Delta]]:
        is_last, places = self._reports.pop(0)
        for place in places:
            self._streams[place].done = is_last
        delta = Delta(token_ids=[7], finish_reason="length" if is_last else None)
        return [(self._streams[place], delta) for place in places]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_step_is_complete_when_every_group_has_reported(groups: int) -> None:
    engine: Any = GroupedEngine(groups, tokens=9, prompts=6)
    times = run_static_batch(engine, [[1, 2]] * 6, 9)
    assert times.gained == (6,) * 8
    assert len(times.decodes) == 8


def test_a_step_of_some_sequences_is_none() -> None:
    """One group, whose sequences take turns."""
    engine: Any = GroupedEngine(2, tokens=4, prompts=4)
    engine.plan.sizes.groups = 1
    assert run_static_batch(engine, [[1, 2]] * 4, 4).decodes == ()

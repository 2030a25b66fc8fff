"""Expandable segments: the settings that a rank passes to torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.startup import build_rank, torch_allocator
from glowplug.core.startup.torch_allocator import (
    ALLOCATOR_VARIABLES,
    SETTINGS_FUNCTION,
    use_expandable_segments,
)
from glowplug.core.testing.harness.ranks import rank_plan
from tests.support.tiny import write_config


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings passed to torch, which are recorded and not applied."""
    words: list[str] = []
    monkeypatch.setattr(torch_allocator._Process, "expandable_segments", False)
    monkeypatch.setattr(torch._C, SETTINGS_FUNCTION, words.append, raising=False)
    return words


def test_the_setting_is_made_once_and_taken_back(told: list[str]) -> None:
    assert use_expandable_segments(False) == [] and told == []
    assert use_expandable_segments(True) == ["memory: the allocator uses expandable segments"]
    assert use_expandable_segments(True) == [] and told == ["expandable_segments:True"]
    assert use_expandable_segments(False) == [] and told == [
        "expandable_segments:True",
        "expandable_segments:False",
    ]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:256"])
def test_a_variable_of_torchs_takes_precedence_and_is_reported(
    told: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    [remark] = use_expandable_segments(True)
    assert f"{name}={value}" in remark and "no effect" in remark
    assert (
        use_expandable_segments(False)
        == [f"memory: torch's allocator follows {name}={value} of the environment"]
        and told == []
    )
    monkeypatch.setenv(name, "")
    assert len(use_expandable_segments(True)) == 1 and told == ["expandable_segments:True"]


def test_a_torch_without_the_setter_stops_the_start(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, SETTINGS_FUNCTION)
    assert use_expandable_segments(False) == []
    with pytest.raises(
        GlowplugError, match=r"torch .* has no .*Fix: .*PYTORCH_ALLOC_CONF=expandable_segments:True"
    ):
        use_expandable_segments(True)


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    use_expandable_segments(False)


def test_the_installed_torch_accepts_the_setting(as_it_was: None) -> None:
    """The real setter accepts them, also without a device."""
    assert use_expandable_segments(True) and torch_allocator._Process.expandable_segments
    use_expandable_segments(False)
    assert not torch_allocator._Process.expandable_segments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_sets_the_allocator_before_it_takes_its_device(
    monkeypatch: pytest.MonkeyPatch, told: list[str], tmp_path: Path, device: str
) -> None:
    class Stop(Exception):
        pass

    order: list[str] = []

    def setter(words: str) -> None:
        order.append(words)

    def taken(*_: object) -> None:
        order.append("device")
        raise Stop

    plugins = load_plugins(entry_points=False)
    plan = rank_plan(
        {
            "model": str(write_config(tmp_path, "v3")),
            "device": "cpu",
            "weights": {"use": "random"},
            "skip_tokenizer": True,
            "memory": {"kv_tokens": 512},
        },
        plugins,
    )
    monkeypatch.setattr(torch._C, SETTINGS_FUNCTION, setter)
    monkeypatch.setattr(torch.cuda, "set_device", taken)
    monkeypatch.setattr(build_rank, "RankBuilder", taken)
    notes: list[str] = []
    with pytest.raises(Stop):
        build_rank.build_rank(
            replace(plan, device=device, expandable_segments=True),
            0,
            plugins,
            lambda phase, done, total: None,
            note=notes.append,
        )
    assert order == (["expandable_segments:True"] if device == "cuda" else []) + ["device"]
    assert notes == (["memory: the allocator uses expandable segments"] if device == "cuda" else [])

"""A rank that loads slowly is waited for as long as it makes progress; one that hangs ends the
start.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead
from glowplug.plugins.executors.ranks import start_watch
from tests.support.tiny import write_config


def start(folder: Path, *, timeout: float, **weights: Any) -> LLM:
    """Start two ranks that exchange over gloo within ``timeout`` seconds."""
    return LLM(
        model=str(write_config(folder, "v3")),
        plugins=["tests.e2e.fault_plugin"],
        skip_tokenizer=True,
        device="cpu",
        context_length=64,
        memory={"kv_tokens": 256},
        parallel=[{"use": "tensor", "size": 2}],
        collectives={"timeout": timeout},
        executor={"use": "multiprocess", "threads": 1, "oversubscribe": True},
        weights={"use": "faulty", **weights},
    )


def test_no_collective_waits_for_a_rank_that_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 loads for longer than collectives may take, and the log shows how far both are."""
    monkeypatch.setattr(start_watch, "LOG_SECONDS", 0.5)
    caplog.set_level(logging.INFO, "glowplug.engine")
    with start(tmp_path, timeout=6.0, rank=1, pause=0.12) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7]], greedy)[0].token_ids) == 4
    lines = [one.getMessage() for one in caplog.records if "starting:" in one.getMessage()]
    assert any("rank 0 weights 100%, rank 1 weights " in line for line in lines), lines


def test_a_load_that_hangs_ends_after_the_time_limit_of_collectives(tmp_path: Path) -> None:
    with pytest.raises(EngineDead) as caught:
        start(tmp_path, timeout=3.0, rank=1, fault="hang", note=str(tmp_path / "note"))
    said = str(caught.value)
    assert "no rank has made progress for 3 s; rank 1 is in phase weights " in said
    assert "--dist-timeout" in said

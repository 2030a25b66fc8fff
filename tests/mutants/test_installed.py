"""The harness finds components of installed distributions without being told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import run_ranks, submit
from tests.faulty.written import COMPONENT, PACKAGE, forget, write
from tests.support.tiny import write_config


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


def test_build_makes_an_installed_component(site: Path) -> None:
    write(site, "policy")
    assert type(make("policy", COMPONENT, bare_plan(), Worker())).__module__ == f"{PACKAGE}.runtime"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_run_an_installed_component(site: Path, ranks: int) -> None:
    write(site, "policy")
    config = {
        "model": str(write_config(site / "model", "v3")),
        "weights": {"use": "random"},
        "device": "cpu",
        "skip_tokenizer": True,
        "memory": {"kv_tokens": 256},
        "context_length": 64,
        "policy": {"use": COMPONENT},
        "parallel": [{"use": "tensor", "size": 2}] if ranks == 2 else [],
    }
    assert len(run_ranks(config, [submit(1, [5, 6, 7])])[1].tokens) == 8

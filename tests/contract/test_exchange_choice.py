"""Ranks exchange by the measured tables that the plan states, and by the same ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.mesh import coordinates
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.kernels.collectives.exchange_tables import file_name
from glowplug.kernels.launch import tuned_tables
from glowplug.plugins.parallel.ep_moe import EpMoeOptions
from glowplug.plugins.parallel.ep_moe_runtime import EpMoe
from glowplug.plugins.parallel.expert_exchange import AllGatherExchange
from glowplug.plugins.parallel.push_exchange import PushExchange
from tests.support.tables import forget

pytest.importorskip("triton")

from glowplug.plugins.collectives.peer_memory_runtime import PeerMemory

CARD = "NVIDIA H200"
MESH = {"tp": 4, "ep": 4, "dp": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of tables."""
    monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path))
    forget()
    yield tmp_path
    forget()


def put(folder: Path, dtype: str, hidden: int, **parts: Any) -> None:
    measured = {"card": CARD, "ranks": 4, "dtype": dtype, "hidden": hidden}
    (folder / file_name(CARD, 4, dtype)).write_text(json.dumps({"measured": measured, **parts}))
    forget()


class Rows:
    """Collectives that note the exchanges of experts' tokens that are requested."""

    def __init__(self) -> None:
        self.requested: list[int] = []

    def expert_rows(self, axis: str, hidden: int, topk: int, rows: int, dtype: str) -> Any:
        self.requested.append(rows)
        return SimpleNamespace(rows=rows)


def exchange(collectives: Any, **options: Any) -> Any:
    plan = bare_plan()
    facts = replace(plan.facts, hardware=read_sheet("8xh200"))
    plan = replace(plan, mesh=MESH, facts=facts)
    worker = Worker(rank=0, ranks=4, coordinates=coordinates(0, MESH), collectives=collectives)
    return EpMoe(EpMoeOptions(size=4, **options), plan, worker).expert_exchange("a.mlp", 8)


def test_auto_pushes_as_many_tokens_as_were_measured_faster(folder: Path) -> None:
    plan = bare_plan()
    times = {"2": {"all_gather": 5.0, "push": 4.0}, "64": {"all_gather": 5.0, "push": 9.0}}
    collectives = Rows()
    assert type(exchange(collectives)) is AllGatherExchange, "there is no table"
    put(folder, plan.dtype, plan.facts.model.hidden_size, **{"expert exchange": times})
    assert type(exchange(collectives)) is PushExchange
    assert collectives.requested == [2]
    assert type(exchange(collectives, exchange="all_gather")) is AllGatherExchange
    assert type(exchange(object())) is AllGatherExchange, "these cannot push"


def test_ranks_that_read_different_tables_do_not_start(folder: Path) -> None:
    """Their buffers would differ in size, or one would wait for what another never sends."""

    def read(others: list[bytes]) -> None:
        def gather(data: bytes) -> list[bytes]:
            others.append(data)
            return others

        members = {"tp": (0, 1, 2, 3)}
        held: Any = SimpleNamespace(_members=members, _ranks=4, all_gather_bytes=gather)
        plan = bare_plan()
        facts = replace(plan.facts, hardware=read_sheet("8xh200"))
        limits = PeerMemory._agreed_limits(held, "auto", replace(plan, facts=facts))
        assert limits[members["tp"]].one_shot == 384 << 10

    seen: list[bytes] = []
    read(seen)
    read(seen)
    put(folder, bare_plan().dtype, 64, **{"expert exchange": {"8": {"push": 1.0}}})
    with pytest.raises(GlowplugError, match="different tables of measured exchanges"):
        read(seen)

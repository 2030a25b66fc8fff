"""A table of small kernels must offer every entry that the model's layers call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plan.checks.steps import DECODER_OPS, GATE_OPS
from glowplug.core.plugin.offers import OpsOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import Ops
from glowplug.core.testing.harness.fakes import component
from glowplug.plugins.ops.torch_ops import TABLE
from tests.plan.conftest import Planner
from tests.plan.test_refusals import with_components
from tests.support.tiny import write_config


def table_of(ops: frozenset[str]) -> PluginSet:
    """Return the built-in plugins and a table "own" of some ops."""
    return with_components(ops=[component("ops", "own", OpsOffers(ops=ops))])


def test_the_needed_entries_are_those_of_the_built_in_tables() -> None:
    assert DECODER_OPS | GATE_OPS == TABLE
    assert TABLE < set(Ops.__annotations__)


@pytest.mark.parametrize("missing", sorted(TABLE))
def test_a_table_without_an_entry_is_refused(refused: Any, missing: str) -> None:
    found = refused({"ops": {"use": "own"}}, plugins=table_of(TABLE - {missing}))["ops.use"]
    assert found.reason == (f"own does not offer {missing}, which the layers of the model call")
    assert "torch" in found.fix


def test_a_dense_model_needs_no_gates(planned: Planner, refused: Any, tmp_path: Path) -> None:
    model = str(write_config(tmp_path / "dense", "llama"))
    config = {"model": model, "ops": {"use": "own"}}
    plan = planned(config, plugins=table_of(TABLE - GATE_OPS))
    assert plan.choice("ops").name == "own"
    assert set(refused(config, plugins=table_of(GATE_OPS))) == {"ops.use"}

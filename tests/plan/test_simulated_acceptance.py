"""A simulated acceptance of drafts is planned for benchmarks only, and refused where nothing can
simulate it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import ConfigError
from glowplug.core.testing.harness.fakes import TINY_V3, write_model
from glowplug.entrypoints.cli.main import main
from tests.plan.test_refusals import drafter, with_components

FIELD = "speculative.simulate_accept_rates"


@pytest.fixture
def drafting(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "m", {**TINY_V3, "num_nextn_predict_layers": 1}))


def config(model: str, rates: list[float], use: str = "nextn", **more: Any) -> dict[str, Any]:
    given = {"use": use, "steps": 2} if use in ("nextn", "drafter") else {"use": use}
    return {"model": model, "speculative": {**given, "simulate_accept_rates": rates}, **more}


def test_an_engine_of_a_benchmark_simulates(planned: Any, drafting: str) -> None:
    plan = planned(config(drafting, [0.8, 0.5], benchmark=True))
    assert plan.choice("speculative").options["simulate_accept_rates"] == [0.8, 0.5]
    (found,) = [one for one in plan.decisions if one.field == FIELD]
    assert found.by == "operator"
    other = planned({"model": drafting, "speculative": {"use": "nextn", "steps": 2}})
    assert plan.fingerprint != other.fingerprint


def test_other_engines_are_refused(refused: Any, drafting: str) -> None:
    found = refused(config(drafting, [0.8]))
    assert list(found) == [FIELD]
    assert "meaningless" in found[FIELD].reason
    assert "--simulate-accept-length" in found[FIELD].fix and "benchmark = true" in found[FIELD].fix


def test_a_server_is_refused_before_loading(
    drafting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--model", drafting, "--load-format", "dummy", "--device", "cpu"]
    words += ["--speculative-algorithm", "NEXTN", "--set", f"{FIELD}=[0.5]"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "meaningless" in said and FIELD in said


def test_more_rates_than_positions_are_refused(planned: Any, refused: Any, drafting: str) -> None:
    given = config(drafting, [1.0, 1.0, 0.5], benchmark=True)
    found = refused(given)[FIELD]
    assert "rates for 3 positions, but the drafts are 2 deep" in found.reason
    assert "give 2 rates" in found.fix
    given["speculative"]["steps"] = 3
    assert planned(given).sizes.width == 4, "the fix works"


def test_algorithms_that_cannot_simulate_are_refused(
    planned: Any, refused: Any, drafting: str
) -> None:
    nothing = refused(config(drafting, [0.5], "none", benchmark=True))[FIELD]
    assert "none drafts nothing" in nothing.reason and '"nextn"' in nothing.fix
    given = config(drafting, [0.5], "drafter", benchmark=True)
    own = refused(given, plugins=with_components(speculative=[drafter()]))[FIELD]
    assert "drafter verifies drafts in its own way" in own.reason and '"nextn"' in own.fix
    common = with_components(speculative=[drafter(simulates=True)])
    assert planned(given, plugins=common).choice("speculative").name == "drafter"


@pytest.mark.parametrize("rates", [[], [1.5], [-0.1], ["0.5"]])
def test_rates_are_probabilities(planned: Any, drafting: str, rates: list[Any]) -> None:
    with pytest.raises(ConfigError, match="simulate_accept_rates"):
        planned(config(drafting, rates, benchmark=True))


def test_the_mark_of_a_benchmark_alone_has_no_effect(planned: Any, drafting: str) -> None:
    plan = planned({"model": drafting, "benchmark": True})
    (found,) = [one for one in plan.decisions if one.field == "benchmark"]
    assert "no acceptance is simulated" in found.why

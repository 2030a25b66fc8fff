"""`glowplug tune fp8-moe`: candidates that can run, and the choice among what was measured."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from glowplug.core.protocols import ExpertsShape
from glowplug.core.protocols.tuning import LayerShapes
from glowplug.kernels.moe.fp8 import tiles as moe_fp8_tiles, tuning as moe_fp8_tuning
from glowplug.plugins.quantization.tuning.fp8_experts import Fp8ExpertsTuner

V3 = moe_fp8_tuning.Fp8ExpertsProblem(257, 9, 7168, 2048, 1)


@pytest.mark.parametrize("tokens", [1, 8, 128, 512, 4096])
def test_candidates_fit_and_pair_up(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_fp8_tuning, "card_is_hopper", lambda: False)
    found = list(moe_fp8_tuning.expert_candidates(tokens, V3))
    tiles = {
        kind: {config["BLOCK_M"] for each, config in found if each == kind} for kind, _ in found
    }
    assert tiles["gated"] <= tiles["second"] and tiles.get("plain", set()) <= tiles["second"]
    for kind, config in found:
        weights = 2 if kind == "gated" else 1
        stage = (weights * config["BLOCK_N"] + config["BLOCK_M"]) * 128 * config.get("ROUND", 1)
        assert config["num_stages"] * stage <= 225_000
        assert kind != "gated" or config["BLOCK_N"] == 128
    assert {config.get("SPLITS", 1) for _, config in found} == (
        {1, 4, 7, 8} if tokens == 1 else {1}
    )
    orders = {
        kind: {config.get("ORDER") for each, config in found if each == kind} for kind, _ in found
    }
    few = tokens < 4096
    assert orders["second"] == ({None, "columns"} if few else {None})
    assert orders["gated"] == {
        None,
        *(["columns"] if tokens == 512 else []),
        *(["filled"] if few else []),
    }


@pytest.mark.parametrize(("tokens", "wanted"), [(256, False), (457, True), (4096, True)])
def test_large_steps_may_go_to_hoppers_kernel(
    tokens: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiles(problem: moe_fp8_tuning.Fp8ExpertsProblem) -> dict[str, set[int]]:
        found = [
            each for each in moe_fp8_tuning.expert_candidates(tokens, problem) if "GROUP" in each[1]
        ]
        return {
            kind: {config["GROUP"] for each, config in found if each == kind} for kind, _ in found
        }

    monkeypatch.setattr(moe_fp8_tuning, "card_is_hopper", lambda: False)
    assert not tiles(V3), "no such card here"
    monkeypatch.setattr(moe_fp8_tuning, "card_is_hopper", lambda: True)
    assert tiles(V3) == (dict.fromkeys(("gated", "second"), {1, 2, 4, 8}) if wanted else {})
    assert not tiles(V3._replace(hidden=7200)), "parts of blocks"


def test_configurations_measured_for_hopper_are_valid() -> None:
    best = {(kind, 192, False): (1.0, {"BLOCK_M": 192, "GROUP": 1}) for kind in ("gated", "second")}
    _, chosen = moe_fp8_tuning._cheapest(best)
    assert chosen == moe_fp8_tiles.hopper(1) and moe_fp8_tiles.on_hopper(chosen)


def test_the_cheapest_pair_shares_a_tile_size() -> None:
    def config(block: int, name: str) -> dict[str, object]:
        return {"BLOCK_M": block, "name": name}

    best = {
        ("gated", 16, False): (10.0, config(16, "a")),
        ("second", 16, False): (9.0, config(16, "b")),
        ("plain", 32, False): (5.0, config(32, "c")),
        ("second", 32, False): (13.0, config(32, "d")),
        ("gated", 64, False): (1.0, config(64, "e")),
    }
    spent, chosen = moe_fp8_tuning._cheapest(best)
    assert chosen == {
        "BLOCK_M": 32,
        "FUSE": False,
        "PAIRED": False,
        "first": {"name": "c"},
        "second": {"name": "d"},
    }
    assert spent == 18.0 + moe_fp8_tuning.ALIGN_MICROSECONDS
    best |= {
        ("gated", 16, True): (10.0, config(16, "a")),
        ("second", 16, True): (9.0, config(16, "b")),
    }
    assert moe_fp8_tuning._cheapest(best)[1]["PAIRED"]


def test_tables_of_a_model() -> None:
    shape = ExpertsShape("model.layers.1.mlp.experts", 256, 0, 7168, 2048, 0, 2048, 256, 1, "s")
    shapes = LayerShapes((), (shape, shape), frozenset({shape.prefix}), 8)
    (table,) = Fp8ExpertsTuner(None).tables(shapes, (1, 8))  # type: ignore[arg-type]
    assert table.problem == V3 and table.rows == (1, 8) and "E=257,N=2048,H=7168" in str(table.path)
    assert not Fp8ExpertsTuner(None).tables(LayerShapes((), (shape,), frozenset(), 8), ())  # type: ignore[arg-type]

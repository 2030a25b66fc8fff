"""The tuner of routed experts without a device: its candidates, the GEMMs that it pairs, and
resuming.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.moe import experts as moe_experts, tuning as moe_tuning, tuning_candidates
from glowplug.kernels.moe.fp8 import tuning as moe_fp8_tuning
from glowplug.kernels.moe.tiles import ExpertsProblem, dense_experts_rule, tile

PROBLEM = ExpertsProblem(66, 8, 2048, 1408, "bfloat16")


@pytest.mark.parametrize("tokens", moe_tuning.TOKENS)
def test_candidates_fit_and_go_together(tokens: int) -> None:
    found = {
        product: tuning_candidates.candidates(product, PROBLEM, tokens, True)
        for product in ("up", "down")
    }
    for product, configs in found.items():
        assert configs
        for config in configs:
            if config["way"] in ("dense", "sorted"):
                rows = config["block_m"] + (2 if product == "up" else 1) * config["block_n"]
                assert rows * config["block_k"] * 2 * config["stages"] < 227 * 1024
            if config["way"] == "dense":
                assert config["block_m"] >= tokens, "all tokens are in one tile"
    measured = {
        product: [(1.0, config) for config in configs] for product, configs in found.items()
    }
    assert moe_tuning.best_pair(measured, 0.0, 0.0)[0] == 2.0
    wide = {
        product: {config.get("wide", 0) for config in configs} for product, configs in found.items()
    }
    apart = (
        16 < tokens <= 512
    )  # wide tiles for the fused shared experts, which do not all divide 1,408 columns
    assert wide == (
        {"up": {0, 128}, "down": {0, 64, 128, 256}} if apart else {"up": {0}, "down": {0}}
    )


def test_a_pair_pays_for_its_alignment_and_sum() -> None:
    gemv = {"way": "gemv", "block_n": 4, "block_k": 512, "warps": 4}
    dense, small, large = (
        tile("dense", 16, 64, 128, 4, 3),
        *(tile("sorted", m, 64, 128, 4, 3) for m in (16, 64)),
    )
    found = {
        "up": [(10.0, small), (13.0, dense), (20.0, gemv)],
        "down": [(4.0, large), (8.0, dense), (9.0, gemv)],
    }
    assert moe_tuning.best_pair(found, 3.0, 2.0) == (22.0, {"up": dense, "down": gemv})
    assert moe_tuning.best_pair(found, 3.0, 0.5) == (21.5, {"up": dense, "down": dense})
    found["down"].append((5.0, small))
    assert moe_tuning.best_pair(found, 3.0, 2.0) == (20.0, {"up": small, "down": small})


def test_resumes_and_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    clock = [0.0]

    def measure(
        bench: object, tokens: int, failed: set[str], deadline: float
    ) -> dict[str, list[moe_tuning.Measured]]:
        assert deadline > clock[0]
        done.append(tokens)
        clock[0] += 10.0
        return {
            product: [(1.0, config)]
            for product, config in dense_experts_rule(PROBLEM, tokens).items()
        }

    monkeypatch.setattr(moe_tuning, "measure", measure)
    monkeypatch.setattr(moe_tuning, "compile_ahead", lambda *given: set())
    monkeypatch.setattr(moe_tuning, "overheads", lambda *given: (3.0, 2.0))
    monkeypatch.setattr(moe_tuning.Bench, "make", staticmethod(lambda *given, **more: None))
    monkeypatch.setattr(moe_tuning.time, "monotonic", lambda: clock[0])
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"8": {"kept": True}}))
    said: list[str] = []
    table = moe_tuning.tune_experts(
        PROBLEM, 2, path, tokens=(1, 8, 32, 128), seconds=15.0, log=said.append
    )
    assert done == [1, 32] and "128" in said[-1]
    assert set(table) == {1, 8, 32} and json.loads(path.read_text())["8"] == {"kept": True}
    moe_tuning.tune_experts(PROBLEM, 2, path, tokens=(1, 8, 32, 128), seconds=15.0, log=said.append)
    assert done == [1, 32, 128] and list(json.loads(path.read_text())) == ["1", "8", "32", "128"]


@pytest.mark.parametrize("tokens", [5, 20])
def test_measured_gemms_are_those_that_run(tokens: int) -> None:
    """GEMMs with wide tiles for the fused shared experts, alone and in ``moe_experts``."""
    bench = moe_tuning.Bench.make(ExpertsProblem(7, 4, 48, 40, "float32"), 2, device="cpu")
    config = {product: tile("sorted", 16, 32, 32, 4, 2) for product in ("up", "down")}
    ids, weights = bench.routing(tokens, 0)
    aligned = bench.align(config["up"], ids)
    assert bench.separate_shared(config["up"], tokens) == (2 if tokens > 16 else 0)
    x = bench.rows("up", config["up"], tokens, aligned)
    hidden = bench.run("up", config["up"], x, ids, weights, aligned)
    assert len(hidden) == len(bench.rows("down", config["down"], tokens, aligned))
    rows = bench.run("down", config["down"], hidden, ids, weights, aligned)
    assert torch.equal(
        rows, moe_experts.products(x, bench.w13, bench.w2, ids, weights, config, 2)[0]
    )
    assert moe_tuning._equivalent_tokens(config["up"], tokens, 2) == (32 if tokens > 16 else 16)


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "E=1,device_name=a,triton=3.6.json"
    tuned.keep(path, {8: {"a": 1}, 1: {"a": 2}})
    assert list(json.loads(path.read_text())) == ["1", "8"]
    with pytest.raises(TypeError):
        tuned.keep(path, {1: {"a": object()}})
    assert list(json.loads(path.read_text())) == ["1", "8"] and tuned.table.__wrapped__(
        str(path)
    ) == {1: {"a": 2}, 8: {"a": 1}}


@pytest.mark.parametrize("fused", [0, 1])
def test_tokens_choose_the_experts_of_other_ranks_too(fused: int) -> None:
    """A rank of eight with 8 of 64 experts gets an eighth of the pairs, its ids in the same range
    as in a run.
    """
    dense = ExpertsProblem(8 + fused, 6 + fused, 32, 16, "float32", 56)
    fp8 = moe_fp8_tuning.Fp8ExpertsProblem(8 + fused, 6 + fused, 32, 16, fused, 56)
    bench = moe_tuning.Bench.make(dense, fused, device="cpu")
    for ids, weights in (
        bench.routing(4000, 0),
        moe_fp8_tuning.routing(fp8, 8 + fused, 4000, 0, device="cpu"),
    ):
        assert ids.shape == weights.shape == (4000, 6 + fused)
        routed = ids[:, :6]
        held = routed[routed >= 0]
        assert set(held.tolist()) == set(range(8)) and int(routed.min()) == -1
        assert len(held) == pytest.approx(4000 * 6 / 8, rel=0.05)
        assert bool((ids[:, 6:] == 8).all())
    whole = ExpertsProblem(8 + fused, 6 + fused, 32, 16, "float32")
    few, many = (
        [
            config["block_m"]
            for config in tuning_candidates.candidates("up", problem, 64)
            if "block_m" in config
        ]
        for problem in (dense, whole)
    )
    assert max(few) < max(many), "tiles suit the rows of an expert"

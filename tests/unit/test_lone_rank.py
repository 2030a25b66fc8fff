"""One rank of a layout by itself: its shapes, its stand-in collectives, and refused layouts."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup import build_rank, lone_rank
from glowplug.core.startup.layer_shapes import layer_shapes
from glowplug.core.startup.lone_rank import LoneRank, number_of_ranks, plan_of_ranks
from glowplug.core.testing.harness.ranks import RankSet, rank_plan
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.kernel import timing as kernel_timing
from glowplug.entrypoints.checkpoints.cut_model import write_cut
from glowplug.entrypoints.cli.main import main
from tests.support.rank_threads import on_ranks
from tests.support.source_tree import ROOT
from tests.support.tiny import CONFIGS, write_config

pytestmark = pytest.mark.usefixtures("quick_switches")
Strategies = tuple[tuple[str, int], ...]
TENSOR2: Strategies = (("tensor", 2),)
LAYOUTS: tuple[Strategies, ...] = (
    TENSOR2,
    (("tensor", 4),),
    (*TENSOR2, ("ep_moe", 2)),
    (*TENSOR2, ("dp_attention", 2)),
    (("tensor", 4), ("ep_moe", 2), ("dp_attention", 2)),
)


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def config_of(folder: Path, strategies: Strategies) -> dict[str, Any]:
    return {
        "model": str(folder),
        "skip_tokenizer": True,
        "device": "cpu",
        "context_length": 64,
        "weights": {"use": "random"},
        "parallel": [{"use": use, "size": size} for use, size in strategies],
    }


def keys(linears: Iterable[Any], experts: Iterable[Any]) -> tuple[set[Any], set[Any]]:
    """Return the sizes of layers, which name the tables of measurements."""
    return (
        {(shape.outputs, shape.inputs) for shape in linears},
        {(shape.count, shape.hidden, shape.inter, shape.fused_shared) for shape in experts},
    )


class Noted:
    """A quantization scheme that notes the shapes requested from it."""

    def __init__(self, scheme: Any, linears: list[Any], experts: list[Any]) -> None:
        self._scheme, self._linears, self._experts = scheme, linears, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def linear(self, shape: Any) -> Any:
        self._linears.append(shape)
        return self._scheme.linear(shape)

    def experts(self, shape: Any) -> Any:
        self._experts.append(shape)
        return self._scheme.experts(shape)


def running_shapes(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[set[Any], set[Any]]:
    """Start all ranks as an engine does, and return the sizes of their layers."""
    linears: list[Any] = []
    experts: list[Any] = []
    make = build_rank.build_context

    def noted(*given: Any, **named: Any) -> BuildContext:
        context = make(*given, **named)
        scheme: Any = Noted(context.scheme, linears, experts)
        plain: Any = Noted(context.plain, linears, experts)
        return replace(context, scheme=scheme, plain=plain)

    monkeypatch.setattr(build_rank, "build_context", noted)
    with RankSet(rank_plan(config)):
        pass
    return keys(linears, experts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["v3", "v3_fp8"])
def test_the_shapes_to_tune_are_those_of_running_ranks(
    name: str,
    layout: Strategies,
    plugins: PluginSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = write_config(tmp_path / "whole", name)
    (tmp_path / "cut").mkdir()
    write_cut(CONFIGS[name], tmp_path / "cut")
    plan = plan_of_ranks(config_of(tmp_path / "cut", layout), plugins, "a test")
    assert plan.ranks == layout[0][1]
    found = layer_shapes(plan, plugins)
    running = running_shapes(config_of(whole, layout), monkeypatch)
    assert keys(found.linears, found.experts) == running


def test_ranks_with_parts_of_different_size_add_their_shapes(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """158 tokens of vocabulary over 4 ranks: three times 40, and 38."""
    config = config_of(write_config(tmp_path, "v3", vocab_size=158), (("tensor", 4),))
    found = layer_shapes(plan_of_ranks(config, plugins, "a test"), plugins)
    heads = {sum(one.outputs) for one in found.linears if one.name == "lm_head"}
    assert heads == {40, 38}
    assert keys(found.linears, found.experts) == running_shapes(config, monkeypatch)


def test_tables_are_named_by_the_shapes_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    words = ["tune", "moe", "--model", "v2lite", "--device", "cpu", "--dtype", "bfloat16", "--list"]
    listed = {}
    for layout in ((), ("--tp-size", "8"), ("--tp", "8", "--ep-size", "8"), ("--tp", "2")):
        assert main([*words, *layout]) == 0
        listed[layout] = re.findall(r"^E=(\d+),N=(\d+),", capsys.readouterr().out, re.MULTILINE)
    assert [[width for _, width in tables] for tables in listed.values()] == [
        ["1408"],
        ["176"],
        ["1408"],
        ["704"],
    ]
    assert listed["--tp", "8", "--ep-size", "8"] == [("8", "1408")]


@pytest.mark.parametrize(
    ("layout", "others"), [((("tensor", 4),), 0), ((("tensor", 4), ("ep_moe", 2)), 4)]
)
@pytest.mark.parametrize("name", ["v3", "v3_fp8"])
def test_experts_of_other_ranks_count_in_the_measured_routing(
    name: str,
    layout: Strategies,
    others: int,
    plugins: PluginSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from glowplug.plugins.quantization.tuning.dense_experts import MoeTuner
    from glowplug.plugins.quantization.tuning.fp8_experts import Fp8ExpertsTuner

    plan = plan_of_ranks(config_of(write_config(tmp_path, name), layout), plugins, "a test")
    tuner: Any = (Fp8ExpertsTuner if name == "v3_fp8" else MoeTuner)(plan)
    ((table,)) = tuner.tables(layer_shapes(plan, plugins), ())
    problem = table.problem if name == "v3_fp8" else table.problem[0]
    assert problem.others == others


@pytest.mark.parametrize(
    ("sheet", "tuner", "layout", "said"),
    [
        ("", "moe", ("--tp-size", "7"), "num_attention_heads of 128 does not split over 7"),
        ("", "moe", ("--tp", "8", "--ep", "3"), "256 experts cannot be divided evenly among 3"),
        (
            "1xh200",
            "fp8-moe",
            ("--tp-size", "32"),
            "model.layers.1.mlp.experts: moe_intermediate_size of 2048 gives each of 32 ranks "
            "64 channels, which splits the quantization's blocks of 128",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_a_fix_that_works(
    sheet: str,
    tuner: str,
    layout: tuple[str, ...],
    said: str,
    plugins: PluginSet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sheet:
        monkeypatch.setattr(lone_rank, "this_machine", lambda: read_sheet(sheet))
    words = ["tune", tuner, "--model", "v3", *layout, "--list"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    fixes = set(re.findall(r"fix: parallel\.(\d)\.size = (\d+)", error))
    assert len(fixes) == 1
    ((place, size),) = fixes
    sizes = [("tensor", int(layout[1])), ("ep_moe", int(layout[-1]))][: len(layout) // 2]
    sizes[int(place)] = sizes[int(place)][0], int(size)
    (tmp_path / "v3").mkdir()
    shape = (ROOT / "models/shapes/deepseek-v3.json").read_text()
    write_cut(json.loads(shape), tmp_path / "v3")
    config = config_of(tmp_path / "v3", tuple(sizes))
    config["device"] = "cuda" if sheet else "cpu"
    plan = plan_of_ranks(config, plugins, "a test", stores_weights=False)
    assert plan.ranks == sizes[0][1]


def test_memory_limits_only_what_stores_weights(plugins: PluginSet, tmp_path: Path) -> None:
    huge = write_config(tmp_path, "v3", n_routed_experts=1 << 24)
    config = config_of(huge, TENSOR2)
    with pytest.raises(PlanRefused, match="each rank needs"):
        plan_of_ranks(config, plugins, "a test")
    assert plan_of_ranks(config, plugins, "a test", stores_weights=False).ranks == 2


def test_ranks_are_counted_from_the_strategies(plugins: PluginSet) -> None:
    def count(*sections: Any) -> int:
        return number_of_ranks({"parallel": list(sections)}, plugins)

    assert count() == 1 and number_of_ranks({"parallel": "tensor"}, plugins) == 1
    assert count({"use": "tensor", "size": 8}, {"use": "ep_moe", "size": 4}) == 8
    assert count({"use": "tensor", "size": "many"}, {"use": "nobody", "size": 3}) == 1


def test_a_lone_rank_receives_what_equal_ranks_would_send() -> None:
    mesh = {"tp": 4, "ep": 2, "dp": 4}
    x = torch.arange(24.0).view(4, 6)
    counts = {"tp": [1, 0, 2, 1], "ep": [3, 1]}

    def each(held: Any, rank: int) -> list[torch.Tensor]:
        ep = rank // 2
        return [
            held.all_gather(x, "tp"),
            held.all_gather(x, "tp", -1),
            held.all_gather(x, "attn_tp"),
            held.all_to_all(x, "tp"),
            held.all_to_all(x.view(2, 2, 6), "ep"),
            held.all_to_all_rows(x, counts["tp"], [counts["tp"][rank]] * 4, "tp"),
            held.all_to_all_rows(x, counts["ep"], [counts["ep"][ep]] * 2, "ep"),
            torch.tensor(held.all_gather_numbers(np.array([3, 4])).tolist()),
            held.reduce_scatter(x, "tp") / (1 if isinstance(held, LoneRank) else 4),
        ]

    together = on_ranks(mesh, "threads", each)
    for rank, expected in enumerate(together):
        for mine, theirs in zip(each(LoneRank(mesh, rank), rank), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_kernels_of_a_rank_are_measured_without_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of one block of two: half of the experts, and half of the tokens' choices."""
    monkeypatch.setattr(kernel_timing, "HOST_SECONDS", 0.001)
    parser = argparse.ArgumentParser()
    bench.configure(parser)

    def rows(*layout: str) -> dict[str, dict[str, Any]]:
        out = tmp_path / "k.json"
        words = ["kernels", "--model", "tiny-v3", "--device", "cpu", "--auto-only", "--context"]
        words += ["16", "--batch-size", "8", "--output-file", str(out), *layout]
        assert bench.run(parser.parse_args(words)) == 0, capsys.readouterr().err
        return {row["kernel"]: row for row in json.loads(out.read_text())["rows"]}

    whole, split, shared = rows(), rows("--tp-size", "2"), rows("--tp", "2", "--ep-size", "2")
    assert (whole["self_attn.o_proj"]["shapes"], split["self_attn.o_proj"]["shapes"]) == (
        "8x128",
        "8x64",
    )
    assert split["experts"]["flops"] == whole["experts"]["flops"] / 2
    assert 0 < shared["experts"]["flops"] < whole["experts"]["flops"]

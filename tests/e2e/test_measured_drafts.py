"""The seconds of steps that are measured at start-up, and the drafts that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.speculation.adaptive import AdaptivePolicy
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from tests.plugins import switching
from tests.support.tiny import write_config

SHAPES = (NO_DRAFTS, DraftShape.chain(1), DraftShape.chain(3))


def config_of(tmp_path: Path, **drafts: Any) -> dict[str, Any]:
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    return {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "scheduler": {"max_running_requests": 9},
        "speculative": {"use": "nextn", "steps": 3, **drafts},
    }


def policies(ranks: RankSet) -> list[Any]:
    schedulers: list[Any] = [engine.scheduler for engine in ranks.engines]
    return [scheduler.decodes.policy for scheduler in schedulers]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "parallel",
    [
        [],
        [{"use": "tensor", "size": 2}],
        [{"use": "tensor", "size": 2}, {"use": "dp_attention", "size": 2}],
    ],
    ids=["one", "tp 2", "dp 2"],
)
def test_all_ranks_choose_by_the_costs_of_rank_0(
    tmp_path: Path, parallel: list[dict[str, Any]], overlap: bool
) -> None:
    plugins = load_plugins([THREADS], entry_points=False)
    config = config_of(tmp_path)
    config["scheduler"]["overlap"] = overlap
    if parallel:
        config["parallel"] = parallel
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        found = policies(ranks)
        assert all(isinstance(policy, AdaptivePolicy) for policy in found)
        tables = [policy._seconds._started for policy in found]
        assert all(table == tables[0] for table in tables)
        for column in zip(*tables[0]):
            assert 0 < column[0] <= column[1] <= column[2], "more drafts cost no less"
        for row in tables[0]:
            assert row == sorted(row), "more rows cost no less"
        heard = ranks.run([submit(id, [5, 6, id], 12) for id in (1, 2, 3)])
        assert all(len(one.tokens) == 12 for one in heard.values())
        ranks.check_idle()


def test_drafts_of_one_size_are_not_measured(tmp_path: Path) -> None:
    plugins = load_plugins([THREADS], entry_points=False)
    with RankSet(rank_plan(config_of(tmp_path, adaptive=False), plugins), plugins) as ranks:
        assert policies(ranks) == [None]


@pytest.mark.parametrize(("seconds", "width"), [((1, 1, 1), 4), ((1, 50, 50), 1), ((1, 1, 50), 2)])
def test_drafts_follow_the_given_costs(
    tmp_path: Path, seconds: tuple[float, ...], width: int
) -> None:
    """Drafts that cost nothing are drafted whatever their acceptance; expensive ones are not."""
    costs = DraftCosts(
        tuple(ShapeCosts(shape, (1,), (float(each),)) for shape, each in zip(SHAPES, seconds))
    )
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json()))
    switching.take()
    config = config_of(tmp_path, cost_table=str(path))
    with LLM(plugins=["tests.plugins.switching"], **config) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate([[5, 6, 7], [9, 4]], params)
    widths = [width for record in switching.take() for width, _ in record if width]
    assert widths.count(width) > 0.9 * len(widths) > 10

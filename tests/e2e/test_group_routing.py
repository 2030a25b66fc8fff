"""Routing of requests to dp groups in whole engines: shared prefixes, room, loads after ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Abort
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.plugins.parallel.request_router import GroupLoad
from tests.support.tiny import VOCAB, write_config

MESHES = [(2, 2), (4, 2), (4, 4)]
PREFIX = 40  #: tokens of a shared prefix: ten pages


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


def config(folder: Path, tp: int, dp: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(write_config(folder, "v3")),
        "weights": {"use": "random"},
        "device": "cpu",
        "context_length": 96,
        "memory": {"kv_tokens": 1024},
        "skip_tokenizer": True,
        "dtype": "float32",
        "attention": {"page_size": 4},
        "parallel": [{"use": "tensor", "size": tp}, {"use": "dp_attention", "size": dp}],
        **more,
    }


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def cached(ranks: RankSet) -> list[int]:
    """Return the prompt tokens that each group has found in its cache."""
    return [ranks.stats[group].cached_tokens for group in sorted(ranks.stats)]


def rounds(ranks: RankSet, dp: int) -> None:
    """Send one request for each of ``dp`` prefixes, three times, each time in another order."""
    id = 0
    for turn in range(3):
        asked = []
        for place in range(dp):
            prefix = (place + turn) % dp
            id += 1
            asked.append(submit(id, ids(prefix, PREFIX) + ids(100 + id, 3), 4))
        ranks.run(asked)


@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_requests_with_a_shared_prefix_hit_the_cache_of_one_group(
    tmp_path: Path, plugins: PluginSet, tp: int, dp: int
) -> None:
    with RankSet(rank_plan(config(tmp_path, tp, dp), plugins), plugins) as ranks:
        rounds(ranks, dp)
        assert cached(ranks) == [2 * PREFIX] * dp
        ranks.check_idle()


def test_without_a_prefix_cache_prefixes_do_not_count(tmp_path: Path, plugins: PluginSet) -> None:
    plan = rank_plan(config(tmp_path, 2, 2, cache={"use": "none"}), plugins)
    with RankSet(plan, plugins) as ranks:
        for id in range(1, 4):
            ranks.run([submit(2 * id, ids(7, 3), 2), submit(2 * id + 1, ids(1, PREFIX), 2)])
        ranks.run([submit(20, ids(1, PREFIX), 2)])  # no group has load, so the first one runs it
        assert [ranks.stats[group].finished for group in (0, 1)] == [4, 3]
        assert cached(ranks) == [0, 0]


def test_a_flush_makes_the_router_forget(tmp_path: Path, plugins: PluginSet) -> None:
    with RankSet(rank_plan(config(tmp_path, 2, 2), plugins), plugins) as ranks:
        ranks.run([submit(1, ids(7, 3), 2), submit(2, ids(1, PREFIX), 2)])
        ranks.run([submit(3, ids(1, PREFIX), 2)])
        assert [ranks.stats[group].finished for group in (0, 1)] == [1, 2]
        ranks.control("flush")
        ranks.run([submit(4, ids(1, PREFIX), 2)])
        assert [ranks.stats[group].finished for group in (0, 1)] == [2, 2]


@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_loads_are_equal_on_all_ranks_and_end_at_nothing(
    tmp_path: Path, plugins: PluginSet, tp: int, dp: int
) -> None:
    """Sequences that end, are aborted or are refused leave no load behind."""
    with RankSet(rank_plan(config(tmp_path, tp, dp), plugins), plugins) as ranks:
        ranks.turn([submit(id, ids(id, 5 + 7 * id), 20) for id in range(1, 9)])
        loads = [engine._router.loads for engine in ranks.engines]  # type: ignore[union-attr]
        assert all(one == loads[0] for one in loads)
        assert sum(load.sequences for load in loads[0]) == 8
        assert sum(load.context for load in loads[0]) > 0
        ranks.turn([Abort([1, 2]), submit(20, ids(20, 95), 20)])  # the last one is too long
        ranks.run()
        ranks.turn()
        for engine in ranks.engines:
            assert engine._router is not None
            assert engine._router.loads == [GroupLoad(free=1024)] * dp  # type: ignore[attr-defined]


def test_the_load_counts_prompt_tokens_that_wait_or_are_not_computed(
    tmp_path: Path, plugins: PluginSet
) -> None:
    scheduler = {"max_running_requests": 2, "chunk_size": 16}
    with RankSet(rank_plan(config(tmp_path, 2, 2, scheduler=scheduler), plugins), plugins) as ranks:
        ranks.turn([submit(1, ids(1, 50), 4), submit(2, ids(2, 4), 4), submit(3, ids(3, 30), 4)])
        engine = ranks.engines[0]
        first, second = engine._router.loads  # type: ignore[union-attr]
        # group 0 has computed a chunk of 8 of its 50 tokens; in group 1 a prompt of 30 waits
        assert (first.sequences, first.pending) == (1, 50 - 8)
        assert (second.sequences, second.pending) == (2, 30)
        ranks.run()


def test_as_many_requests_as_the_engine_admits_are_never_refused(tmp_path: Path) -> None:
    """The front counts with the limits of the whole engine, although prefixes attract requests."""
    executor = {"use": "multiprocess", "threads": 1, "oversubscribe": True}
    scheduler = {"max_running_requests": 4, "max_queued_requests": 2}
    with LLM(**config(tmp_path, 2, 2, scheduler=scheduler, executor=executor)) as llm:
        assert llm.plan.sizes.max_admitted == 6
        shared = ids(1, 60)
        prompts = [shared + ids(10 + number, 2) for number in range(16)]
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        done = llm.generate(prompts, params)
        assert [one.error for one in done] == [None] * 16
        assert [one.finish_reason for one in done] == ["length"] * 16

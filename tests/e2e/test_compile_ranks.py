"""Several ranks with compiled ops give one rank's tokens, in every kind of layout, with steps that
run directly and with captured ones, and compile nothing once they serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo.utils import counters

from glowplug import LLM, SamplingParams
from glowplug.core.facts.machine import software
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from tests.support.layouts import layout
from tests.support.tiny import VOCAB, write_config

pytestmark = [
    pytest.mark.slow,
    # NOTE: g++ takes 2 s for each of 20 programs on an idle core, 10 s on a busy one
    pytest.mark.timeout(900),
    pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler"),
]
COMPILED = {"use": "torch_compile", "max_batch": 4}
LAYOUTS = {
    "tp 2": layout(2),
    "tp 2, ep 2": layout(2, 2),
    "tp 2, ep 2, dp 2": layout(2, 2, 2, exchange="all_to_all_static"),
}
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"use": "eager"},
    "captured": {
        "use": "replaying",
        "batch_sizes": [1, 2, 4],
        "prefill": True,
        "prefill_tokens": [4, 16],
    },
}
LENGTHS = (1, 23, 9)


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder in which all ranks of this file keep their programs; nothing is in it at first."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("v3"), "v3", num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.replaying"], entry_points=False)


def config_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "weights": {"use": "random"},
        "scheduler": {"overlap": False, "max_running_requests": 4, "chunk_size": 16},
        **more,
    }


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]


def tokens_of(config: dict[str, Any], plugins: PluginSet) -> tuple[list[list[int]], int, int]:
    """Return the tokens, and the programs made before and after the first request."""
    before = counters["stats"]["unique_graphs"]
    with RankSet(rank_plan(config, plugins), plugins, timeout=800.0) as ranks:
        started = counters["stats"]["unique_graphs"]
        found = ranks.run([submit(id, prompt, 12) for id, prompt in enumerate(prompts())])
        ranks.check_idle()
    tokens = [list(found[id].tokens) for id in range(len(LENGTHS))]
    return tokens, started - before, counters["stats"]["unique_graphs"] - started


@pytest.fixture(scope="module")
def plain(folder: Path, plugins: PluginSet) -> list[list[int]]:
    """Tokens of one rank with plain ops."""
    return tokens_of(config_of(folder, ops={"use": "torch"}), plugins)[0]


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_ranks_give_the_plain_tokens(
    name: str, graphs: str, folder: Path, plugins: PluginSet, plain: list[list[int]]
) -> None:
    given = {"parallel": LAYOUTS[name], "graphs": GRAPHS[graphs]}
    found, made, later = tokens_of(config_of(folder, ops=COMPILED, **given), plugins)
    assert found == plain
    assert made > 0 and later == 0, "a step compiled something"


def test_compiled_ranks_with_drafts_give_the_plain_tokens(
    folder: Path, plugins: PluginSet, plain: list[list[int]]
) -> None:
    given = {
        "parallel": layout(2),
        "graphs": GRAPHS["captured"],
        "speculative": {"use": "nextn", "adaptive": False, "steps": 2},
    }
    found, made, later = tokens_of(config_of(folder, ops=COMPILED, **given), plugins)
    assert found == plain
    assert made > 0 and later == 0, "a step compiled something"


def test_compiled_rank_processes_give_the_plain_tokens(
    folder: Path, programs: Path, plain: list[list[int]]
) -> None:
    """Each process compiles its own ops while the other one waits in an exchange, or does too."""
    config = config_of(folder, ops=COMPILED, parallel=layout(2)) | {
        "executor": {"use": "multiprocess", "oversubscribe": True},
        "ops": {**COMPILED, "cache_dir": str(programs / "processes")},
    }
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(**config) as llm:
        assert [one.token_ids for one in llm.generate(prompts(), params)] == plain
    assert list((programs / "processes").rglob("*.so")), "no rank compiled anything"

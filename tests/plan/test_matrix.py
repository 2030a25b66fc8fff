"""The promise: every combination of built-ins on the CPU is refused by the plan, or starts and
generates.

Of a sample with a fixed seed, a part with every pair of values runs by default. The rest of the
sample, and the whole matrix, run under the ``slow`` mark; the latter prints its counts.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, PlanRefused, SamplingParams
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from tests.support.slow_cases import some_slow
from tests.support.tiny import CONFIGS, write_config

SAMPLE, PARTS = 200, 4  #: the first part has every pair of values, the others share the rest
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 9, 3], list(range(2, 40)), [7]]

AXES: dict[str, list[Any]] = {
    "model": list(CONFIGS),
    "attention": [
        {},
        {"use": "torch_mla"},
        {"use": "torch_mla", "absorb": False},
        {"use": "torch_mha"},
    ],
    "kv_dtype": ["auto", "float32", "bfloat16", "fp8_e4m3"],
    "page_size": [None, 1, 16],
    "quantization": [{}, {"use": "none"}, {"use": "block_fp8"}, {"use": "w8a8_int8"}],
    "dtype": ["auto", "float32", "bfloat16", "float16"],
    "scheduler": [{}, {"overlap": False}, {"chunk_size": 8}, {"mixed": False, "chunk_size": 16}],
    "policy": [{}, {"use": "priority"}, {"use": "longest_prefix"}],
    "cache": [{}, {"use": "none"}],
    "graphs": [{}, {"use": "eager"}],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_config(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins()


def combinations() -> list[dict[str, Any]]:
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


def config_of(combination: dict[str, Any], folders: dict[str, Path]) -> dict[str, Any]:
    attention = {**combination["attention"], "kv_dtype": combination["kv_dtype"]}
    if combination["page_size"] is not None:
        attention["page_size"] = combination["page_size"]
    config: dict[str, Any] = {
        "model": str(folders[combination["model"]]),
        "device": "cpu",
        "dtype": combination["dtype"],
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "memory": {"kv_tokens": 1024},
        "executor": {"use": "inline"},
        "attention": attention,
    }
    for section in ("quantization", "scheduler", "policy", "cache", "graphs"):
        if combination[section]:
            config[section] = combination[section]
    config["scheduler"] = {"max_running_requests": 4, **combination["scheduler"]}
    return config


def admitted(rows: list[dict[str, Any]], plugins: PluginSet) -> Iterator[dict[str, Any]]:
    for config in rows:
        try:
            make_plan(config, plugins=plugins)
        except PlanRefused as refused:
            assert all(r.field and r.reason and r.fix and r.by for r in refused.refusals), refused
        else:
            yield config


def boot(config: dict[str, Any]) -> str:
    """Start the engine and generate; return "" on success, else the error."""
    model, rest = config["model"], {key: value for key, value in config.items() if key != "model"}
    try:
        with LLM(model=model, **rest) as llm:
            out = llm.generate(PROMPTS, PARAMS)
            llm.control("check")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    bad = [
        c.finish_reason
        for c in out
        if len(c.token_ids) != PARAMS.max_tokens or c.finish_reason != "length"
    ]
    return f"finish reasons {bad}" if bad else ""


def run_all(rows: list[dict[str, Any]]) -> None:
    failed = [(config, why) for config in rows if (why := boot(config))]
    kinds = Counter(why.splitlines()[0][:120] for _, why in failed)
    assert not failed, (
        f"{len(failed)} of {len(rows)} admitted combinations failed: {kinds}; first: {failed[0]}"
    )


def pairs(combination: dict[str, Any]) -> set[tuple[str, str]]:
    """Return all pairs of values of two axes in a combination."""
    values = [f"{axis}={value}" for axis, value in combination.items()]
    return set(itertools.combinations(values, 2))


def covering(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return few of the combinations, with every pair of values that occurs in ``drawn``."""
    missing = set[tuple[str, str]]().union(*map(pairs, drawn))
    found = []
    while missing:
        found.append(max(drawn, key=lambda one: len(pairs(one) & missing)))
        missing -= pairs(found[-1])
    return found


@pytest.fixture(scope="module")
def sample(folders: dict[str, Path], plugins: PluginSet) -> list[dict[str, Any]]:
    """The first admitted combinations in random order."""
    drawn = combinations()
    random.Random(20).shuffle(drawn)
    fit = (one for one in drawn if any(admitted([config_of(one, folders)], plugins)))
    return list(itertools.islice(fit, SAMPLE))


@pytest.mark.timeout(900)  # a quarter of a minute of work on an idle machine
@pytest.mark.parametrize("part", some_slow(range(PARTS), (1, 2, 3)))
def test_a_sample_of_admitted_combinations_runs(
    folders: dict[str, Path], sample: list[dict[str, Any]], part: int
) -> None:
    first = covering(sample)
    rest = [one for one in sample if one not in first]
    assert len(first) + len(rest) == SAMPLE
    chosen = rest[part - 1 :: PARTS - 1] if part else first
    every = {f"{axis}={value}" for axis in AXES for value in AXES[axis]}
    absent = every - {f"{axis}={value}" for one in first for axis, value in one.items()}
    assert absent == {"kv_dtype=fp8_e4m3"}, "refused on the CPU"
    run_all([config_of(one, folders) for one in chosen])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_admitted_combination_runs(folders: dict[str, Path], plugins: PluginSet) -> None:
    rows = [config_of(c, folders) for c in combinations()]
    found = list(admitted(rows, plugins))
    print(f"\n{len(rows)} combinations, {len(found)} admitted, {len(rows) - len(found)} refused")
    run_all(found)

"""Steps whose drafts have different sizes give the tokens of an engine without drafts.

Ranks are threads, and captured steps are functions (tests.plugins.replaying).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import DraftShape, shorter_shapes
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Submit
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.entrypoints.front.llm import Completion
from tests.plugins import switching
from tests.support.draft_requests import GREEDY, VOCAB, all_pages_are_back, features, prompts, same
from tests.support.eagle import write_random_head
from tests.support.layouts import layout
from tests.support.slow_cases import some_slow_rows
from tests.support.tiny import write_config

PLUGINS = ["tests.plugins.switching", "tests.plugins.replaying"]
GRAPHS = {"use": "replaying", "batch_sizes": [2, 8]}  #: below, at and between them are padded
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "no_overlap": {"scheduler": {"overlap": False}},
    "overlap": {"scheduler": {"overlap": True}},
    "no_cache": {"cache": {"use": "none"}},
    "chunked": {"scheduler": {"chunk_size": 7}},
    "unmixed": {"scheduler": {"mixed": False, "chunk_size": 16}},
    "page_1": {"attention": {"page_size": 1}},
    "one_row": {"scheduler": {"max_running_requests": 1}},
    "eight_rows": {"scheduler": {"max_running_requests": 8}},
    # without overlap, because functions overwrite the results of the step in flight
    "graphs": {"graphs": GRAPHS, "scheduler": {"max_running_requests": 8, "overlap": False}},
}


#: seconds of steps with drafts of every size here, which engines otherwise measure at their start
COSTS = DraftCosts(
    tuple(
        ShapeCosts(shape, (1, 8), (1.0, 2.0))
        for shape in {*shorter_shapes(DraftShape.chain(3)), *shorter_shapes(DraftShape(3, 3, 8))}
    )
)


def config_of(folder: Path, drafts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 256,
        "memory": {"kv_tokens": 4096},
        **changes,
    }
    if drafts:
        own: dict[str, Any] = {}
        if drafts.get("use") == "standalone" and "draft_model" not in drafts:
            sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1}
            draft = write_config(folder.parent / "draft", "llama", **sizes)
            own["draft_model"] = str(draft)
        if drafts.get("use") == "eagle":
            own["draft_model"] = str(write_random_head(folder))
        (costs := folder.parent / "costs.json").write_text(json.dumps(COSTS.to_json()))
        config["speculative"] = {"use": "nextn", "cost_table": str(costs), **drafts, **own}
        config["scheduler"] = {"use": "switching", **config.get("scheduler", {})}
    return config


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Iterator[tuple[list[Completion], list[Completion]]]:
    with LLM(**config_of(folder, {})) as llm:
        yield llm.generate(prompts(), GREEDY), llm.generate(prompts(), features())


DRAFTS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "one": ({"steps": 1}, {1, 2}),
    "chain": ({"steps": 3}, {1, 2, 4}),
    "tree": ({"steps": 3, "topk": 3, "draft_tokens": 8}, {1, 2, 4, 8}),
    "ngram": ({"use": "ngram", "steps": 3}, {1, 2, 4}),
    "ngram_tree": (
        {"use": "ngram", "steps": 3, "topk": 3, "draft_tokens": 8},
        {1, 2, 4, 8},
    ),
    "standalone": ({"use": "standalone", "steps": 3}, {1, 2, 4}),
    "standalone_tree": (
        {"use": "standalone", "steps": 3, "topk": 3, "draft_tokens": 8},
        {1, 2, 4, 8},
    ),
    "eagle": ({"use": "eagle", "steps": 3}, {1, 2, 4}),
    "eagle_tree": ({"use": "eagle", "steps": 3, "topk": 3, "draft_tokens": 8}, {1, 2, 4, 8}),
}
#: variants of algorithms that share all but the draft's passes with one that runs in every variant
FEW = {"eagle": ("no_cache", "graphs"), "eagle_tree": ("no_cache", "chunked")}
CASES = [(variant, drafts) for drafts in DRAFTS for variant in FEW.get(drafts, VARIANTS)]
#: of the others, every variant runs with a chain; each shape meets batches, graphs and small chunks
SLOW = {
    "one": {"no_overlap", "no_cache", "chunked", "unmixed", "page_1", "one_row", "eight_rows"},
    "tree": {"no_overlap", "no_cache", "unmixed", "one_row", "eight_rows"},
    "ngram": {"no_overlap", "no_cache", "unmixed", "page_1", "one_row"},
    "ngram_tree": {"no_overlap", "batched", "unmixed", "one_row", "eight_rows"},
    "standalone": {"no_overlap", "batched", "unmixed", "page_1", "one_row"},
    "standalone_tree": {"no_overlap", "no_cache", "unmixed", "one_row", "eight_rows"},
}


@pytest.mark.parametrize(
    ("variant", "drafts"),
    some_slow_rows(CASES, [one for one in CASES if one[0] in SLOW.get(one[1], ())]),
)
def test_same_tokens_while_sizes_switch(
    folder: Path,
    wanted: tuple[list[Completion], list[Completion]],
    variant: str,
    drafts: str,
) -> None:
    knobs, sizes = DRAFTS[drafts]
    if variant == "no_cache":
        knobs = {**knobs, "cost_table": ""}  # costs are measured
    switching.take()
    with LLM(plugins=PLUGINS, **config_of(folder, knobs, **VARIANTS[variant])) as llm:
        assert (llm.plan.draft_costs is None) == (variant == "no_cache")
        same(llm.generate(prompts(), GREEDY), wanted[0])
        same(llm.generate(prompts(), features()), wanted[1])  # now with a warm cache
        stats = llm.stats
        all_pages_are_back(llm)
    widths = {width for record in switching.take() for width, _ in record}
    assert widths - {0} == sizes
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


#: requests that outgrow a small pool
LONG = [
    params.replace(max_tokens=44, min_tokens=40 if params.min_tokens else 0)
    for params in features()
]


@pytest.fixture(scope="module")
def long_answers(folder: Path) -> list[Completion]:
    with LLM(**config_of(folder, {})) as llm:
        return llm.generate(prompts(), LONG)


#: by overlap: drafts whose pages are taken and freed as those of others, which run
ALIKE = {
    False: {"one", "tree", "ngram", "standalone", "standalone_tree"},
    True: {"one", "standalone", "eagle"},
}


@pytest.mark.parametrize(
    ("overlap", "drafts"),
    [
        pytest.param(
            overlap,
            drafts,
            id=f"{'overlap' if overlap else 'in_turn'}-{drafts}",
            marks=pytest.mark.slow if drafts in ALIKE[overlap] else (),
        )
        for drafts in DRAFTS
        for overlap in (False, True)
        if overlap or drafts not in FEW
    ],
)
def test_preempted_requests_keep_their_tokens(
    folder: Path, long_answers: list[Completion], overlap: bool, drafts: str
) -> None:
    small: dict[str, Any] = {
        "context_length": 200,
        "memory": {"kv_tokens": 208},
        "scheduler": {"overlap": overlap},
    }
    if drafts in ("tree", "standalone_tree", "eagle_tree"):
        small["memory"] = {"kv_tokens": 256}
    with LLM(plugins=PLUGINS, **config_of(folder, DRAFTS[drafts][0], **small)) as llm:
        same(llm.generate(prompts(), LONG), long_answers)
        assert llm.stats.preemptions > 0
        all_pages_are_back(llm)


RUNS = ((False, False), (True, False), (False, True))  #: (overlap, graphs)
PAUSES = [(use, *run) for use in ("nextn", "standalone") for run in RUNS]


@pytest.mark.parametrize(
    ("use", "overlap", "graphs"),
    some_slow_rows(
        PAUSES,
        # 7 to 20 s each; steps of both kinds are replayed alike
        [row for row in PAUSES if row not in (("nextn", False, True), ("standalone", True, False))],
    ),
)
def test_a_pause_without_drafts_costs_no_acceptance(
    tmp_path: Path, use: str, overlap: bool, graphs: bool
) -> None:
    """After steps without drafts, drafts are accepted as if there had been no such steps.

    Where two runs begin a step with the same drafts at the same token of a sequence, it gains the
    same; in one of the runs, no step before has been without drafts.
    """
    # models of three layers, because their drafts are right more often
    folder = write_config(tmp_path / "v3", "v3", vocab_size=VOCAB, num_nextn_predict_layers=1)
    knobs: dict[str, Any] = {"use": use, "steps": 3}
    if use == "standalone":
        knobs["draft_model"] = str(write_config(tmp_path / "draft", "llama", vocab_size=VOCAB))
    more: dict[str, Any] = {"graphs": {**GRAPHS, "batch_sizes": [1]}} if graphs else {}
    gains: list[dict[tuple[int, int], int]] = []
    for pattern in ((2,), (2, 0, 0), (0, 0, 0, 0, 0, 2, 2)):
        scheduler = {"overlap": overlap, "pattern": pattern, "max_running_requests": 1}
        switching.take()
        config = config_of(folder, knobs, scheduler=scheduler, **more)
        with LLM(plugins=PLUGINS, **config) as llm:
            llm.generate(
                prompts()[::2], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            )
        gains.append(gains_by_place(switching.take()))
    whole, *paused = gains
    for found in paused:
        common = whole.keys() & found.keys()
        assert len(common) > 60 and sum(found[place] > 1 for place in common) > 10
        assert {place: whole[place] for place in common} == {
            place: found[place] for place in common
        }


def gains_by_place(records: list[list[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Return the gain of each step with 3 drafts, by (sequence, tokens before the step)."""
    found = {}
    for number, record in enumerate(records):
        done = 0
        for width, count in record[:-1]:  # the last step may be cut by the length limit
            if width == 4:
                found[number, done] = count
            done += count
    return found


# ---- ranks ---------------------------------------------------------------------------------------

LAYOUTS = {
    "tp 2": layout(2),
    "tp 2, dp 2": layout(2, dp=2),
    "tp 4, ep 2, dp 2": layout(4, 2, 2),
}
REQUESTS = {1: [5, 6, 7], 2: [9], 3: [4, 8, 5, 6, 3, 2, 7], 4: [1, 2], 5: [3, 1, 4, 1, 5]}
RANK_SCHEDULER = {"max_running_requests": 6, "chunk_size": 16}


def messages() -> list[Submit]:
    return [submit(id, prompt, 16) for id, prompt in REQUESTS.items()]


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS, *PLUGINS], entry_points=False)


@pytest.fixture(scope="module")
def one_rank(folder: Path, plugins: PluginSet) -> dict[int, list[int]]:
    """The tokens of one rank without drafts."""
    plan = rank_plan(config_of(folder, {}, scheduler=RANK_SCHEDULER), plugins)
    with RankSet(plan, plugins) as alone:
        return {id: list(one.tokens) for id, one in alone.run(messages()).items()}


WAYS = dict(zip(("in_turn", "overlap", "graphs"), RUNS))
#: each layout replays; the other two ways are those of ranks, with groups or without
SLOW_WAYS = [("tp 2", "in_turn"), ("tp 2, dp 2", "overlap"), ("tp 4, ep 2, dp 2", "in_turn")]


@pytest.mark.parametrize(
    ("layout", "way"), some_slow_rows([(one, way) for one in LAYOUTS for way in WAYS], SLOW_WAYS)
)
def test_ranks_switch_together(
    folder: Path, plugins: PluginSet, one_rank: dict[int, list[int]], layout: str, way: str
) -> None:
    """Groups with different requests choose different sizes, and all run the largest one."""
    overlap, graphs = WAYS[way]
    more: dict[str, Any] = {"graphs": GRAPHS} if graphs else {}
    scheduler = {**RANK_SCHEDULER, "overlap": overlap}
    config = config_of(folder, {"steps": 3}, parallel=LAYOUTS[layout], scheduler=scheduler, **more)
    switching.take()
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        found = {id: list(one.tokens) for id, one in ranks.run(messages()).items()}
        ranks.check_idle()
    assert found == one_rank
    widths = {width for record in switching.take() for width, _ in record}
    assert widths >= {1, 2, 4} if "dp" not in layout else widths >= {2, 4}

"""The sample prefix cache of a third party: evicted pages are kept in host memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.api import (
    CacheOffers,
    CacheOptions,
    Component,
    EnginePlan,
    GlowplugError,
    PlanRefused,
    PluginLoadError,
    Tier,
)
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plan.table import rows
from glowplug.core.plugin.declared.component import component_fault
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.plugin.slots import BY_NAME
from glowplug.core.protocols import PrefixCache, Scheduler, Worker
from glowplug.core.step.messages import Abort
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.core.testing.suites.scheduler import SchedulerSuite
from glowplug.core.testing.suites.tiers import TieredCacheSuite
from tests.support.eagle import LLAMA_3, write_random_head
from tests.support.tiny import write_config
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-tiers"
PLUGIN = ["glowplug_tiers.plugin", "glowplug_chunked.plugin"]


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (NAME, "glowplug-chunked"):
            patch.syspath_prepend(str(FOLDER / name / "src"))
        yield


class TestTiers(TieredCacheSuite):
    def make(self, plan: EnginePlan) -> PrefixCache:
        from glowplug_tiers.plugin import TiersOptions
        from glowplug_tiers.runtime import Tiers

        found: PrefixCache = Tiers(TiersOptions(), plan, Worker())
        return found


class TestScheduled(SchedulerSuite):
    """The scheduler, with pages that come and go in every test."""

    def make(self, plan: EnginePlan, clock: Callable[[], float]) -> Scheduler:
        found: Scheduler = make("scheduler", "continuous", plan, Worker(clock=clock))
        return found

    def cache(self, plan: EnginePlan) -> PrefixCache:
        return TestTiers().make(plan)

    def drive(self, *given: Any, **sizes: Any) -> Any:
        return super().drive(*given, **{"tier_pages": 40, **sizes})


# ---- in the engine -------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HEADS = [[one, *range(3, 66)] for one in (2, 70, 80, 90, 100)]  #: prompts of four pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("v3"), "v3", num_nextn_predict_layers=1)


def config(folder: Path, host_bytes: int = 1 << 20, **changes: Any) -> dict[str, Any]:
    """Return a configuration whose pool holds two of the prompts."""
    base: dict[str, Any] = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 96,
        "memory": {"kv_tokens": 160},
        "attention": {"page_size": 16},
        "scheduler": {"max_running_requests": 4, "chunk_size": 32},
        "cache": {"use": "tiers", "host_bytes": host_bytes},
    }
    return {**base, **changes}


def engine(folder: Path, host_bytes: int = 1 << 20, **changes: Any) -> LLM:
    return LLM(plugins=PLUGIN, **config(folder, host_bytes, **changes))


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers to prompts, one after another."""
    return [list(llm.generate([one], GREEDY)[0].token_ids) for one in prompts]


def computed(folder: Path, **changes: Any) -> list[list[int]]:
    """Return the answers to ``HEADS`` without any prefix cache."""
    with engine(folder, **{**changes, "cache": {"use": "none"}}) as llm:
        return answers(llm, HEADS)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"attention": {"page_size": 16, "use": "chunked", "exact": 1}},
    "nextn": {"speculative": {"use": "nextn", "steps": 2, "adaptive": False}},
    "no overlap": {"scheduler": {"overlap": False, "chunk_size": 32, "max_running_requests": 4}},
}


@pytest.mark.parametrize("case", CASES)
def test_an_evicted_prompt_is_brought_back_with_the_same_tokens(folder: Path, case: str) -> None:
    want = computed(folder, **CASES[case])
    with engine(folder, **CASES[case]) as llm:
        assert answers(llm, HEADS) == want
        before = llm.stats
        again = llm.generate([HEADS[0]], GREEDY)[0]
        assert list(again.token_ids) == want[0]
        assert again.cached_tokens == 48, "the last token is computed, so three pages are known"
        stats = llm.stats
        assert (before.tier_hits, stats.tier_hits) == (0, 1)
        assert stats.tier_hit_tokens == 48 and stats.tier_pages_back == 3
        assert stats.prefix_hit_tokens - before.prefix_hit_tokens == 48
        assert stats.tier_pages_out > 3 and 0 < stats.tier_pages < stats.tier_pages_total
        page = llm.plan.budget[-1].bytes and stats.tier_bytes_back // 3
        assert page * stats.tier_pages_total == tier_line(llm.plan).bytes
        assert stats.tier_bytes_out == page * stats.tier_pages_out
        assert llm.control("check")["running"] == 0


def test_drafts_accept_as_much_from_pages_brought_back(folder: Path) -> None:
    """The draft's layer and its states of pages are in the tier, too."""
    found = []
    for cache in ({"use": "radix"}, {"use": "tiers"}):
        memory = {"kv_tokens": 1024 if cache["use"] == "radix" else 160}
        with engine(folder, **{**CASES["nextn"], "cache": cache, "memory": memory}) as llm:
            answers(llm, HEADS)
            drafted, accepted = llm.stats.drafted_tokens, llm.stats.accepted_tokens
            answers(llm, HEADS[:3])
            assert llm.stats.prefix_hit_tokens == 3 * 48
            found.append((llm.stats.drafted_tokens - drafted, llm.stats.accepted_tokens - accepted))
    assert found[0] == found[1]


def test_the_pool_of_a_whole_draft_model_is_in_the_tier(folder: Path) -> None:
    draft = {"use": "standalone", "draft_model": str(folder), "steps": 2, "adaptive": False}
    with engine(folder) as alone, engine(folder, speculative=draft) as llm:
        want = answers(alone, HEADS)
        assert answers(llm, HEADS) == want and answers(llm, HEADS[:1]) == want[:1]
        one, both = (
            tier_line(found.plan).bytes // found.plan.sizes.tier_pages for found in (alone, llm)
        )
        assert both == 2 * one and llm.stats.tier_pages_back == 3
        assert llm.stats.accepted_tokens == llm.stats.drafted_tokens, "the draft is the model"


def test_the_pool_of_a_head_with_attention_of_its_own_is_in_the_tier(folder: Path) -> None:
    head = write_random_head(folder, LLAMA_3)
    draft = {"use": "eagle", "draft_model": str(head), "steps": 2, "adaptive": False}
    with engine(folder) as alone, engine(folder, speculative=draft) as llm:
        want = answers(alone, HEADS)
        assert answers(llm, HEADS) == want and answers(llm, HEADS[:1]) == want[:1]
        sizes = json.loads((head / "config.json").read_text())
        keys = 2 * sizes["num_key_value_heads"] * sizes["head_dim"]
        one, both = (
            tier_line(found.plan).bytes // found.plan.sizes.tier_pages for found in (alone, llm)
        )
        assert both - one == 4 * (16 * keys + sizes["hidden_size"])
        stats = llm.stats
        assert stats.tier_pages_back == 3 and stats.tier_bytes_back == 3 * both


def test_many_requests_at_once_are_right_while_pages_are_out(folder: Path) -> None:
    """Requests are preempted: four of them need twice the pool."""
    prompts = [[one, *head[1:]] for one in (2, 3, 4, 5) for head in HEADS[:2]] + HEADS
    long = GREEDY.replace(max_tokens=24)
    with engine(folder, cache={"use": "none"}, memory={"kv_tokens": 1024}) as llm:
        want = [list(one.token_ids) for one in llm.generate(prompts, long)]
    with engine(folder) as llm:
        for _ in range(2):
            assert [list(one.token_ids) for one in llm.generate(prompts, long)] == want
        assert llm.stats.preemptions and llm.stats.tier_hits
        assert llm.control("check")["running"] == 0


def test_requests_aborted_while_pages_come_back_leave_the_others_right(folder: Path) -> None:
    plan = rank_plan(config(folder), load_plugins([THREADS, *PLUGIN]))
    with RankSet(plan, load_plugins([THREADS, *PLUGIN])) as ranks:
        for round in range(3):
            first = 10 * round
            messages = [submit(first + at, head) for at, head in enumerate(HEADS)]
            ranks.run(messages)
            ranks.turn([submit(first + 7, HEADS[0])])
            ranks.turn([Abort([first + 7])])
        got = [ranks.collected[20 + at].tokens for at in range(len(HEADS))]
        stats = ranks.stats[0]
    assert got == computed(folder) and stats.tier_hits > 3 and stats.aborted == 3


@pytest.mark.parametrize("groups", [1, 2])
def test_each_rank_keeps_its_share(folder: Path, groups: int) -> None:
    """Two ranks, as threads: with tensor parallelism, and with groups of requests of their own."""
    strategies: list[dict[str, Any]] = [{"use": "tensor", "size": 2}]
    if groups == 2:
        strategies.append({"use": "dp_attention", "size": 2})
    plugins = load_plugins([THREADS, *PLUGIN])
    parallel = config(folder, parallel=strategies, memory={"kv_tokens": 160})
    with RankSet(rank_plan(parallel, plugins), plugins) as ranks:
        for round in range(2):
            ranks.run([submit(10 * round + at, head) for at, head in enumerate(HEADS)])
        got = [[ranks.collected[10 * round + at].tokens for at in range(5)] for round in range(2)]
        assert got == [computed(folder)] * 2
        assert sum(stats.tier_pages_out for stats in ranks.stats.values()) > 0


def test_two_processes_bring_back_what_one_does(folder: Path) -> None:
    processes = {"parallel": [{"use": "tensor", "size": 2}], "executor": {"oversubscribe": True}}
    with engine(folder, **processes) as llm:
        assert answers(llm, [*HEADS, HEADS[0]]) == [*(want := computed(folder)), want[0]]
        assert llm.stats.tier_hits == 1 and llm.plan.ranks == 2


def test_a_flush_empties_the_tier(folder: Path) -> None:
    with engine(folder) as llm:
        answers(llm, HEADS)
        assert llm.stats.tier_pages
        llm.control("flush")
        assert answers(llm, HEADS[:1]) and llm.stats.tier_hits == 0


@pytest.mark.gpu
def test_on_a_gpu_prompts_come_back_from_pinned_memory(folder: Path) -> None:
    prompts = [[*head, *head] for head in HEADS]
    gpu = {"device": "cuda", "dtype": "bfloat16", "attention": {}, "context_length": 192}
    pool = {"kv_tokens": 384}
    with engine(folder, **gpu, memory={"kv_tokens": 4096}, cache={"use": "radix"}) as llm:
        want = answers(llm, [*prompts, prompts[0]])
    with engine(folder, **gpu, memory=pool) as llm:
        assert answers(llm, [*prompts, prompts[0]]) == want
        assert llm.stats.tier_hits == 1 and llm.stats.tier_pages_back
        assert tier_line(llm.plan).place == "host memory"


# ---- in the plan ---------------------------------------------------------------------------------


def tier_line(plan: EnginePlan) -> Any:
    (line,) = [one for one in plan.budget if one.name == "kv tier"]
    return line


def planned(folder: Path, host_bytes: int, sheet: str = "", **changes: Any) -> EnginePlan:
    """Return the plan for this machine, or for that of a fact sheet."""
    values = config(folder, host_bytes, **changes)
    if not sheet:
        return make_plan(values, plugins=load_plugins(PLUGIN))
    values |= {"device": "auto", "dtype": "bfloat16", "attention": {}, "memory": {}}
    return make_plan(values, plugins=load_plugins(PLUGIN), hardware=read_sheet(sheet))


def test_the_plan_names_the_tier_and_its_bytes(folder: Path) -> None:
    plan = planned(folder, 1 << 20)
    line = tier_line(plan)
    page = plan.sizes.page_size * plan.kv_layout(lambda context: plan.kv_entries).token_bytes
    assert plan.sizes.tier_pages == (1 << 20) // page
    assert (line.bytes, line.place) == (plan.sizes.tier_pages * page, "")
    assert EnginePlan.from_json(plan.to_json()) == plan
    total = next(row for row in rows(plan) if row[0] == "memory: total")
    without = planned(folder, 0)
    assert not without.sizes.tier_pages and "kv tier" not in {one.name for one in without.budget}
    assert total != next(row for row in rows(without) if row[0] == "memory: total")


def test_beside_gpus_the_tier_is_host_memory(folder: Path) -> None:
    plan, without = (planned(folder, size, "8xh200") for size in (1 << 30, 0))
    (row,) = [row for row in rows(plan) if row[0] == "memory: kv tier"]
    assert row[1] == "host memory" and row[4] == "1024.0 MiB"
    assert plan.sizes.num_pages == without.sizes.num_pages, "the device's memory is not touched"
    totals = [
        next(row[4] for row in rows(one) if row[0] == "memory: total") for one in (plan, without)
    ]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("sheet", ["", "8xh200"])
def test_a_tier_that_the_host_cannot_hold_is_refused_with_a_size_that_it_can(
    folder: Path, sheet: str
) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned(folder, 1 << 50, sheet)
    (refusal,) = caught.value.refusals
    assert refusal.field == "cache.host_bytes" and "host memory" in refusal.reason
    fit = int(refusal.fix.split(" = ")[1].split()[0])
    assert 0 < fit < 1 << 50 and planned(folder, fit, sheet).sizes.tier_pages


def test_a_tier_without_room_for_a_page_is_refused(folder: Path) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned(folder, 1000)
    (refusal,) = caught.value.refusals
    assert refusal.field == "cache.host_bytes" and "hold no page" in refusal.reason
    fit = int(refusal.fix.split(" = ")[1].split()[0])
    assert planned(folder, fit).sizes.tier_pages == 1
    assert refusal.fix.endswith("cache.host_bytes = 0")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A plugin with a scheduler and an algorithm that know nothing of tiers, and a wrong offer."""
    (tmp_path / "odd_tiers.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "odd_tiers"


ODD = """
import dataclasses
from typing import Literal
from glowplug.core.api import *
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.speculative import standalone
from glowplug.plugins.speculative.standalone_runtime import Standalone
from glowplug_tiers.runtime import Tiers
from glowplug_tiers.plugin import TiersOptions

class PlainOptions(ContinuousOptions):
    use: Literal["plain"] = "plain"

class QuietOptions(standalone.StandaloneOptions):
    use: Literal["quiet"] = "quiet"

class WildOptions(TiersOptions):
    use: Literal["wild"] = "wild"

class Quiet(Standalone):
    page_states = None

class Wild(Tiers):
    def take_transfers(self):
        found = super().take_transfers()
        for one in found:
            one.slots[:] = 10 ** 6
        return found

@hookimpl
def register_schedulers():
    factory = "glowplug.plugins.scheduler.continuous_runtime:Continuous"
    return [Component("plain", PlainOptions, factory, SchedulerOffers(adapts=True), contract=2)]

@hookimpl
def register_prefix_caches():
    offers = CacheOffers(tier=Tier("host_bytes"))
    return [Component("wild", WildOptions, "odd_tiers:Wild", offers, contract=2)]

@hookimpl
def register_speculative_algorithms():
    (found,) = standalone.register_speculative_algorithms()
    factory = "odd_tiers:Quiet"
    return [dataclasses.replace(found, name="quiet", options=QuietOptions, factory=factory)]
"""


def test_a_scheduler_that_brings_nothing_back_is_refused(folder: Path, odd: str) -> None:
    plugins = load_plugins([*PLUGIN, odd])
    with pytest.raises(PlanRefused) as caught:
        make_plan(config(folder, scheduler={"use": "plain"}), plugins=plugins)
    (refusal,) = caught.value.refusals
    assert refusal.field == "scheduler.use" and "plain brings none back" in refusal.reason
    assert refusal.fix == 'scheduler.use = "continuous", or cache.host_bytes = 0'
    assert make_plan(config(folder, 0, scheduler={"use": "plain"}), plugins=plugins)


def test_a_draft_whose_pages_the_tier_lacks_stops_the_start(folder: Path, odd: str) -> None:
    draft = {"use": "quiet", "draft_model": str(folder), "steps": 2, "adaptive": False}
    with pytest.raises(PluginLoadError, match=r"speculative 'quiet'.*page_states\(\)"):
        LLM(plugins=[*PLUGIN, odd], **config(folder, speculative=draft))


def test_a_transfer_of_no_slot_ends_the_engine_by_name(folder: Path, odd: str) -> None:
    cache = {"use": "wild", "host_bytes": 1 << 20}
    with LLM(plugins=[*PLUGIN, odd], **config(folder, cache=cache)) as llm:
        with pytest.raises(GlowplugError, match=r"cache 'wild'.*slots \[1000000"):
            answers(llm, HEADS)


def test_an_offer_of_an_unknown_option_is_refused_at_load() -> None:
    class LostOptions(CacheOptions):
        use: Literal["lost"] = "lost"

    component = Component(
        "lost", LostOptions, "nowhere:Lost", CacheOffers(tier=Tier("host_byte")), contract=2
    )
    assert "the option 'host_byte'" in str(component_fault(component, BY_NAME["cache"]))


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES

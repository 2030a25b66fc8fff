"""The three steps of sizing: each returns its result and its decisions, and changes no proposal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.budget.captured import Captured
from glowplug.core.plan.budget.counts import decide_counts
from glowplug.core.plan.budget.memory_share import Budget, decide_budget
from glowplug.core.plan.budget.pages import Pages, decide_pages
from glowplug.core.plan.budget.sizes import size
from glowplug.core.plan.choose import choose
from glowplug.core.plan.inputs import read_inputs
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.registry import PluginSet

SHAPES = Path(__file__).parents[2] / "models" / "shapes"


@pytest.fixture
def proposed(plugins: PluginSet) -> Any:
    """``proposed(sheet, section={...})``: a proposal of V2-Lite with all components chosen."""

    def run(sheet: str, **config: Any) -> Proposal:
        model = str(SHAPES / "deepseek-v2-lite.json")
        full = {"model": model, "weights": {"use": "random"}, **config}
        inputs = read_inputs(full, plugins, read_sheet(sheet), {}, {})
        assert inputs.facts is not None and not inputs.parsed.refusals
        found = Proposal(plugins, inputs.parsed, inputs.facts, inputs.elements)
        choose(found)
        return found

    return run


def stepped(proposal: Proposal) -> tuple[Any, Budget, Pages]:
    """Return the three results, computed as ``size`` does."""
    counts = decide_counts(proposal)
    proposal.values.page_size = counts.page_size
    proposal.values.expandable_segments = counts.expandable_segments
    budget = decide_budget(proposal, counts)
    assert isinstance(budget, Budget)
    pages = decide_pages(proposal, counts, budget)
    assert isinstance(pages, Pages)
    return counts, budget, pages


@pytest.mark.parametrize("sheet", ["cpu", "1xh200"])
def test_sizes_collect_what_the_steps_return(proposed: Any, sheet: str) -> None:
    given = {"dtype": "bfloat16", "memory": {"fraction": 0.96}}
    counts, budget, pages = stepped(proposed(sheet, **given))
    proposal = proposed(sheet, **given)
    before = len(proposal.decisions)
    found = size(proposal)
    assert found is not None
    sizes, lines = found
    assert proposal.decisions[before:] == [
        *counts.decisions,
        *budget.decisions,
        *pages.decisions,
    ]
    assert lines == (*budget.lines, *pages.lines)
    assert (sizes.max_running, sizes.chunk_size, sizes.page_size, sizes.max_step_tokens) == (
        counts.rows,
        counts.chunk,
        counts.page_size,
        counts.step_tokens,
    )
    assert (sizes.num_pages, sizes.least_pages, sizes.most_pages, sizes.context_length) == (
        pages.number,
        pages.least,
        pages.most,
        pages.context,
    )


def test_the_steps_record_nothing(proposed: Any) -> None:
    proposal = proposed("1xh200")
    decisions = copy.copy(proposal.decisions)
    stepped(proposal)
    assert proposal.decisions == decisions and proposal.refusals == []


def test_budget_and_pages_fill_the_memory_share(proposed: Any) -> None:
    counts, budget, pages = stepped(proposed("1xh200", scheduler={"max_running_requests": 4096}))
    assert budget.needed == sum(line.bytes for line in budget.lines)
    assert budget.left == budget.share.total - budget.needed > 0
    held = sum(line.bytes for line in pages.lines)
    page_bytes = held // pages.number
    assert held <= budget.left < held + page_bytes
    assert pages.decisions[0].why == "the rest of the memory"


def test_captured_steps_are_counted_once(proposed: Any) -> None:
    """The budget line of the graphs, the decisions and the sizes read the same numbers."""
    graphs = {"use": "cuda_graph", "batch_sizes": [1, 2, 4], "prefill_tokens": [16, 64]}
    proposal = proposed("1xh200", graphs=graphs)
    counts, budget, _ = stepped(proposal)
    assert counts.captured.batch_sizes == (1, 2, 4) and counts.captured.pass_tokens == (16, 64)
    decided = {decision.field: decision.value for decision in counts.decisions}
    assert decided["graphs.batch_sizes"] == [1, 2, 4]
    assert decided["graphs.prefill_tokens"] == [16, 64]
    line = next(line for line in budget.lines if line.name == "graphs")
    assert line.how.startswith("3 batch sizes up to 4") and "2 token counts up to 64" in line.how
    assert proposed_sizes(proposal).pass_tokens == (16, 64)


def proposed_sizes(proposal: Proposal) -> Any:
    found = size(proposal)
    assert found is not None
    return found[0]


def test_a_cpu_captures_nothing(proposed: Any) -> None:
    counts = decide_counts(proposed("cpu"))
    assert counts.captured == Captured((), (), (), ()) and not counts.expandable_segments
    assert [decision.field for decision in counts.decisions] == [
        "scheduler.max_running_requests",
        "scheduler.chunk_size",
        "attention.page_size",
    ]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"memory": {"reserve_bytes": 1 << 40}}, "model"),
        ({"memory": {"kv_bytes": 1 << 40}}, "memory.kv_bytes"),
        ({"context_length": 10**7}, "context_length"),
    ],
)
def test_a_refusal_of_a_step_ends_sizing(proposed: Any, config: Any, field: str) -> None:
    proposal = proposed("1xh200", **config)
    before = list(proposal.decisions)
    assert size(proposal) is None
    assert [refusal.field for refusal in proposal.refusals] == [field]
    assert all(isinstance(refusal, Refusal) for refusal in proposal.refusals)
    assert proposal.decisions == before

"""N-gram drafts in the plan: sizes, bytes, flags of other engines, and refusals of impossible
options.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.plugin.offers import AttentionOffers, Mode
from glowplug.core.protocols import Limits, Worker
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.fakes import component
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from tests.plan.conftest import Planner, Refuser
from tests.plan.test_refusals import with_components


def ngram(**options: Any) -> dict[str, Any]:
    return {"speculative": {"use": "ngram", **options}}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, DraftShape(4, 1, 5)),
        ({"steps": 7}, DraftShape(7, 1, 8)),
        ({"draft_tokens": 16}, DraftShape(15, 1, 16)),
        ({"steps": 3, "draft_tokens": 4}, DraftShape(3, 1, 4)),
        ({"steps": 5, "topk": 4, "draft_tokens": 8}, DraftShape(5, 4, 8)),
        ({"topk": 3}, DraftShape(4, 3, 7)),
        ({"topk": 2, "draft_tokens": 9}, DraftShape(4, 2, 9)),
    ],
)
def test_options_give_the_size_of_the_drafts(
    planned: Planner, options: dict[str, int], shape: DraftShape
) -> None:
    sizes = planned(ngram(**options)).sizes
    assert (sizes.draft_shape, sizes.width) == (shape, shape.tokens)
    assert (sizes.lookahead, sizes.draft_layers) == (0, 0)


def test_drafts_of_one_size_alternate_with_none(planned: Planner) -> None:
    """Steps without a match are plain ones, which are captured too. Simulated acceptance takes
    drafts of all rows in all steps.
    """
    one = ngram(adaptive=False, steps=3)
    full = DraftShape.chain(3)
    assert planned(one).sizes.step_shapes == (NO_DRAFTS, full)
    simulated = ngram(adaptive=False, steps=3, simulate_accept_rates=[0.5])
    assert planned({**simulated, "benchmark": True}).sizes.step_shapes == (full,)
    graphs = {"graphs": {"use": "cuda_graph"}, "scheduler": {"max_running_requests": 8}}
    sheet = read_sheet("8xh200")
    replayed = planned({**one, **graphs}, hardware=sheet)
    (line,) = (line for line in replayed.budget if line.name == "graphs")
    assert "each for 2 sizes of drafts" in line.how


@pytest.mark.parametrize(
    ("options", "field", "reason", "fix"),
    [
        ({"steps": 0}, "steps", "steps is 0", "speculative.steps = 1"),
        ({"steps": 16}, "steps", "steps is 16", "speculative.steps = 15"),
        ({"draft_tokens": 17}, "steps", "steps is 16", "speculative.steps = 15"),
        ({"draft_tokens": 1}, "steps", "steps is 0", "speculative.steps = 1"),
        ({"steps": 2, "draft_tokens": 4}, "draft_tokens", "draft_tokens is 4", "= 3"),
        ({"topk": 0}, "topk", "topk is 0", "speculative.topk = 1"),
        ({"topk": 9}, "topk", "topk is 9", "speculative.topk = 8"),
        ({"topk": 3, "draft_tokens": 4}, "draft_tokens", "5 to 13", "speculative.draft_tokens = 7"),
        ({"topk": 2, "draft_tokens": 10}, "draft_tokens", "5 to 9", "speculative.draft_tokens = 6"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max", "is 0", "prompt_lookup_max = 1"),
        ({"prompt_lookup_max": 99}, "prompt_lookup_max", "is 99", "prompt_lookup_max = 32"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min", "is 0", "prompt_lookup_min = 1"),
        ({"prompt_lookup_min": 7}, "prompt_lookup_min", "which is 5", "prompt_lookup_min = 5"),
    ],
)
def test_impossible_options_are_refused(
    planned: Planner,
    refused: Refuser,
    options: dict[str, int],
    field: str,
    reason: str,
    fix: str,
) -> None:
    found = refused(ngram(**options))
    assert list(found) == [f"speculative.{field}"]
    refusal = found[f"speculative.{field}"]
    assert reason in refusal.reason and fix in refusal.fix and refusal.by == "ngram"
    value = int(refusal.fix.split(",")[0].rpartition(" ")[2])
    kept = {} if field == "steps" else options
    planned(ngram(**{**kept, field: value}))


@pytest.mark.parametrize("options", [{}, {"topk": 3, "draft_tokens": 8}])
@pytest.mark.parametrize("sheet", ["cpu", "8xh200"])
def test_the_budget_has_the_bytes_that_are_reserved(
    planned: Planner, sheet: str, options: dict[str, int]
) -> None:
    given = {"context_length": 300, "scheduler": {"max_running_requests": 6}}
    plan = planned({**ngram(**options), **given}, hardware=read_sheet(sheet))
    lines = {line.name: line.bytes for line in plan.budget}
    algorithm = make("speculative", "ngram", plan, Worker(), **options)
    sizes = plan.sizes
    limits = Limits(
        sizes.max_running + 1, sizes.positions, sizes.num_pages, sizes.width, sizes.width
    )
    algorithm.reserve(limits)
    tree = algorithm._tree_of_rows(sizes.draft_shape)
    held = [algorithm._tokens, algorithm._computed, algorithm._found, algorithm._matches]
    held += [tree.parents, tree.depths, tree.mask] if tree is not None else []
    spare = 0 if tree is not None else 3 * 8 * 7 * sizes.width  # bytes of trees that a chain lacks
    assert sum(part.nbytes for part in held) + spare == lines["draft state"]
    plain = planned(given, hardware=read_sheet(sheet))
    assert "draft state" not in {line.name for line in plain.budget}


def test_a_second_reserve_takes_no_memory(planned: Planner) -> None:
    """The last call follows the KV pool, which has taken what was left."""
    algorithm = make("speculative", "ngram", planned(ngram()), Worker())
    limits = Limits(5, 60, 9, 5, 99)
    algorithm.reserve(limits)
    algorithm._tokens.fill_(3)
    place = algorithm._tokens.data_ptr()
    algorithm.reserve(replace(limits, num_pages=99))
    assert algorithm._tokens.data_ptr() == place and not algorithm._tokens.any()


def test_rows_that_do_not_fit_are_refused_with_fewer_rows(refused: Refuser) -> None:
    """The tokens of all rows are a line of the budget that the refusal counts."""
    given = {
        "scheduler": {"max_running_requests": 60_000, "chunk_size": 64},
        "context_length": 4096,
    }
    found = refused({**ngram(steps=1), **given}, hardware=small_machine())
    (refusal,) = found.values()
    assert "draft state" in refusal.reason
    assert refusal.field == "scheduler.max_running_requests"


def small_machine() -> HardwareFacts:
    return replace(read_sheet("cpu"), cpu_memory=1 << 30)


def test_attention_without_draft_passes_is_enough(planned: Planner) -> None:
    """There is no draft model, so attention has to run no draft passes."""
    needed = (Mode.PREFILL, Mode.DECODE, Mode.VERIFY)
    modes = dict.fromkeys(needed, AttentionOffers().modes[Mode.VERIFY])
    offers = AttentionOffers(kinds=frozenset({"mla"}), modes=modes, first_key=True)
    plugins = with_components(attention=[component("attention", "narrow", offers)])
    attention = {"attention": {"use": "narrow"}}
    planned({**ngram(adaptive=False), **attention}, plugins=plugins)


def read(line: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    found = read_command_line(parser.parse_args(line.split()))
    assert not found.layer.refusals
    section: dict[str, Any] = found.config["speculative"]
    return section


def test_flags_of_other_engines() -> None:
    sglang = (
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
        "--speculative-ngram-max-match-window-size 12 --speculative-ngram-min-match-window-size 1"
    )
    assert read(sglang) == {
        "use": "ngram",
        "draft_tokens": 16,
        "prompt_lookup_max": 12,
        "prompt_lookup_min": 1,
    }
    vllm = (
        "--spec-method ngram --num-speculative-tokens 5 --ngram-prompt-lookup-max 4 "
        "--ngram-prompt-lookup-min 2"
    )
    expected = {"use": "ngram", "steps": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert read(vllm) == expected
    keys = '"num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2'
    for first in ('"method":"ngram"', '"model":"[ngram]"', '"method":"ngram","model":"ngram"'):
        assert read(f"--speculative-config {{{first},{keys}}}") == expected

"""Failures of earlier engines with speculation, each as a test named after its number.

The numbers are those of the requirements: what SGLang's ablation, documentation and pull requests
of 2025 report. F18 is in ``test_draft_tools.py``. Plans are made for fact sheets of GPUs; engines
run on the CPU, with graphs as functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.plugin.offers import AttentionOffers, Mode
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.speculation.adaptive import AdaptivePolicy
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from tests.support.draft_simulation import fixed_speed, simulate, speed
from tests.support.published import V3, machine_for
from tests.support.tiny import write_config

Planner = Callable[[str], EnginePlan]
NEXTN = {"use": "nextn", "adaptive": False, "steps": 2}
TREE = {"use": "nextn", "adaptive": False, "steps": 3, "topk": 3, "draft_tokens": 8}
PROMPTS = [[5, 6, 7], [9], [4, 8, 15, 6, 3, 2, 7], [11, 12], [3, 1, 4, 1, 5], [2] * 19, [8, 9]]
GIB = 1 << 30


@pytest.fixture
def planned(tmp_path: Path) -> Planner:
    """A function that plans DeepSeek-V3 with a command line on a machine that it fits on."""

    def run(line: str) -> EnginePlan:
        words = ["--model-path", V3, *line.split(), "--load-format", "dummy"]
        sheet = tmp_path / "sheet.json"
        sheet.write_bytes(msgspec.json.encode(machine_for(words)))
        parser = Parser(prog="glowplug serve")
        add_engine_options(parser)
        return read_command_line(
            parser.parse_args([*words, "--facts", str(sheet)]),
            load_plugins(entry_points=False),
        ).plan()

    return run


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(
        [THREADS, "tests.plugins.replaying", "tests.plugins.accepting"], entry_points=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("v3"), "v3", vocab_size=16, num_nextn_predict_layers=1
    )


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 96,
        "memory": {"kv_tokens": 2048},
        "attention": {"page_size": 4},
        "weights": {"use": "random"},
        "scheduler": {"max_running_requests": 6, "chunk_size": 16},
        "graphs": {"use": "replaying", "batch_sizes": [1, 2, 4, 6]},
    }
    return base | changes


def layout(**sizes: int) -> list[dict[str, Any]]:
    return [{"use": use, "size": size} for use, size in sizes.items()]


def answers(
    plugins: PluginSet, wanted: dict[str, Any], rounds: int = 1
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return the tokens of all requests, their tokens of each step, and the cached prompt tokens.

    ``rounds``: times that the requests run one after the other.
    """
    tokens: list[list[int]] = []
    counts: list[list[int]] = []
    cached = 0
    with RankSet(rank_plan(wanted, plugins), plugins) as ranks:
        for turn in range(rounds):
            first = 100 * turn
            asked = [submit(first + i, prompt, 12 + i) for i, prompt in enumerate(PROMPTS)]
            found = ranks.run(asked)
            for i in range(len(PROMPTS)):
                one = found[first + i]
                tokens.append(list(one.tokens))
                counts.append(list(one.counts))
                cached += one.admitted.cached_tokens if one.admitted else 0
        ranks.check_idle()
    return tokens, counts, cached


@pytest.fixture(scope="module")
def plain(plugins: PluginSet, folder: Path) -> list[list[int]]:
    return answers(plugins, config(folder, graphs={"use": "eager"}))[0]


def test_f1_drafts_beside_flashinfer_mla(planned: Planner) -> None:
    """Chains run as they are, a tree as a chain of as many steps, which the plan states."""
    line = "--tp 8 --enable-flashinfer-mla --speculative-algorithm NEXTN --speculative-num-steps 2 "
    chain = planned(line + "--speculative-eagle-topk 1 --speculative-num-draft-tokens 3")
    tree = planned(line + "--speculative-eagle-topk 4 --speculative-num-draft-tokens 4")
    for plan in (chain, tree):
        assert plan.choice("attention").name == "flashinfer_mla"
        assert plan.sizes.draft_shape == DraftShape.chain(2)
    assert any(d.field == "speculative.topk" and d.notable for d in tree.decisions)


@pytest.mark.parametrize("drafts", [NEXTN, TREE], ids=["chain", "tree"])
def test_f2_drafts_and_the_radix_cache(
    plugins: PluginSet, folder: Path, plain: list[list[int]], drafts: dict[str, Any]
) -> None:
    """A request whose prefix is cached gains the same tokens in each step as one that is not."""
    whole = config(folder, speculative=drafts)
    tokens, counts, cached = answers(plugins, whole, rounds=2)
    without = answers(plugins, config(folder, speculative=drafts, cache={"use": "none"}))
    half = len(PROMPTS)
    assert cached > 0 == without[2]
    assert tokens == plain * 2 and counts[:half] == counts[half:] == without[1]


@pytest.mark.parametrize("drafts", [NEXTN, TREE], ids=["chain", "tree"])
def test_f3_drafts_and_data_parallel_attention(
    plugins: PluginSet, folder: Path, plain: list[list[int]], drafts: dict[str, Any]
) -> None:
    """One group has no request at first and at the end, while the other drafts and verifies."""
    groups = layout(tensor=2, dp_attention=2)
    assert answers(plugins, config(folder, speculative=drafts, parallel=groups))[0] == plain


@pytest.mark.parametrize("topk", [1, 4])
def test_f4_drafts_in_graphs_with_torch_compile(planned: Planner, topk: int) -> None:
    """``tests/e2e/test_compile.py`` runs such engines."""
    plan = planned(
        "--tp 8 --enable-torch-compile --speculative-algorithm NEXTN --speculative-num-steps 2 "
        f"--speculative-eagle-topk {topk}"
    )
    assert plan.choice("ops").name == "torch_compile"
    assert plan.choice("graphs").name == "cuda_graph"
    assert plan.sizes.draft_shape.topk == topk and plan.sizes.width > 2


def test_f5_experts_on_ranks_with_drafts_and_groups_in_graphs(
    planned: Planner, plugins: PluginSet, folder: Path, plain: list[list[int]]
) -> None:
    line = (
        "--tp 16 --enable-ep-moe --ep-size 16 --enable-dp-attention --dp-size 16 "
        "--enable-torch-compile --speculative-algorithm NEXTN --speculative-num-steps 1"
    )
    assert planned(line).choice("graphs").name == "cuda_graph"
    ranks = layout(tensor=4, ep_moe=4, dp_attention=2)
    for drafts in (NEXTN, TREE):
        assert answers(plugins, config(folder, speculative=drafts, parallel=ranks))[0] == plain


def test_f6_drafts_with_experts_on_ranks_need_no_fraction(planned: Planner) -> None:
    """Every part of the memory is a line of the plan, and a usable cache is left without a knob."""
    plan = planned("--tp 8 --enable-ep-moe --ep-size 8 --speculative-algorithm NEXTN")
    lines = {line.name: line.bytes for line in plan.budget}
    for name in ("weights", "draft weights", "activations", "logits", "graphs", "page states"):
        assert lines[name] > 0, name
    tokens = plan.sizes.num_pages * plan.sizes.page_size
    assert tokens > 4 * plan.sizes.context_length


def test_f13_wide_drafts_at_128_requests_fit(
    planned: Planner, plugins: PluginSet, folder: Path
) -> None:
    """The graphs, entries and logits of 128 rows of 8 tokens are planned; rows wait for pages."""
    plan = planned(
        "--tp 8 --max-running-requests 128 --speculative-algorithm EAGLE --speculative-num-steps 5 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    )
    assert plan.sizes.draft_shape == DraftShape(5, 4, 8) and plan.sizes.max_running == 128
    small = config(
        folder,
        speculative={"use": "nextn", "adaptive": False, "steps": 5, "topk": 4, "draft_tokens": 8},
        memory={"kv_tokens": 320},
        scheduler={"max_running_requests": 32, "chunk_size": 16},
    )
    with RankSet(rank_plan(small, plugins), plugins) as ranks:
        asked = [submit(i, PROMPTS[i % len(PROMPTS)], 30) for i in range(128)]
        found = ranks.run(asked)
        ranks.check_idle()
    assert all(len(one.tokens) == 30 for one in found.values())


@pytest.mark.parametrize("drafts", [NEXTN, TREE], ids=["chain", "tree"])
def test_f14_padding_rows_do_not_change_what_is_accepted(
    plugins: PluginSet, folder: Path, drafts: dict[str, Any]
) -> None:
    """Batches of 1 to 6 rows, padded to 6 or not, in graphs or not, gain the same tokens."""
    eager = config(folder, speculative=drafts, graphs={"use": "eager"})
    _, want, _ = answers(plugins, eager)
    assert max(max(row) for row in want) > 1
    for sizes in ([1, 2, 3, 4, 5, 6], [6]):
        graphs = {"use": "replaying", "batch_sizes": sizes}
        assert answers(plugins, config(folder, speculative=drafts, graphs=graphs))[1] == want


@pytest.mark.parametrize("drafts", [NEXTN, TREE], ids=["chain", "tree"])
def test_f15_steps_beside_the_graphs_plan_their_own_attention(
    plugins: PluginSet, folder: Path, plain: list[list[int]], drafts: dict[str, Any]
) -> None:
    """Steps alternate between graphs and eager ones, for which no graph is large enough."""
    graphs = {"use": "replaying", "batch_sizes": [1, 2]}
    assert answers(plugins, config(folder, speculative=drafts, graphs=graphs))[0] == plain


def test_f16_every_backend_for_gpus_takes_part_in_captured_draft_extends() -> None:
    found = load_plugins(entry_points=False).components("attention")
    offers = [one.component.offers for one in found if "cuda" in one.component.offers.devices]
    capturing = [
        one for one in offers if isinstance(one, AttentionOffers) and Mode.VERIFY in one.captures_in
    ]
    assert len(capturing) >= 6
    assert all(Mode.DRAFT_EXTEND in one.captures_in for one in capturing)


def test_f17_a_prompt_waits_for_no_draft_pass(
    plugins: PluginSet, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of prompts alone runs no pass of the draft, only the store of its cache entries."""
    with RankSet(rank_plan(config(folder, speculative=TREE), plugins), plugins) as ranks:
        algorithm: Any = ranks.engines[0].runner.speculative
        passes: list[str] = []
        monkeypatch.setattr(
            algorithm._model, "forward", lambda *args: passes.append("pass") or 1 / 0
        )
        found = ranks.run([submit(1, PROMPTS[2], 1)])
    assert len(found[1].tokens) == 1 and passes == []


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("rate", [0.05, 0.4, 0.8])
def test_f22_drafts_do_not_slow_a_full_batch_down(rows: int, rate: float) -> None:
    """The times of a step are those of the V3 slice on an H200, which grow with rows and drafts."""
    shapes = (NO_DRAFTS, DraftShape.chain(1), DraftShape.chain(3))
    measured = ((1.40e-3, 12.2e-3), (2.72e-3, 17.3e-3), (4.76e-3, 26.8e-3))
    costs = DraftCosts(
        tuple(ShapeCosts(shape, (1, 128), each) for shape, each in zip(shapes, measured))
    )
    policy = AdaptivePolicy(shapes, costs, 128)
    steps = simulate(policy, costs, itertools.repeat(rows, 2000), lambda _: rate)
    best = max(fixed_speed(costs, shape, rows, rate) for shape in shapes)
    assert speed(steps) >= 0.97 * best
    if rate < 0.1:
        assert best == fixed_speed(costs, NO_DRAFTS, rows, rate)

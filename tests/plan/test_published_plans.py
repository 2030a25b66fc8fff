"""Published command lines, resolved to plans: each flag's value is a value of the plan.

They are the command lines of the project's pages and examples, those published for SGLang and vLLM,
and the flags of the recipes (``PUBLISHED`` and ``TAKEN``). Each is planned for a fact sheet, with
made-up weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.flags.table import FLAGS
from tests.plan.test_credit import BUNDLES
from tests.plan.test_flags import PUBLISHED
from tests.plan.test_foreign_flags import TAKEN
from tests.support.published import LITE, SLICE, V3, command_lines, machine_for, with_shape
from tests.support.source_tree import ROOT

GIB = 1 << 30
EXAMPLES = ROOT / "docs" / "examples"
Planner = Callable[[list[str]], EnginePlan]
Values = dict[str, Any]


@pytest.fixture
def planned_line(plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    """A function that plans a command line on the smallest ready sheet that it fits on.

    Files that the command line names are relative to the repository's root.
    """
    monkeypatch.chdir(ROOT)

    def run(words: list[str]) -> EnginePlan:
        if "--facts" not in words:
            (sheet := tmp_path / "sheet.json").write_bytes(msgspec.json.encode(machine_for(words)))
            words = [*words, "--facts", str(sheet)]
        if "--load-format" not in words and "--config" not in words:
            words = [*words, "--load-format", "dummy"]
        parser = Parser(prog="glowplug serve")
        add_engine_options(parser)
        return read_command_line(parser.parse_args(words), plugins).plan()

    return run


def values(plan: EnginePlan) -> Values:
    """Return every value of a plan by name.

    Decisions have the name of their field. The others are ``ranks``, ``hosts``, ``mesh.AXIS``,
    ``sizes.NAME``, ``option.SLOT.NAME`` of the chosen components, ``template``, the source of the
    chat template, and ``bytes``, the whole budget.
    """
    named: Values = {decision.field: decision.value for decision in plan.decisions}
    named |= {"ranks": plan.ranks, "hosts": plan.hosts}
    named |= {f"mesh.{axis}": size for axis, size in plan.mesh.items()}
    named |= {f"sizes.{name}": value for name, value in vars(plan.sizes).items()}
    for choice in plan.choices:
        named |= {f"option.{choice.slot}.{name}": value for name, value in choice.options.items()}
    named["template"] = plan.chat_template
    return named | {"bytes": sum(line.bytes for line in plan.budget)}


def differing(plan: EnginePlan, expected: Values) -> dict[str, tuple[Any, Any]]:
    """Return (the plan's value, the expected one) of every name whose values differ."""
    found = values(plan)
    return {
        name: (found.get(name, "missing"), value)
        for name, value in expected.items()
        if name not in found or found[name] != value
    }


def unmentioned(plan: EnginePlan, words: list[str]) -> list[str]:
    """Return the engine flags of a command line that no decision of the plan names."""
    flags = {name for flag in FLAGS for name in flag.names}
    spelled = ["--" + word[2:].replace("_", "-") for word in words if word.startswith("--")]
    given = [word for word in spelled if word in flags]
    reasons = " ".join(f"{decision.field} {decision.why}" for decision in plan.decisions).split()
    return [flag for flag in given if flag not in {word.strip("();,") for word in reasons}]


# ---- the pages' command lines --------------------------------------------------------------------

TWO_HOSTS = {
    "mesh.tp": 16,
    "ranks": 16,
    "hosts": 2,
    "executor.use": "torchrun",
    "quantization.use": "block_fp8",
}
#: command line of a page -> values of its plan
PAGE_PLANS: dict[str, Values] = {
    "--model embedded --dtype bfloat16": {"ranks": 1, "dtype": "bfloat16"},
    "--model /models/DeepSeek-V2-Lite": {
        "ranks": 1,
        "model.family": "deepseek_v2",
        "dtype": "bfloat16",
        "attention.use": "hopper_mla",
        "quantization.use": "none",
        "graphs.use": "cuda_graph",
        "executor.use": "multiprocess",
    },
    "--facts 8xh200 --model models/shapes/deepseek-v3.json --load-format dummy --tp 8": {
        "ranks": 8,
        "hosts": 1,
        "mesh.tp": 8,
        "model.family": "deepseek_v3",
        "quantization.use": "block_fp8",
        "collectives.use": "peer_memory",
        "graphs.use": "cuda_graph",
    },
    "--facts 2x8xh200 --model models/shapes/deepseek-v3.json --load-format dummy --tp 16 "
    "--ep-size 16 --dp-size 16 --max-running-requests 768": {
        "mesh.dp": 16,
        "sizes.groups": 16,
        "sizes.max_running": 48,
        "sizes.chunk_size": 512,
    },
    "--model-path MODEL --tp 1 --disable-radix-cache --max-running-requests 64": {
        "ranks": 1,
        "cache.use": "none",
        "sizes.max_running": 64,
    },
    "--model deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code --port 30000": {
        "mesh.tp": 8,
        "trust_remote_code": True,
        "server.port": 30000,
    },
    "--model-path deepseek-ai/DeepSeek-V3 --tp 16 --dist-init-addr 10.0.0.1:5000 --nnodes 2 "
    "--node-rank 0 --trust-remote-code": {
        **TWO_HOSTS,
        "executor.host_rank": 0,
        "option.executor.address": "10.0.0.1:5000",
    },
    "--model deepseek-ai/DeepSeek-V3 --enable-dp-attention --tp 8 --dp 8 --trust-remote-code": {
        "ranks": 8,
        "mesh.tp": 8,
        "mesh.dp": 8,
        "parallel.1.use": "dp_attention",
    },
    "--model deepseek-ai/DeepSeek-V3 --enable-dp-attention --tp 16 --dp 2 --trust-remote-code": {
        **TWO_HOSTS,
        "mesh.dp": 2,
        "parallel.1.size": 2,
    },
    "--model deepseek-ai/DeepSeek-V3 --tp 8 --ep 8 --dp 8 --enable-dp-attention": {
        "ranks": 8,
        "mesh.tp": 8,
        "mesh.ep": 8,
        "mesh.dp": 8,
        "parallel.0.use": "tensor",
        "parallel.1.use": "ep_moe",
        "parallel.2.use": "dp_attention",
    },
    "--model embedded --tp 2 --ep-size 2 --dp-size 2": {
        "mesh.tp": 2,
        "mesh.ep": 2,
        "mesh.dp": 2,
        "model.family": "deepseek_v3",
    },
    "--model embedded --tp 2 --ep-size 2 --dp-size 2 --init-expert-location "
    "docs/recipes/expert-load.json --ep-num-redundant-experts 4": {
        "mesh.ep": 2,
        "mesh.dp": 2,
        "parallel.1.redundant_experts": 4,
        "parallel.1.placement": "docs/recipes/expert-load.json",
        "parallel.1.balance": "98.3%",
    },
    "--model-path deepseek-ai/DeepSeek-V3-0324 --speculative-algorithm EAGLE --trust-remote-code "
    "--tp 8": {
        "mesh.tp": 8,
        "speculative.use": "nextn",
        "sizes.width": 2,
        "sizes.draft_layers": 1,
    },
    "--model deepseek-ai/DeepSeek-V3 --tp 8 --trust-remote-code --enable-torch-compile "
    "--torch-compile-max-bs 8": {
        "mesh.tp": 8,
        "ops.use": "torch_compile",
        "option.ops.max_batch": 8,
    },
    "--model-path deepseek-ai/DeepSeek-V2-Lite --tp 1 --trust-remote-code --disable-radix-cache": {
        "ranks": 1,
        "parallel.0.use": "single",
        "cache.use": "none",
    },
    "--model /models/DeepSeek-V2-Lite --quantization w8a8_int8": {
        "ranks": 1,
        "quantization.use": "w8a8_int8",
    },
    "--model /models/DeepSeek-V2-Lite --quantization fp8": {
        "ranks": 1,
        "quantization.use": "block_fp8",
    },
    "--model /models/DeepSeek-V3 --tp 16 --nnodes 2 --node-rank 0 --dist-init-addr "
    "10.0.0.1:29500": {**TWO_HOSTS, "executor.host_rank": 0},
    "--model /models/DeepSeek-V3 --tp 16 --nnodes 2 --node-rank 1 --dist-init-addr "
    "10.0.0.1:29500": {
        **TWO_HOSTS,
        "executor.host_rank": 1,
        "option.executor.address": "10.0.0.1:29500",
    },
    "--model /models/DeepSeek-V3 --tp 16": TWO_HOSTS,
    "--model /models/DeepSeek-V3 --tp 16 --nnodes 2 --distributed-executor-backend ray "
    "--dist-init-addr auto": {
        **TWO_HOSTS,
        "executor.use": "ray",
        "option.executor.address": "auto",
    },
}


def test_every_command_line_of_the_pages_is_checked() -> None:
    assert {line for _, line in command_lines()} == PAGE_PLANS.keys()


@pytest.mark.parametrize("line", PAGE_PLANS)
def test_a_command_line_of_the_pages_has_its_values_in_the_plan(
    planned_line: Planner, line: str
) -> None:
    words = with_shape(shlex.split(line))
    plan = planned_line(words)
    assert differing(plan, {"weights.use": "random", **PAGE_PLANS[line]}) == {}
    assert unmentioned(plan, words) == []


#: file of docs/examples -> values of its plan on the sheet "cpu"
EXAMPLE_PLANS: dict[str, Values] = {
    "laptop.toml": {
        "dtype": "float32",
        "sizes.context_length": 1024,
        "sizes.max_running": 8,
        "sizes.max_queued": 64,
        "sizes.num_pages": 8192 // 16 + 1,
    },
    "reference.json": {
        "attention.use": "torch_mla",
        "option.attention.absorb": False,
        "cache.use": "none",
        "scheduler.overlap": False,
        "sizes.max_running": 1,
        "executor.use": "inline",
    },
    "shared.yaml": {
        "policy.use": "priority",
        "sizes.max_running": 32,
        "sizes.max_queued": 256,
        "server.queue_timeout": 30,
        "server.request_timeout": 300,
        "server.api_key": "***",
        "log.format": "json",
        "metrics.compat": ["vllm", "sglang"],
    },
}


def test_every_example_is_checked() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == EXAMPLE_PLANS.keys()


@pytest.mark.parametrize("name", EXAMPLE_PLANS)
def test_an_example_has_its_values_in_the_plan(planned_line: Planner, name: str) -> None:
    plan = planned_line(["--config", str(EXAMPLES / name), "--facts", "cpu"])
    assert differing(plan, EXAMPLE_PLANS[name]) == {}


# ---- command lines published for SGLang and vLLM -------------------------------------------------

#: command line without the model -> (its model, values of its plan)
OTHERS: dict[str, tuple[str, Values]] = {
    "--tp 8 --trust-remote-code --attention-backend fa3 --speculative-algorithm EAGLE "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": (
        V3,
        {
            "mesh.tp": 8,
            "attention.use": "fa3_mla",
            "speculative.use": "nextn",
            "speculative.steps": 3,
            "sizes.width": 4,
            "option.speculative.topk": 1,
        },
    ),
    "--tp 8 --speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 4": (
        V3,
        {
            "mesh.tp": 8,
            "speculative.use": "nextn",
            "sizes.width": 4,
            "sizes.draft_shape": DraftShape(2, 4, 4),
        },
    ),
    "--tp 8 --speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 8": (
        V3,
        {"mesh.tp": 8, "sizes.width": 8, "sizes.draft_shape": DraftShape(5, 4, 8)},
    ),
    "--tp 8 --attention-backend fa3 --speculative-algorithm EAGLE --speculative-num-steps 2 "
    "--speculative-eagle-topk 4 --speculative-num-draft-tokens 4": (
        V3,
        {
            "attention.use": "fa3_mla",
            "speculative.topk": 1,
            "sizes.width": 3,
            "sizes.draft_shape": DraftShape.chain(2),
        },
    ),
    "--tp-size 16 --trust-remote-code --enable-ep-moe --ep-size 16 --enable-dp-attention "
    "--dp-size 16 --enable-flashinfer-mla --disable-radix-cache --max-running-requests 768 "
    "--mem-fraction-static 0.7 --dist-timeout 3600": (
        V3,
        {
            **TWO_HOSTS,
            "mesh.ep": 16,
            "mesh.dp": 16,
            "attention.use": "flashinfer_mla",
            "cache.use": "none",
            "sizes.max_running": 48,
            "memory.static_fraction": 0.7,
            "option.collectives.timeout": 3600.0,
        },
    ),
    "--tp 16 --speculative-algo NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2 --enable-ep-moe --disable-cuda-graph "
    "--disable-radix-cache": (
        V3,
        {
            **TWO_HOSTS,
            "mesh.ep": 16,
            "parallel.1.size": 16,
            "speculative.use": "nextn",
            "sizes.width": 2,
            "graphs.use": "eager",
            "cache.use": "none",
        },
    ),
    "--tp 8 --cuda-graph-max-bs 1 --torch-compile-max-bs 1": (
        V3,
        {"mesh.tp": 8, "graphs.use": "cuda_graph", "graphs.batch_sizes": [1]},
    ),
    "--tp 8 --torch-compile-max-bs 1 --disable_cuda_graph": (
        V3,
        {"mesh.tp": 8, "graphs.use": "eager", "--torch-compile-max-bs": "no effect"},
    ),
    "--tp 1 --trust-remote-code --disable-overlap-schedule --enable-torch-compile "
    "--torch-compile-max-bs 4 --cuda-graph-bs 1 2 4": (
        LITE,
        {
            "ranks": 1,
            "scheduler.overlap": False,
            "ops.use": "torch_compile",
            "option.ops.max_batch": 4,
            "graphs.use": "cuda_graph",
            "graphs.batch_sizes": [1, 2, 4],
        },
    ),
    "--tensor-parallel-size 8 --mem-fraction-static 0.88 --dtype auto --max-running-requests 12 "
    "--trust-remote-code --context-length 15000 --host 127.0.0.1 --served-model-name v3 "
    "--port 9122": (
        V3,
        {
            "mesh.tp": 8,
            "dtype": "bfloat16",
            "sizes.max_running": 12,
            "sizes.context_length": 15000,
            "server.served_model_name": "v3",
            "server.port": 9122,
        },
    ),
    "--trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel "
    "--max-model-len 65536 --gpu-memory-utilization 0.95 --no-enable-prefix-caching": (
        V3,
        {
            "mesh.tp": 8,
            "mesh.ep": 8,
            "sizes.context_length": 65536,
            "memory.fraction": 0.95,
            "cache.use": "none",
        },
    ),
    "--max-model-len 8192 --max-num-seqs 64 --block-size 64 --kv-cache-dtype fp8 --enforce-eager "
    "--async-scheduling --no-enable-log-requests": (
        LITE,
        {
            "sizes.context_length": 8192,
            "sizes.max_running": 64,
            "sizes.page_size": 64,
            "attention.kv_dtype": "fp8_e4m3",
            "graphs.use": "eager",
            "scheduler.overlap": True,
            "log.requests": False,
        },
    ),
    "--reasoning-parser deepseek-r1 --tool-call-parser deepseekv31 --enable-auto-tool-choice": (
        LITE,
        {"outputs.0.use": "deepseek_r1", "outputs.1.use": "deepseek_v31"},
    ),
}


@pytest.mark.parametrize("line", OTHERS)
def test_a_command_line_of_another_engine_has_its_values_in_the_plan(
    planned_line: Planner, line: str
) -> None:
    model, expected = OTHERS[line]
    words = ["--model-path", model, *line.split()]
    plan = planned_line(words)
    assert differing(plan, expected) == {}
    assert [flag for flag in unmentioned(plan, words) if flag != "--dtype"] == []


#: command line without the model -> (its model, a part of the reason by refused field)
OTHERS_REFUSED: dict[str, tuple[str, dict[str, str]]] = {
    "--tp 8 --quantization fp8 --kv-cache-dtype fp8_e5m2": (
        V3,
        {"attention.kv_dtype": "not in fp8_e5m2"},
    ),
    "--tp 8 --quantization w8a8_int8": (
        V3,
        {"quantization.use": "the checkpoint is already quantized"},
    ),
    "--tp 14 --dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0 --enable-torch-compile": (
        V3,
        {"parallel.0.size": "does not split over 14 ranks"},
    ),
    "--trust-remote-code --data-parallel-size 8 --enable-expert-parallel": (
        V3,
        {
            "parallel.0.use": "none is listed before it",
            "parallel.1.use": "no strategy listed before it defines tensor ranks",
        },
    ),
    "--attention-backend flashinfer --tp 8 --kv-cache-dtype fp8_e4m3": (
        V3,
        {"attention.kv_dtype": "flashinfer_mla keeps the KV cache in bfloat16, float16"},
    ),
    "--trust-remote-code": (V3, {"model": "before any KV cache"}),
    "--tool-call-parser deepseekv9": (LITE, {"outputs.0.use": "no tool-call parser"}),
}


@pytest.mark.parametrize("line", OTHERS_REFUSED)
def test_a_command_line_of_another_engine_is_refused_with_the_reason(
    planned_line: Planner, line: str
) -> None:
    model, reasons = OTHERS_REFUSED[line]
    with pytest.raises(PlanRefused) as caught:
        planned_line(["--model", model, *line.split()])
    assert {refusal.field for refusal in caught.value.refusals} == reasons.keys()
    for refusal in caught.value.refusals:
        assert reasons[refusal.field] in refusal.reason and refusal.fix


# ---- every flag of the recipes -------------------------------------------------------------------

#: flags of the recipes that no plan admits -> a part of the reason by refused field
FLAGS_REFUSED: dict[str, dict[str, str]] = {
    "--kv-cache-dtype fp8_e5m2": {"attention.kv_dtype": "not in fp8_e5m2"},
    "--reasoning-parser a --tool-call-parser b": {
        "outputs.0.use": "no component named 'a'",
        "outputs.1.use": "no tool-call parser named 'b'",
    },
}
#: flags of the recipes -> options without which they cannot be planned
COMPANIONS: dict[str, str] = {
    "--enable-ep-moe --ep-size 8": "--tp 8",
    "--ep-size 8 --enable-ep-moe": "--tp 8",
    "--nnodes 2 --node-rank 1 --dist-init-addr a:1": "--tp 16",
    "--device cpu": "--facts cpu --model embedded",
}
#: values that recipes use as placeholders, or that the plan writes differently -> the plan's
WRITTEN: Values = {
    "m": LITE,
    "d": SLICE,
    "k": "***",
    "deepseek-r1": "deepseek_r1",
    "fp8": "block_fp8",
}
#: flags of the recipes -> values of the plan that follow from them
FOLLOWING: dict[str, Values] = {
    "--tp 8": {"ranks": 8, "mesh.tp": 8, "collectives.use": "peer_memory"},
    "--tp 1": {"ranks": 1, "parallel.0.use": "single"},
    "--enable-ep-moe --ep-size 8": {"ranks": 8, "mesh.ep": 8},
    "--ep-size 4 --dp 8 --tp-size 8": {"ranks": 8, "mesh.ep": 4, "mesh.dp": 8},
    "--tp 8 --enable-dp-attention --dp-size 8": {"mesh.dp": 8},
    "--quantization fp8": {"quantization.weights": "quantized while loading"},
    "--disable-mla": {"option.attention.absorb": False},
    "--cuda-graph-bs 1 2 4": {"option.graphs.batch_sizes": [1, 2, 4]},
    "--cuda-graph-max-bs 8": {"graphs.batch_sizes": [1, 2, 3, 4, 6, 8]},
    "--disable-piecewise-cuda-graph": {"sizes.pass_tokens": ()},
    "--piecewise-cuda-graph-tokens 16 64": {"sizes.pass_tokens": (16, 64)},
    "--nnodes 2 --node-rank 1 --dist-init-addr a:1": {**TWO_HOSTS, "quantization.use": "none"},
    "--max-running-requests 768": {"sizes.max_running": 768},
    "--context-length 32768": {"sizes.context_length": 32768},
    "--chunked-prefill-size 4096": {"sizes.chunk_size": 4096},
    "--page-size 64": {"sizes.page_size": 64},
    "--dist-timeout 3600": {"option.collectives.timeout": 3600.0},
    "--chat-template t.jinja": {"template": "{{ messages }}"},
    "--dtype half": {"dtype": "float16", "attention.kv_dtype": "float16"},
    "--load-format dummy": {"option.weights.use": "random"},
    "--max-num-queued-reqs 8 --distributed-timeout-seconds 60": {"sizes.max_queued": 8},
    "--spec-method mtp --spec-tokens 2": {"sizes.width": 3, "sizes.draft_layers": 1},
    "--speculative-algorithm NEXTN --speculative-draft-model-path d --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4": {"sizes.width": 4},
}
RECIPES = {" ".join(words): (words, config) for words, config in [*PUBLISHED, *TAKEN]}


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of a configuration's values, without the list of strategies."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key != "parallel":
                yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(config, list) and isinstance(config[0], dict):
        for number, item in enumerate(config):
            yield from leaves(item, f"{path}.{number}")
    else:
        yield path, config


def strategies(plan: EnginePlan) -> list[dict[str, Any]]:
    return [
        {"use": choice.name, "size": choice.options["size"]}
        for choice in plan.choices_in("parallel")
    ]


def recipe_line(line: str, template: Path) -> list[str]:
    """Return the command line of a recipe's flags, with a model that has what they need."""
    words, config = RECIPES[line]
    placeholders = {"m": LITE, "d": SLICE, "t.jinja": str(template)}
    words = [placeholders.get(word, word) for word in words]
    words += COMPANIONS.get(line, "").split()
    model = SLICE if "speculative" in config else LITE
    return words if {"--model", "--model-path"} & {*words} else ["--model", model, *words]


@pytest.mark.parametrize("line", [line for line in RECIPES if line not in FLAGS_REFUSED])
def test_a_flag_of_the_recipes_sets_its_values_in_the_plan(
    planned_line: Planner, tmp_path: Path, line: str
) -> None:
    (template := tmp_path / "t.jinja").write_text("{{ messages }}")
    words = recipe_line(line, template)
    plan = planned_line(words)
    config = RECIPES[line][1]
    written = WRITTEN | {"t.jinja": template.name}
    expected = {
        path: value if isinstance(value, list) else written.get(value, value)
        for path, value in leaves(config)
    }
    assert differing(plan, {**expected, **FOLLOWING.get(line, {})}) == {}
    assert all(one in strategies(plan) for one in config.get("parallel", ()))
    assert unmentioned(plan, words) == []


@pytest.mark.parametrize("line", FLAGS_REFUSED)
def test_a_flag_of_the_recipes_is_refused_with_the_reason(
    planned_line: Planner, tmp_path: Path, line: str
) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned_line(recipe_line(line, tmp_path / "none"))
    reasons = {refusal.field: refusal.reason for refusal in caught.value.refusals}
    assert reasons.keys() == FLAGS_REFUSED[line].keys()
    assert all(part in reasons[field] for field, part in FLAGS_REFUSED[line].items())


def test_every_flag_is_planned_in_some_command_line() -> None:
    """Each flag of the table, under one of its names, is in a command line above."""
    lines = [*PAGE_PLANS, *OTHERS, *OTHERS_REFUSED, *RECIPES, *BESIDES]
    given = {"--" + word[2:].replace("_", "-") for line in lines for word in line.split()}
    lacking = [flag.names for flag in FLAGS if not given & {*flag.names}]
    assert [names for names in lacking if names[0] not in BUNDLES] == []


# ---- memory, and flags that no recipe names ------------------------------------------------------


def test_a_share_of_the_memory_limits_the_plan(planned_line: Planner) -> None:
    words = ["--model", LITE, "--gpu-memory-utilization"]
    device = machine_for(words).devices[0].memory
    for share in (0.7, 0.9):
        used = values(planned_line([*words, str(share)]))["bytes"]
        assert (share - 0.01) * device < used <= share * device


def test_a_static_share_is_that_of_weights_and_cache_alone(planned_line: Planner) -> None:
    """Activations and graphs are not part of the share, as published for SGLang."""
    words = ["--model", LITE, "--mem-fraction-static"]
    device = machine_for(words).devices[0].memory
    for share in (0.5, 0.9):
        plan = planned_line([*words, str(share)])
        lines = {line.name: line.bytes for line in plan.budget}
        static = lines["weights"] + lines["kv cache"]
        assert (share - 0.001) * device < static <= share * device < sum(lines.values())
        assert plan.sizes.most_pages == plan.sizes.least_pages == plan.sizes.num_pages


@pytest.mark.parametrize(("share", "part"), [(0.1, "too few"), (0.979, "leave too little")])
def test_a_static_share_that_cannot_be_is_refused_with_one_that_can(
    planned_line: Planner, share: float, part: str
) -> None:
    words = ["--model", LITE, "--mem-fraction-static"]
    with pytest.raises(PlanRefused) as caught:
        planned_line([*words, str(share)])
    (refusal,) = caught.value.refusals
    assert refusal.field == "memory.static_fraction" and part in refusal.reason
    fits = refusal.fix.partition(" = ")[2].partition(",")[0]
    assert values(planned_line([*words, fits]))["memory.static_fraction"] == float(fits)


def test_sizes_of_the_cache_are_the_plans(planned_line: Planner) -> None:
    sizes = planned_line(["--model", LITE, "--max-total-tokens", "65536"]).sizes
    assert (sizes.num_pages - 1) * sizes.page_size == 65536
    sizes = planned_line(["--model", LITE, "--kv-cache-memory-bytes", "25G"]).sizes
    assert 0 <= 25 * GIB - sizes.kv_bytes < 2 * sizes.kv_bytes / sizes.num_pages


#: other flags -> values of the plan
BESIDES: dict[str, Values] = {
    "--enable-metrics --log-level debug --log-format json --watchdog-timeout 5": {
        "metrics.enabled": True,
        "log.level": "debug",
        "log.format": "json",
        "option.executor.watchdog": 5.0,
    },
    "--revision main --admin-api-key k --stream-interval 3 --max-total-tokens 4096": {
        "revision": "main",
        "server.admin_api_key": "***",
        "server.stream_interval": 3,
        "kv.tokens": 4096,
    },
    "--tp 8 --ep-size 8 --ep-num-redundant-experts 8 --init-expert-location trivial": {
        "mesh.ep": 8,
        "parallel.1.redundant_experts": 8,
        "parallel.1.placement": None,
    },
    "--speculative-algorithm NGRAM --ngram-prompt-lookup-max 4 --ngram-prompt-lookup-min 2": {
        "speculative.use": "ngram",
        "option.speculative.prompt_lookup_max": 4,
        "option.speculative.prompt_lookup_min": 2,
    },
    "--disable-draft-extend-cuda-graph": {"option.graphs.draft_extend": False},
    "--enable-tokenizer-info-endpoint": {"server.tokenizer_info": True},
    "--no-enable-tokenizer-info-endpoint": {"server.tokenizer_info": False},
    "--metrics-compat vllm": {"metrics.compat": ("vllm",)},
    "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces": {
        "tracing.endpoint": "http://127.0.0.1:4318/v1/traces"
    },
    "--page": {"server.page": True},
    "--no-page": {"server.page": False},
    "--disable-page": {"server.page": False},
}


@pytest.mark.parametrize("line", BESIDES)
def test_other_flags_set_their_values_in_the_plan(planned_line: Planner, line: str) -> None:
    words = ["--model", LITE, *line.split()]
    plan = planned_line(words)
    assert differing(plan, BESIDES[line]) == {} and unmentioned(plan, words) == []

"""An option that changes nothing in a plan is marked so, by a declaration beside the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from glowplug.core.errors import PluginLoadError
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, Capture, Mode, OpsOffers
from glowplug.core.plugin.options import OpsOptions
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.testing.harness.fakes import component
from glowplug.plugins.ops.torch_ops import TABLE
from tests.plan.conftest import Planner
from tests.plan.test_flags import given
from tests.plan.test_refusals import with_components

H200 = read_sheet("1xh200")
HALF = {"dtype": "bfloat16"}
RANKS = {"parallel": [{"use": "tensor", "size": 2}]}


def idle(plan: EnginePlan) -> dict[str, str]:
    """Return the operator's options that the plan marks as without effect, with the reasons."""
    marked = [one for one in plan.decisions if "no effect: " in one.why]
    assert {one.by for one in marked} <= {"operator"}
    return {one.field: one.why.partition("no effect: ")[2] for one in marked}


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        ({"revision": "main"}, "revision", "not the id of a downloaded model"),
        ({"trust_remote_code": True}, "trust_remote_code", "never run"),
        (
            {"tokenizer": "x", "skip_tokenizer": True},
            "tokenizer",
            "this engine runs without a tokenizer",
        ),
        (
            {"attention": {"kv_error": 0.5}},
            "attention.kv_error",
            "a KV cache in float32 is not measured",
        ),
        (
            {"collectives": {"timeout": 5.0}},
            "collectives.timeout",
            "one rank has no others to wait for",
        ),
        (
            {"executor": {"use": "inline", "watchdog": 5.0}},
            "executor.watchdog",
            "in the calling process",
        ),
        (
            {"executor": {"use": "inline", "start_timeout": 5.0}},
            "executor.start_timeout",
            "in the calling process",
        ),
        ({"executor": {"oversubscribe": True}}, "executor.oversubscribe", "each rank has a core"),
        ({"graphs": {"use": "eager", "prefill": False}}, "graphs.prefill", "no step is captured"),
        ({"graphs": {"prefill": False}}, "graphs.prefill", "no step is captured"),
        ({"graphs": {"draft_extend": False}}, "graphs.draft_extend", "no step is captured"),
        (
            {"scheduler": {"share_prefill": 3}, "cache": {"use": "none"}},
            "scheduler.share_prefill",
            "does not share prefixes",
        ),
        (
            {"memory": {"kv_tokens": 999, "kv_bytes": 999}},
            "memory.kv_bytes",
            "memory.kv_tokens decides",
        ),
        (
            {"memory": {"kv_bytes": 1 << 24, "static_fraction": 0.5}},
            "memory.static_fraction",
            "memory.kv_bytes decides",
        ),
        (
            {"memory": {"growing_segments": True}},
            "memory.growing_segments",
            "of CUDA devices",
        ),
        (
            {"server": {"tokenizer_threads": 3}, "skip_tokenizer": True},
            "server.tokenizer_threads",
            "token ids only",
        ),
        ({"server": {"open_routes": ["/health"]}}, "server.open_routes", "no key is set"),
        (
            {"metrics": {"enabled": False, "compat": ["vllm"]}},
            "metrics.compat",
            "metrics.enabled is false",
        ),
    ],
)
def test_options_without_effect_on_a_cpu_say_so(
    planned: Planner, config: dict[str, Any], path: str, why: str
) -> None:
    found = idle(planned(config))
    assert list(found) == [path] and why in found[path]


@pytest.mark.parametrize(
    ("config", "path", "why"),
    [
        ({"executor": {"oversubscribe": True}}, "executor.oversubscribe", "has a CUDA device"),
        (
            {"attention": {"use": "triton_mla", "absorbed": "bf16"}},
            "attention.absorbed",
            "no weights in block FP8",
        ),
        ({"graphs": {"use": "eager", "prefill": False}}, "graphs.prefill", "no step is captured"),
    ],
)
def test_options_without_effect_on_a_gpu_say_so(
    planned: Planner, config: dict[str, Any], path: str, why: str
) -> None:
    found = idle(planned({**HALF, **config}, hardware=H200))
    assert list(found) == [path] and why in found[path]


@pytest.mark.parametrize(
    "config",
    [
        {"attention": {"kv_error": 0.5, "kv_dtype": "fp8_e4m3"}},
        {"memory": {"growing_segments": True}},
        {"memory": {"kv_bytes": 1 << 24}},
        {"memory": {"fraction": 0.5}},
        {"graphs": {"prefill": False}},
        {"graphs": {"use": "cuda_graph", "prefill_tokens": [16]}},
        {"scheduler": {"share_prefill": 3}},
        {"executor": {"use": "multiprocess", "start_timeout": 5.0, "watchdog": 5.0}},
        {"executor": {"use": "multiprocess"}, "collectives": {"timeout": 5.0}},
        {"metrics": {"compat": ["vllm"]}},
        {"server": {"open_routes": ["/health"], "admin_api_key": "k"}},
        {"ops": {"use": "torch_compile", "max_batch": 2}},
    ],
)
def test_options_with_effect_are_not_marked(planned: Planner, config: dict[str, Any]) -> None:
    assert idle(planned({**HALF, **config}, hardware=H200)) == {}


def test_ranks_wait_for_one_another_and_may_share_cores(planned: Planner) -> None:
    assert idle(planned({**RANKS, "collectives": {"timeout": 5.0}})) == {}
    crowded = {"parallel": [{"use": "tensor", "size": 4}], "executor": {"oversubscribe": True}}
    two_cores = type(read_sheet("cpu"))(cpu_cores=2, cpu_memory=32 << 30)
    assert idle(planned(crowded, hardware=two_cores)) == {}
    assert list(idle(planned(crowded))) == ["executor.oversubscribe"]


def test_values_that_leave_the_choice_to_the_plan_are_not_marked(planned: Planner) -> None:
    assert (
        idle(planned({"memory": {"growing_segments": "auto"}, "attention": {"kv_error": None}}))
        == {}
    )


def test_experts_of_a_model_without_any(planned: Planner, llama: Path) -> None:
    config = {
        **HALF,
        "model": str(llama),
        "quantization": {"use": "block_fp8", "experts": "triton"},
    }
    assert idle(planned(config, hardware=H200)) == {
        "quantization.experts": "the model has no routed experts"
    }


def test_token_counts_where_a_component_cannot_be_captured_over_prompts(planned: Planner) -> None:
    modes = {**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER}
    own = component("ops", "waits", OpsOffers(modes=modes, ops=TABLE))
    config = {
        **HALF,
        "ops": {"use": "waits"},
        "graphs": {"use": "cuda_graph", "prefill_tokens": [16]},
    }
    plan = planned(config, hardware=H200, plugins=with_components(ops=[own]))
    assert plan.sizes.pass_tokens == ()
    assert idle(plan) == {
        "graphs.prefill_tokens": "waits syncs with the host or allocates in prefill"
    }


class WaxOptions(OpsOptions):
    use: Literal["wax"] = "wax"
    layers: int = 1
    colour: str = "red"

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        if self.layers == 13:
            raise RuntimeError("thirteen")
        return {
            **super().without_effect(context),
            "colour": f"in the dark of {context.values.device}",
        }


def test_a_plugin_declares_its_own(planned: Planner) -> None:
    own = with_components(
        ops=[Component("wax", WaxOptions, "nowhere:None", OpsOffers(ops=TABLE), summary="x")]
    )
    assert idle(planned({"ops": {"use": "wax", "layers": 3}}, plugins=own)) == {}
    assert idle(planned({"ops": {"use": "wax", "colour": "blue"}}, plugins=own)) == {
        "ops.colour": "in the dark of cpu"
    }
    with pytest.raises(
        PluginLoadError, match="without_effect of ops 'wax' failed: RuntimeError: thirteen"
    ):
        planned({"ops": {"use": "wax", "layers": 13}}, plugins=own)


def test_options_that_go_with_a_component_replaced_on_the_command_line(
    plugins: PluginSet, v3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{v3}"\n[weights]\nuse = "random"\n[graphs]\nuse = "cuda_graph"\n'
        "batch_sizes = [1]\n"
        '[attention]\nuse = "torch_mla"\npage_size = 4\nabsorb = false\n'
    )
    plan = given(
        plugins,
        "--config",
        str(file),
        "--facts",
        "1xh200",
        "--dtype",
        "bfloat16",
        "--disable-cuda-graph",
        "--attention-backend",
        "triton",
    ).plan()
    assert plan.choice("attention").name == "triton_mla" and plan.sizes.page_size == 4
    assert idle(plan) == {
        "graphs.batch_sizes": "--disable-cuda-graph replaces cuda_graph",
        "attention.absorb": "--attention-backend triton replaces torch_mla",
    }
    assert {one.why.partition(";")[0] for one in plan.decisions if "no effect" in one.why} == {
        "engine.toml:6",
        "engine.toml:10",
    }


@pytest.mark.parametrize("named", ["--set", "--config"])
def test_a_compiled_batch_counts_wherever_compilation_is_asked_for(
    plugins: PluginSet, v3: Path, tmp_path: Path, named: str
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[ops]\nuse = "torch_compile"\n')
    words = {"--set": ("--set", "ops.use=torch_compile"), "--config": ("--config", str(file))}[
        named
    ]
    found = given(plugins, "--model", str(v3), "--torch-compile-max-bs", "4", *words)
    assert found.config["ops"] == {"use": "torch_compile", "max_batch": 4} and found.notes == []
    alone = given(plugins, "--model", str(v3), "--torch-compile-max-bs", "4")
    assert [(note.field, note.value) for note in alone.notes] == [
        ("--torch-compile-max-bs", "no effect")
    ]


def test_the_servers_sections_do_nothing_offline() -> None:
    from glowplug import LLM

    with LLM(model="embedded", server={"port": 4}, log={"level": "debug"}) as llm:
        assert set(idle(llm.plan)) == {"server.port", "log.level"}

"""Every option and flag that the operator writes is either refused or a decision of the
operator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from pydantic.fields import FieldInfo

from glowplug.core.config.schema import SECRETS, EngineConfig
from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from glowplug.entrypoints.cli.flags.flag import Flag
from glowplug.entrypoints.cli.flags.table import FLAGS
from tests.plan.test_flags import given

BUILT_INS = load_plugins(entry_points=False)
PACKAGES = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "sglang-kernel": "0.4.2.post2",
    "sgl-deep-gemm": "0.1.0",
    "flashinfer-python": "0.6.11.post1",
    "ray": "2.50.0",
    "opentelemetry-sdk": "1.30.0",
    "opentelemetry-exporter-otlp-proto-http": "1.30.0",
}
LEFT_OPEN = ("auto", None)  #: values that leave the choice to the plan
#: fitting values of options whose type does not determine them
FITTING: dict[str, list[Any]] = {
    "address": ["10.0.0.1:29500"],
    "kv_bytes": [1 << 24],
    "page_size": [16, 64],
    "stored_response_bytes": [1 << 20],
    "steps": [2],
    "draft_tokens": [2],
    "topk": [1],
    "hosts": [1, 2],
    "size": [1, 2],
    "host_rank": [0, 1],
    "fraction": [0.5],
    "static_fraction": [0.5],
    "port": [0, 4],
    "seed": [3],
    "max_body_bytes": [1 << 16],
    "max_bytes": [1 << 10],
    "compile_bytes": [1 << 28],
    "batch_sizes": [[1, 2]],
    "prefill_tokens": [[16, 64]],
    "cors_origins": [["http://a"]],
    "open_routes": [["/health"]],
    "compat": [["vllm"], "vllm", "all", "none"],
    "endpoint": ["http://10.0.0.9:4318/v1/traces"],
    "simulate_accept_rates": [[0.5]],
    "gemm": ["triton", "cutlass", "deep_gemm"],
}
#: options that none of these plans accepts -> the tests that cover them
ELSEWHERE = {
    "speculative.draft_model": "tests/plan/test_drafts.py",
    "speculative.simulate_accept_rates": "tests/plan/test_simulated_acceptance.py",
    "chat_template": "tests/plan/test_chat_template_option.py",
}


def values(name: str, kind: Any) -> Iterator[Any]:
    """Return the values that an option of this type accepts, except those that leave it open."""
    if name in FITTING:
        yield from FITTING[name]
    elif get_origin(kind) is Literal:
        yield from (value for value in get_args(kind) if value not in LEFT_OPEN)
    elif kind is bool:
        yield from (False, True)
    elif kind in (int, float):
        yield kind(2)
    elif kind is str:
        yield "some-text"
    elif kind is not NoneType:
        for part in get_args(kind):
            yield from values(name, part)


def options() -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield (path, configuration, value) for every option of every component and of the sections
    that no plugin fills.
    """
    for slot in SLOTS:
        for found in BUILT_INS.components(slot.name) if slot.section else ():
            for name, info in found.component.options.model_fields.items():
                for value in values(name, info.annotation) if name != "use" else ():
                    section = {"use": found.component.name, name: value}
                    yield (
                        (*_in_list(slot.section, name, section),)
                        if slot.many
                        else (f"{slot.section}.{name}", {slot.section: section}, value)
                    )
    for key, info in EngineConfig.model_fields.items():
        section_of = getattr(info.annotation, "model_fields", None)
        fields: dict[str, FieldInfo] = section_of or {key: info}
        for name, field in fields.items():
            for value in values(name, field.annotation) if name != "model" else ():
                yield (
                    (f"{key}.{name}", {key: {name: value}}, value)
                    if section_of
                    else (key, {key: value}, value)
                )


def _in_list(section: str, name: str, item: dict[str, Any]) -> tuple[str, dict[str, Any], Any]:
    """Return an item of a list; strategies that refine tensor ranks come after those."""
    before = [{"use": "tensor", "size": 2}] if item["use"] in ("ep_moe", "dp_attention") else []
    if before and name != "size":
        item = {"size": 2, **item}
    return f"{section}.{len(before)}.{name}", {section: [*before, item]}, item[name]


OPTIONS = list(options())


@cache
def machines() -> tuple[HardwareFacts, ...]:
    return (
        read_sheet("cpu"),
        *(replace(read_sheet(name), packages=PACKAGES) for name in ("8xh200", "2x8xh200")),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models such that each option applies to at least one."""
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    awq = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "version": "gemm",
        }
    }
    tensors = {"model.embed_tokens.weight": ("BF16", (512, 128))}
    shapes = (
        {**TINY_V3, "num_nextn_predict_layers": 1},
        {**TINY_V3, **quantized},
        TINY_LLAMA,
        {**TINY_LLAMA, **awq},
    )
    folders = [write_model(tmp_path_factory.mktemp("shape"), shape) for shape in shapes]
    return [*folders, write_model(tmp_path_factory.mktemp("weights"), TINY_V3, tensors)]


def plans(models: list[Path], config: dict[str, Any]) -> Iterator[EnginePlan]:
    """Yield a plan for each machine and model on which the configuration can run, with 16 bits and
    two ranks as well.
    """
    for machine in machines():
        for model in models:
            for more in ({}, {"dtype": "bfloat16", "parallel": [{"use": "tensor", "size": 2}]}):
                if more.keys() & config.keys():
                    continue
                full = {"model": str(model), "weights": {"use": "random"}, **more, **config}
                contributed = {"executor.use": "torchrun" if machine.hosts > 1 else "multiprocess"}
                try:
                    yield make_plan(
                        full,
                        plugins=BUILT_INS,
                        hardware=machine,
                        contributed=contributed if more else {},
                    )
                except PlanRefused:
                    continue


def decisions(plan: EnginePlan, path: str) -> list[Decision]:
    return [decision for decision in plan.decisions if decision.field == path]


def test_the_options_are_all_of_them() -> None:
    paths = {path for path, *_ in OPTIONS}
    assert (
        len(paths) > 60
        and {
            "attention.kv_error",
            "parallel.1.exchange",
            "outputs.0.opening",
            "seed",
            "server.api_key",
            "graphs.batch_sizes",
            "memory.growing_segments",
        }
        <= paths
    )


@pytest.mark.parametrize(
    ("path", "config", "value"),
    OPTIONS,
    ids=[
        f"{path}={json.dumps(value)}-{json.dumps(config)[:60]}" for path, config, value in OPTIONS
    ],
)
def test_an_option_that_is_not_refused_is_decided_by_the_operator(
    models: list[Path], path: str, config: dict[str, Any], value: Any
) -> None:
    for plan in plans(models, config):
        found = decisions(plan, path)
        assert [decision.by for decision in found] == ["operator"], (path, value, found)
        assert json.loads(json.dumps(found[0].value)) == ("***" if path in SECRETS else value), (
            found
        )


def test_every_option_can_be_planned_with(models: list[Path]) -> None:
    """An option without a plan would not be covered by the test above."""
    planned: set[str] = set()
    for path, config, _ in OPTIONS:
        if path not in planned and next(plans(models, config), None) is not None:
            planned.add(path)
    assert {path for path, *_ in OPTIONS} - planned == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        ({"scheduler": {"overlap": False}}, "scheduler.overlap", False),
        ({"outputs": []}, "outputs", "none"),
        ({"parallel": []}, "parallel.0.use", "single"),
        (
            {"graphs": {"use": "cuda_graph", "batch_sizes": [1, 2, 4096]}},
            "graphs.batch_sizes",
            [1, 2],
        ),
        (
            {"graphs": {"use": "cuda_graph", "prefill_tokens": [16, 1 << 20]}},
            "graphs.prefill_tokens",
            [16],
        ),
    ],
)
def test_decisions_that_follow_from_the_operators_options(
    models: list[Path], config: dict[str, Any], path: str, value: Any
) -> None:
    found = [decisions(plan, path) for plan in plans(models, config)]
    assert found and all(
        [(one.value, one.by) for one in each] == [(value, "operator")] for each in found
    ), found


def test_a_plugin_that_decides_on_overlap_is_credited(models: list[Path]) -> None:
    plan = make_plan(
        {"model": str(models[0]), "weights": {"use": "random"}},
        plugins=BUILT_INS,
        hardware=machines()[1],
        contributed={"scheduler.overlap": False},
    )
    assert decisions(plan, "scheduler.overlap") == [
        Decision("scheduler.overlap", False, "entry point", "contributed default")
    ]


# ---- flags ---------------------------------------------------------------------------------------

#: arguments of flags for which "2" is no value, or not enough
WORDS: dict[str, list[str]] = {
    "--tokenizer-path": ["t"],
    "--dtype": ["bf16"],
    "--device": ["cuda"],
    "--load-format": ["dummy"],
    "--quantization": ["block_fp8"],
    "--attention-backend": ["triton"],
    "--grammar-backend": ["none"],
    "--kv-cache-dtype": ["bfloat16"],
    "--page-size": ["64"],
    "--ep-size": ["2", "--tp", "2"],
    "--enable-ep-moe": ["--tp", "2"],
    "--ep-num-redundant-experts": ["2", "--tp", "2"],
    "--init-expert-location": ["trivial", "--tp", "2"],
    "--dp-size": ["2", "--tp", "2"],
    "--enable-dp-attention": ["--tp", "2"],
    "--nnodes": ["2", "--tp", "2"],
    "--node-rank": ["0", "--nnodes", "2", "--tp", "2"],
    "--dist-init-addr": ["10.0.0.1:29500", "--nnodes", "2", "--tp", "2"],
    "--distributed-executor-backend": ["mp"],
    "--speculative-algorithm": ["NEXTN"],
    "--speculative-num-steps": ["2", "--speculative-algorithm", "NEXTN"],
    "--speculative-eagle-topk": ["1", "--speculative-algorithm", "NEXTN"],
    "--speculative-num-draft-tokens": ["2", "--speculative-algorithm", "NEXTN"],
    "--speculative-token-map": ["32", "--speculative-algorithm", "NEXTN"],
    "--speculative-ngram-max-match-window-size": ["3", "--speculative-algorithm", "NGRAM"],
    "--speculative-ngram-min-match-window-size": ["2", "--speculative-algorithm", "NGRAM"],
    "--torch-compile-max-bs": ["2", "--enable-torch-compile"],
    "--schedule-policy": ["lpm"],
    "--mem-fraction-static": ["0.5"],
    "--gpu-memory-utilization": ["0.5"],
    "--max-total-tokens": ["9000"],
    "--context-length": ["64"],
    "--reasoning-parser": ["deepseek-r1"],
    "--tool-call-parser": ["kimi_k2"],
    "--log-level": ["debug"],
    "--log-format": ["json"],
    "--metrics-compat": ["vllm"],
    "--otlp-traces-endpoint": ["http://10.0.0.9:4318/v1/traces"],
    "--cuda-graph-bs": ["1", "2"],
    "--piecewise-cuda-graph-tokens": ["16"],
    "--piecewise-cuda-graph-max-tokens": ["64"],
    "--chat-template": ["{{ messages }}"],
    "--kv-cache-memory-bytes": ["16M"],
    "--sampling-backend": ["pytorch"],
    "--allowed-origins": ['["http://a"]'],
}
#: flags whose value none of these plans accepts -> the tests that cover them
ELSEWHERE_FLAGS = {
    "--speculative-draft-model-path": "tests/plan/test_drafts.py",
    "--enable-flashinfer-mla": "tests/plan/test_attention_libraries.py",
}


def written_sheet(folder: Path, name: str) -> str:
    """Write a fact sheet with packages to a file."""
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(replace(read_sheet(name), packages=PACKAGES)))
    return str(path)


#: flags that stand for several others -> the tests that cover them
BUNDLES = {"--speculative-config": "tests/plan/test_ngram.py"}
SINGLE_FLAGS = [flag for flag in FLAGS if flag.names[0] not in BUNDLES]


@pytest.mark.parametrize("flag", SINGLE_FLAGS, ids=lambda flag: flag.names[0])
def test_a_flag_that_is_not_refused_is_decided_by_the_operator(
    models: list[Path], tmp_path: Path, flag: Flag
) -> None:
    words = [flag.names[0], *WORDS.get(flag.names[0], [] if flag.convert is None else ["2"])]
    found = 0
    for name in ("cpu", "8xh200", "2x8xh200"):
        asked = ["--facts", written_sheet(tmp_path, name), *words]
        if flag.path != "model":
            asked += ["--model", str(models[0])]
        else:
            asked[3] = str(models[0])
        if "--load-format" not in words:
            asked += ["--set", "weights.use=random"]
        try:
            plan = given(BUILT_INS, *asked).plan()
        except PlanRefused:
            continue
        found += 1
        said = [
            one
            for one in plan.decisions
            if one.why.startswith(flag.names[0]) or one.field == flag.names[0]
        ]
        assert said and {one.by for one in said} == {"operator"}, plan.decisions
        if "[" not in flag.path:
            assert [one.by for one in decisions(plan, flag.path)] == ["operator"]
    assert bool(found) == (flag.names[0] not in ELSEWHERE_FLAGS)


@pytest.mark.parametrize("flag", ["--tp", "--ep-size", "--dp-size"])
def test_a_size_of_one_is_decided_by_the_operator(models: list[Path], flag: str) -> None:
    plan = given(
        BUILT_INS, "--facts", "cpu", "--model", str(models[0]), "--load-format", "dummy", flag, "1"
    ).plan()
    assert [(one.value, one.by) for one in plan.decisions if one.why == f"{flag} 1"] == [
        (1, "operator")
    ]

"""Int8 and AWQ checkpoints on the CPU: weights, whole models, ranks, bytes, and refusals before
loading.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.errors import PlanRefused
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import LinearShape, Worker
from glowplug.core.testing.harness.build import DictSource, Stepper, build_model, make, plan_for
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, submit
from glowplug.kernels.formats import int8
from tests.support.narrow_checkpoints import (
    AWQ,
    COMPRESSED,
    INT8,
    awq_checkpoint,
    awq_matrix,
    float_tensors,
    int8_checkpoint,
    int8_matrix,
    tiny_facts,
    write_folder,
)
from tests.support.reading import declared

MODELS = ("v2", "v3", "llama")
Made = tuple[dict[str, Tensor], dict[str, Tensor]]
FORMATS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Made]]] = {
    "int8": (INT8, int8_checkpoint),
    "compressed": (COMPRESSED, lambda tensors: int8_checkpoint(tensors, flat=True)),
    "awq": (AWQ, awq_checkpoint),
    "awq, a group a row": ({**AWQ, "group_size": -1}, lambda tensors: awq_checkpoint(tensors, -1)),
}


def answers(folder: Path, **config: Any) -> tuple[list[list[int]], Any]:
    """Return greedy tokens of the engine on the CPU, and its plan."""
    prompts = [[5, 9, 33, 7], [2], list(range(40, 75))]
    with LLM(
        model=str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer=True,
        memory={"kv_tokens": 512},
        **config,
    ) as llm:
        done = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        )
        return [answer.token_ids for answer in done], llm.plan


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", FORMATS)
def test_whole_models_give_the_tokens_of_the_dequantised_ones(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The format is recognised by config.json alone; the tokens are those of plain torch over the
    dequantised weights.
    """
    config, quantise = FORMATS[kind]
    facts = tiny_facts(name)
    tensors = float_tensors(facts)
    stored, dense = quantise(tensors)
    found, plan = answers(write_folder(tmp_path / "narrow", name, stored, config))
    assert plan.choice("quantization").name == ("awq" if "awq" in kind else "w8a8_int8")
    model, context = build_model(facts, dense)
    stepper = Stepper(model, context)
    wanted = [
        stepper.greedy(prompt, 12, row)
        for row, prompt in enumerate([[5, 9, 33, 7], [2], list(range(40, 75))])
    ]
    assert found == wanted
    assert len({token for row in wanted for token in row}) > 5


@pytest.mark.parametrize("name", MODELS)
def test_online_int8_is_the_int8_checkpoint(name: str, tmp_path: Path) -> None:
    tensors = float_tensors(tiny_facts(name))
    native, _ = answers(write_folder(tmp_path / "native", name, int8_checkpoint(tensors)[0], INT8))
    online, plan = answers(
        write_folder(tmp_path / "float", name, tensors), quantization={"use": "w8a8_int8"}
    )
    assert online == native and plan.choice("quantization").name == "w8a8_int8"


def test_stored_int8_is_read_without_an_entry_in_config(tmp_path: Path) -> None:
    """SGLang uses a flag alone for such a checkpoint."""
    stored, _ = int8_checkpoint(float_tensors(tiny_facts("v2")))
    told, _ = answers(
        write_folder(tmp_path / "silent", "v2", stored), quantization={"use": "w8a8_int8"}
    )
    assert told == answers(write_folder(tmp_path / "said", "v2", stored, INT8))[0]


def test_dynamic_activations_round_every_product(tmp_path: Path) -> None:
    """A linear layer and a whole model are tried: rounding changes logits a little, and only on
    request.
    """
    facts = tiny_facts("v3", quantization_config=INT8)
    stored, dense = int8_checkpoint(float_tensors(facts))
    outputs = []
    for tensors, options in ((stored, {"activations": "dynamic"}), (stored, {}), (dense, None)):
        more = (
            {}
            if options is None
            else {"quantization": "w8a8_int8", "quantization_options": options}
        )
        model, context = build_model(
            facts if options is not None else tiny_facts("v3"), tensors, **more
        )
        outputs.append(Stepper(model, context).logits({0: [3, 4, 5], 1: list(range(30))}))
    torch.testing.assert_close(outputs[1], outputs[2], atol=1e-5, rtol=0)
    assert 1e-4 < float((outputs[0] - outputs[2]).square().mean().sqrt()) < 0.2


def linear(
    kind: str,
    shape: LinearShape,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    **options: Any,
) -> Any:
    plan = plan_for(tiny_facts("v2", quantization_config=config))
    scheme = make("quantization", kind, plan, Worker(dtype=torch.float32), **options)
    method, source = scheme.linear(shape), DictSource(tensors)
    for target in reversed(list(method.targets())):
        assert tuple(tensors[target.name].shape) == target.shape
        target.store(source.read(target))
    method.finalize()
    return method


@pytest.mark.parametrize("rows", [(576,), (72, 136), (8, 24, 40)])
@pytest.mark.parametrize(
    ("depth", "group"), [(192, 64), (256, 128), (96, 32), (72, -1), (384, 384)]
)
def test_awq_linear(rows: tuple[int, ...], depth: int, group: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    names, tensors, dense = tuple(f"m.{i}" for i in range(len(rows))), {}, []
    for name, size in zip(names, rows):
        parts, weight = awq_matrix(torch.randn(size, depth, generator=generator), group)
        tensors |= {f"{name}.{leaf}": part for leaf, part in parts.items()}
        dense.append(weight)
    shape = LinearShape(
        "m", names, rows, depth, (0,) * len(rows), 0, tuple((size, depth) for size in rows)
    )
    method = linear("awq", shape, tensors, {**AWQ, "group_size": group})
    torch.testing.assert_close(method.dense(), torch.cat(dense), atol=1e-6, rtol=1e-6)
    x = torch.randn(5, depth, generator=generator)
    torch.testing.assert_close(method.apply(x), x @ torch.cat(dense).t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 72, 2048])
def test_int8_linear(depth: int) -> None:
    """With activations quantised, the integer GEMM is scaled once."""
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(40, depth, generator=generator)
    stored, scales, _ = int8_matrix(weight)
    shape = LinearShape("m", ("m",), (40,), depth, (0,), 0, ((40, depth),), bias=True)
    bias = torch.randn(40, generator=generator)
    method = linear(
        "w8a8_int8",
        shape,
        {"m.weight": stored, "m.weight_scale": scales, "m.bias": bias},
        INT8,
        activations="dynamic",
    )
    x = torch.randn(7, depth, generator=generator)
    codes = torch.stack([torch.round(row / (row.abs().max() / 127)) for row in x])
    exact = (codes.long() @ stored.long().t()).double() * (
        x.abs().amax(1, keepdim=True) / 127
    ) * scales.t() + bias
    torch.testing.assert_close(method.apply(x), exact.float(), atol=1e-4, rtol=1e-4)
    values, factors = int8.quantize_tokens(x)
    torch.testing.assert_close(
        int8.scaled_mm(values, factors, stored, scales[:, 0]) + bias,
        exact.float(),
        atol=1e-4,
        rtol=1e-4,
    )


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


@pytest.mark.parametrize("kind", ["int8", "awq"])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_over_gloo(name: str, kind: str, tmp_path: Path, plugins: PluginSet) -> None:
    changes = (
        {"intermediate_size": 128, "head_dim": 32}
        if name == "llama"
        else {"intermediate_size": 128, "moe_intermediate_size": 64, "qk_rope_head_dim": 16}
    )
    config, quantise = FORMATS[kind]
    stored, _ = quantise(float_tensors(tiny_facts(name, **changes)))
    folder = write_folder(tmp_path, name, stored, config, **changes)
    requests = [submit(1, [5, 6, 7] * 9, 12), submit(2, [9], 5), submit(3, list(range(40)), 20)]
    told = []
    for size in (1, 2):
        collectives = {"use": "gloo", "timeout": 30} if size > 1 else {"use": "local"}
        plan = rank_plan(
            {
                "model": str(folder),
                "device": "cpu",
                "context_length": 256,
                "collectives": collectives,
                "parallel": [{"use": "tensor", "size": size}],
            },
            plugins,
        )
        with RankSet(plan, plugins) as ranks:
            collected = ranks.run(requests)
            ranks.check_idle()
        told.append({id: collected[id].tokens for id in collected})
    assert told[0] == told[1] and [len(told[0][id]) for id in (1, 2, 3)] == [12, 5, 20]


def test_ranks_must_not_cut_groups(tmp_path: Path, plugins: PluginSet) -> None:
    stored, _ = awq_checkpoint(float_tensors(tiny_facts("v2")))
    folder = write_folder(tmp_path, "v2", stored, AWQ)
    with pytest.raises(PlanRefused) as caught:
        rank_plan(
            {
                "model": str(folder),
                "device": "cpu",
                "parallel": [{"use": "tensor", "size": 2}],
                "collectives": {"use": "gloo"},
            },
            plugins,
        )
    reasons = [refusal.reason for refusal in caught.value.refusals]
    assert any(
        "model.layers.1.mlp.experts: moe_intermediate_size of 32 gives each of 2 ranks 16 "
        "channels, which "
        "splits the quantization's blocks of 32" in reason
        for reason in reasons
    ), reasons


# ---- bytes ---------------------------------------------------------------------------------------


def test_the_budget_counts_narrow_weights(tmp_path: Path, plugins: PluginSet) -> None:
    """On a GPU: a byte a weight and four a row; half a byte, and four a group."""
    from glowplug.core.plan.budget.weights import Storage, weights_by_rank

    tensors = float_tensors(tiny_facts("v3"))
    for kind, quantise in (("int8", int8_checkpoint), ("awq", awq_checkpoint)):
        stored, _ = quantise(tensors)
        folder = write_folder(tmp_path / kind, "v3", stored, FORMATS[kind][0])
        facts, elements = plugins.read_model(str(folder))
        counted = {key: count for key, count in declared(facts).items() if key.draft < 0}
        numbers = [
            {
                scale: sum(n for key, n in found.items() if key.scale is scale)
                for scale in (False, True)
            }
            for found in (elements, counted)
        ]
        assert numbers[0] == numbers[1]
        wanted = 0.0
        for name, tensor in tensors.items():
            rows, columns = tensor.shape if tensor.dim() == 2 else (1, len(tensor))
            if f"{name}_scale" in stored:
                wanted += rows * columns + 4 * rows
            elif f"{name.removesuffix('weight')}scales" in stored:
                wanted += rows * columns * 0.5 + 4 * rows * columns // 32
            else:
                wanted += rows * columns * (4 if ".mlp.gate." in name else 2)
            if name.endswith("kv_b_proj.weight"):
                wanted += 2 * rows * columns  # dequantised for absorption
        assert weights_by_rank(elements, facts, {}, 1, Storage(2, True, False), False) == (
            int(wanted),
        )


def test_the_budget_counts_what_is_quantised_while_loading(
    tmp_path: Path, plugins: PluginSet
) -> None:
    """On a GPU all but vocabulary, gate, norms and the latents' projections takes a byte."""
    from glowplug.core.facts.model_facts import DeviceFacts, HardwareFacts

    folder = write_folder(tmp_path, "v3", float_tensors(tiny_facts("v3")))
    card = HardwareFacts(
        devices=(DeviceFacts("H200", 141 << 30, 90),), cpu_cores=8, cpu_memory=32 << 30
    )

    def weights(use: str, device: str, **options: Any) -> int:
        config = {
            "model": str(folder),
            "device": device,
            "dtype": "bfloat16",
            "quantization": {"use": use, **options},
        }
        budget = make_plan(config, plugins=plugins, hardware=card).budget
        return next(line.bytes for line in budget if line.name == "weights")

    plain = weights("none", "cuda")
    assert weights("w8a8_int8", "cuda", activations="none") == plain
    for use in ("w8a8_int8", "block_fp8"):
        narrow = weights(use, "cuda")
        experts, shared, width, heads = 98304, 12288, 18432, 30720
        assert plain - narrow == experts + shared + width + heads - 12288, (
            use
        )  # kv_b_proj is stored in both formats


# ---- refusals ------------------------------------------------------------------------------------


def group_with(part: str, **changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return {**COMPRESSED, "config_groups": {"group_0": {**group, part: {**group[part], **changes}}}}


STATED: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({**AWQ, "bits": 8}, "8-bit weights; awq reads 4-bit weights"),
    "no zeros": ({**AWQ, "zero_point": False}, "zero_point false"),
    "version": ({**AWQ, "version": "gemv"}, "packed in version 'gemv'"),
    "group": ({**AWQ, "group_size": 48}, "groups of 48"),
    "group of words": ({**AWQ, "group_size": "x"}, "groups of x"),
    "asymmetric": (
        group_with("weights", symmetric=False),
        "weights with symmetric False; w8a8_int8 supports True",
    ),
    "four bits": (group_with("weights", num_bits=4), "weights with num_bits 4"),
    "grouped": (group_with("weights", strategy="group"), "weights with strategy 'group'"),
    "static": (
        group_with("input_activations", dynamic=False),
        "input_activations with dynamic False",
    ),
    "a tensor's": (
        group_with("input_activations", strategy="tensor"),
        "input_activations with strategy 'tensor'",
    ),
    "weights only": (
        {
            **COMPRESSED,
            "config_groups": {
                "group_0": {**COMPRESSED["config_groups"]["group_0"], "input_activations": None}
            },
        },
        "leaves input_activations unquantised",
    ),
    "format": ({**COMPRESSED, "format": "pack-quantized"}, "format is 'pack-quantized'"),
    "cache": ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "has KV cache scales"),
    "expression": ({**COMPRESSED, "ignore": ["re:("]}, "which is not a regular expression"),
    "scheme": ({**INT8, "activation_scheme": "static"}, "requires the activation scheme 'static'"),
}


def reasons(folder: Path, plugins: PluginSet, **config: Any) -> list[str]:
    with pytest.raises(PlanRefused) as caught:
        make_plan({"model": str(folder), "device": "cpu", **config}, plugins=plugins)
    assert all(refusal.fix for refusal in caught.value.refusals)
    return [
        refusal.reason for refusal in caught.value.refusals if refusal.field == "quantization.use"
    ]


@pytest.mark.parametrize("case", STATED)
def test_unsupported_config_entries_are_refused(
    case: str, tmp_path: Path, plugins: PluginSet
) -> None:
    config, wanted = STATED[case]
    tensors = float_tensors(tiny_facts("v2"))
    stored, _ = (awq_checkpoint if config["quant_method"] == "awq" else int8_checkpoint)(tensors)
    found = reasons(write_folder(tmp_path, "v2", stored, config), plugins)
    assert any(wanted in reason for reason in found), found


GATE = "model.layers.1.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("kind", "lost", "added", "wanted"),
    [
        ("int8", f"{GATE}.weight_scale", {}, f"1 int8 weights have no weight_scale: {GATE}"),
        ("int8", "", {f"{GATE}.weight_zero_point": torch.zeros(32, 1)}, "weights are asymmetric"),
        ("int8", "", {f"{GATE}.input_scale": torch.ones(1)}, "activation scales are static"),
        (
            "int8",
            f"{GATE}.weight_scale",
            {f"{GATE}.weight_scale": torch.ones(1)},
            "scales of a shape other than one per row",
        ),
        ("awq", f"{GATE}.scales", {}, f"1 int4 weights have no scales: {GATE}"),
        ("awq", f"{GATE}.qzeros", {}, f"1 int4 weights have no qzeros: {GATE}"),
        (
            "awq",
            f"{GATE}.qweight",
            {f"{GATE}.qweight": torch.zeros(48, 4, dtype=torch.int32)},
            f"{GATE} has 48 inputs, not a multiple of the group size 32",
        ),
    ],
)
def test_inconsistent_tensors_are_refused(
    kind: str, lost: str, added: dict[str, Tensor], wanted: str, tmp_path: Path, plugins: PluginSet
) -> None:
    config, quantise = FORMATS[kind]
    stored, _ = quantise(float_tensors(tiny_facts("v2")))
    kept = {name: tensor for name, tensor in stored.items() if name != lost} | added
    found = reasons(write_folder(tmp_path, "v2", kept, config), plugins)
    assert any(wanted in reason for reason in found), found


def test_formats_are_not_mixed_up(tmp_path: Path, plugins: PluginSet) -> None:
    tensors = float_tensors(tiny_facts("v2"))
    folder = write_folder(tmp_path, "v2", tensors, INT8)
    assert any("no weight is int8" in reason for reason in reasons(folder, plugins))
    folder = write_folder(tmp_path, "v2", tensors, AWQ)
    assert any("no tensor is named qweight" in reason for reason in reasons(folder, plugins))
    stored, _ = awq_checkpoint(tensors)
    found = reasons(
        write_folder(tmp_path, "v2", stored, AWQ), plugins, quantization={"use": "w8a8_int8"}
    )
    assert any("already quantized" in reason for reason in found), found
    plain = write_folder(tmp_path / "plain", "v2", tensors)
    found = reasons(plain, plugins, quantization={"use": "awq"})
    assert any("this one is not quantized" in reason for reason in found), found


@pytest.mark.parametrize("kind", ["int8", "compressed", "awq"])
def test_random_weights_of_a_config_alone(kind: str, tmp_path: Path) -> None:
    """Benchmarks without a checkpoint get the tensors that a published one of this config.json
    would hold.
    """
    from tests.support.tiny import write_config

    changes = {"q_lora_rank": 64} if kind == "awq" else {}
    folder = write_config(tmp_path, "v3", quantization_config=FORMATS[kind][0], **changes)
    found, plan = answers(folder, weights={"use": "random"})
    assert len({token for row in found for token in row}) > 3
    assert plan.choice("quantization").name == ("awq" if kind == "awq" else "w8a8_int8")

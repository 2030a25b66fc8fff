"""Block FP8 checkpoints, native and online, with ragged shapes, against a dequantiser written from
the format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.protocols import LinearShape, Quantized, Worker
from glowplug.core.testing.harness.build import (
    DictSource,
    Stepper,
    build_context,
    build_model,
    make,
    plan_for,
)
from tests.models.test_parity_deepseek import V3
from tests.support.parity import YARN, prompts, write

QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
#: 192 and 72 are ragged; the fused q_a (192 rows) with kv_a (136 rows) begins its second part
#: inside a block
RAGGED: dict[str, Any] = dict(
    V3,
    rope_parameters=YARN,
    hidden_size=192,
    q_lora_rank=192,
    kv_lora_rank=128,
    intermediate_size=320,
    moe_intermediate_size=72,
    initializer_range=0.1,
)
LEFT_ALONE = ("embed_tokens", "lm_head", "mlp.gate.", "norm")
DYNAMIC = {"activations": "dynamic"}


def naive_dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    """Dequantise by the definition: value = stored * scale[row // 128, column // 128]."""
    grid = scales.repeat_interleave(128, 0)[: stored.shape[0]].repeat_interleave(128, 1)[
        :, : stored.shape[1]
    ]
    return stored.to(torch.float32) * grid


def naive_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    scales, stored = torch.empty(rows, columns), torch.empty_like(weight)
    for r in range(rows):
        for c in range(columns):
            block = (slice(r * 128, (r + 1) * 128), slice(c * 128, (c + 1) * 128))
            scales[r, c] = weight[block].abs().max() / 448.0
            stored[block] = weight[block] / scales[r, c]
    return stored.to(torch.float8_e4m3fn), scales


def quantize_checkpoint(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the FP8 checkpoint of a float one, and the float checkpoint with its dequantised
    values.
    """
    fp8, dense = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or any(skip in name for skip in LEFT_ALONE):
            fp8[name] = dense[name] = tensor
            continue
        stored, scales = naive_quantize(tensor)
        fp8[name], fp8[name.replace(".weight", ".weight_scale_inv")] = stored, scales
        dense[name] = naive_dequantize(stored, scales)
    return fp8, dense


def facts_of(facts: ModelFacts, tensors: dict[str, Tensor], native: bool) -> ModelFacts:
    listed = {
        name: TensorFact(str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    }
    if not native:
        return replace(facts, tensors=listed)
    return replace(
        facts,
        tensors=listed,
        quant_method="fp8",
        quant_block=(128, 128),
        config={**facts.config, "quantization_config": QUANTIZED},
    )


def logits(
    facts: ModelFacts, tensors: dict[str, Tensor], ids: dict[int, list[int]], **more: Any
) -> Tensor:
    model, context = build_model(facts, tensors, build_context(facts, **more))
    return Stepper(model, context).logits(ids)


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ModelFacts, dict[str, Tensor], Any]:
    folder: Path = tmp_path_factory.mktemp("ragged")
    reference = write(folder, "DeepseekV3ForCausalLM", seed=31, **RAGGED)
    return reference.facts, reference.tensors(), reference.model


def test_weights_equal_the_dequantized_checkpoint(checkpoint: Any) -> None:
    """Without rounded activations the result is exactly the float model of the dequantised weights,
    which transformers runs too.
    """
    facts, tensors, model = checkpoint
    fp8, dense = quantize_checkpoint(tensors)
    ids = dict(enumerate(prompts(3, 1)))
    ours = logits(
        facts_of(facts, fp8, True),
        fp8,
        ids,
        quantization="block_fp8",
        quantization_options={"activations": "none"},
    )
    torch.testing.assert_close(ours, logits(facts, dense, ids), atol=1e-5, rtol=0)
    reference = type(model).from_pretrained(facts.path, state_dict=None).eval()
    load_published(reference, dense)
    with torch.no_grad():
        wanted = torch.cat([reference(torch.tensor([row])).logits[0] for row in ids.values()])
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def load_published(model: Any, tensors: dict[str, Tensor]) -> None:
    """Load published names into transformers' fused experts."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            state[name].copy_(tensor)
            continue
        expert, part, _ = tail.split(".")
        fused = state[f"{head}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][
            int(expert)
        ]
        half = tensor.shape[0]
        {"gate_proj": fused[:half], "up_proj": fused[half:], "down_proj": fused}[part].copy_(tensor)


def rounded(x: Tensor) -> Tensor:
    """Return activations rounded to FP8, a token and 128 channels at a time, by torch's own
    cast.
    """
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)[
        ..., : x.shape[-1]
    ]


def test_every_linear_rounds_its_input(tmp_path: Path) -> None:
    """Transformers runs with the same rounding before each GEMM (except kv_b's, which absorption
    leaves in full precision).

    A value on the edge between two codes may round either way, so a few logits may differ by a
    code's step.
    """
    dense_layers = dict(RAGGED, first_k_dense_replace=3, attention_bias=True)
    reference = write(tmp_path, "DeepseekV3ForCausalLM", seed=32, **dense_layers)
    fp8, dense = quantize_checkpoint(reference.tensors())
    load_published(reference.model, dense)
    for name, module in reference.model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "kv_b_proj")):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    asked = prompts(3, 2)
    ours = logits(
        facts_of(reference.facts, fp8, True),
        fp8,
        dict(enumerate(asked)),
        quantization="block_fp8",
        quantization_options=DYNAMIC,
    )
    wanted = torch.cat([reference.logits(row) for row in asked])
    plain = logits(reference.facts, dense, dict(enumerate(asked)))
    error, effect = (float((other - wanted).square().mean().sqrt()) for other in (ours, plain))
    assert effect > 1e-2, "rounding has no effect here, so the test proves nothing"
    assert error < effect / 20


def test_rounding_changes_little(checkpoint: Any) -> None:
    facts, tensors, _ = checkpoint
    fp8, dense = quantize_checkpoint(tensors)
    ids = dict(enumerate(prompts(3, 2)))
    rounded = logits(
        facts_of(facts, fp8, True), fp8, ids, quantization="block_fp8", quantization_options=DYNAMIC
    )
    difference = rounded - logits(facts, dense, ids)
    assert 1e-3 < float(difference.square().mean().sqrt()) < 0.4


def test_online_quantization_equals_the_native_checkpoint(checkpoint: Any) -> None:
    facts, tensors, _ = checkpoint
    fp8, _ = quantize_checkpoint(tensors)
    ids = dict(enumerate(prompts(3, 3)))
    options = {"quantization_options": {"activations": "none"}}
    native = logits(facts_of(facts, fp8, True), fp8, ids, quantization="block_fp8", **options)
    online = logits(
        facts_of(facts, tensors, False), tensors, ids, quantization="block_fp8", **options
    )
    torch.testing.assert_close(online, native, atol=1e-4, rtol=0)


def linear(
    shape: LinearShape, tensors: dict[str, Tensor], facts: ModelFacts, **options: Any
) -> Any:
    plan = plan_for(facts_of(facts, tensors, True))
    scheme = make("quantization", "block_fp8", plan, Worker(dtype=torch.float32), **options)
    method = scheme.linear(shape)
    source = DictSource(tensors)
    for target in method.targets():
        target.store(source.read(target))
    method.finalize()
    return method


@pytest.mark.parametrize("rows", [(576,), (192, 576), (130, 1, 127)])
@pytest.mark.parametrize("columns", [192, 256, 72])
def test_ragged_fused_linear(rows: tuple[int, ...], columns: int, checkpoint: Any) -> None:
    """V3's kv_a has 576 rows; each fused part keeps the grid of its own matrix."""
    generator = torch.Generator().manual_seed(sum(rows) + columns)
    names = tuple(f"m.{i}" for i in range(len(rows)))
    tensors, wanted = {}, []
    for name, size in zip(names, rows):
        stored, scales = naive_quantize(torch.randn(size, columns, generator=generator))
        tensors |= {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}
        wanted.append(naive_dequantize(stored, scales))
    shape = LinearShape(
        "m", names, rows, columns, (0,) * len(rows), 0, tuple((size, columns) for size in rows)
    )
    method = linear(shape, tensors, checkpoint[0], **DYNAMIC)
    assert torch.equal(method.dense(), torch.cat(wanted))

    x = torch.randn(5, columns, generator=generator) * 10
    exact = rounded(x).double() @ torch.cat(wanted).double().t()
    torch.testing.assert_close(method.apply(x), exact.float(), atol=1e-3, rtol=1e-5)
    assert torch.equal(method.apply(Quantized(rounded(x))), method.apply(x))


@pytest.mark.parametrize(("row", "size"), [(0, 128), (128, 128), (192, 192), (100, 300)])
def test_a_rank_s_slice_begins_anywhere_in_a_block(row: int, size: int, checkpoint: Any) -> None:
    generator = torch.Generator().manual_seed(row)
    stored, scales = naive_quantize(torch.randn(576, 512, generator=generator))
    tensors = {"m.weight": stored, "m.weight_scale_inv": scales}
    shape = LinearShape("m", ("m",), (size,), 256, (row,), 200, ((576, 512),))
    method = linear(shape, tensors, checkpoint[0])
    assert torch.equal(method.dense(), naive_dequantize(stored, scales)[row : row + size, 200:456])


def test_modules_left_alone(checkpoint: Any) -> None:
    """The checkpoint's tensors decide; without tensor facts, the module names that published
    checkpoints leave unquantised.
    """
    facts, tensors, _ = checkpoint
    fp8, _ = quantize_checkpoint(tensors)
    stored = facts_of(facts, fp8, True)
    skipping = replace(
        stored,
        tensors={},
        config={
            **facts.config,
            "quantization_config": {
                **QUANTIZED,
                "modules_to_not_convert": ["model.layers.1.self_attn"],
            },
        },
    )

    def covers(facts: ModelFacts, module: str) -> bool:
        scheme = make("quantization", "block_fp8", plan_for(facts), Worker(dtype=torch.float32))
        return bool(scheme.covers(module, 128, 128))

    for known in (stored, skipping):
        assert covers(known, "model.layers.2.self_attn.o_proj")
        assert covers(known, "model.layers.1.mlp.experts.0.gate_proj")
        assert not covers(known, "lm_head")
        assert not covers(known, "model.layers.1.mlp.gate")
    assert covers(stored, "model.layers.1.self_attn.o_proj")
    assert not covers(skipping, "model.layers.1.self_attn.o_proj")

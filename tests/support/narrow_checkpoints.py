"""Int8 and AWQ checkpoints in their published layouts, quantised and packed here without the
engine's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import model_facts, normalise
from glowplug.core.testing.harness.build import build_context, make, plan_for
from tests.support.tiny import CONFIGS

LEFT_ALONE = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "eh_proj")
INT8 = {"quant_method": "w8a8_int8"}
_EACH = {"num_bits": 8, "type": "int", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EACH, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EACH, "strategy": "token", "dynamic": True},
        }
    },
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
#: sizes that groups of 32 divide
SIZES: dict[str, dict[str, Any]] = {
    "v2": {},
    "v3": {"q_lora_rank": 64},
    "llama": {"tie_word_embeddings": False},
}


def quantised(name: str, tensor: Tensor) -> bool:
    return (
        tensor.dim() == 2
        and name.endswith(".weight")
        and not any(part in name for part in LEFT_ALONE)
    )


def int8_matrix(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 [N, K], scales float32 [N, 1], and the dequantised values; a row at a time."""
    stored, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), 1)
    for row, values in enumerate(weight):
        scales[row] = values.abs().max() / 127
        stored[row] = torch.round(values / scales[row]).to(torch.int8)
    return stored, scales, stored.float() * scales


def int8_checkpoint(
    tensors: Mapping[str, Tensor], flat: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the int8 checkpoint of a float one, and the float checkpoint with its dequantised
    values. With ``flat`` scales are [N], not [N, 1].
    """
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        stored[name] = dense[name] = tensor
        if quantised(name, tensor):
            stored[name], scales, dense[name] = int8_matrix(tensor)
            stored[f"{name}_scale"] = scales[:, 0].contiguous() if flat else scales
    return stored, dense


def awq_words(numbers: Tensor) -> Tensor:
    """Pack int64 [R, N], 0 to 15, into int32 [R, N / 8] as AutoAWQ packs columns."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for nibble in range(8):
        words += numbers[:, order[nibble] :: 8] << 4 * nibble
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq_matrix(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return qweight, qzeros and scales of weight [N, K], and the dequantised values; a group of
    inputs at a time.
    """
    rows, depth = weight.shape
    group = depth if group < 0 else group
    numbers, zeros, scales, dense = [], [], [], []
    for first in range(0, depth, group):
        part = weight[:, first : first + group].double()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=1e-3)
        scale = ((high - low) / 15).half().double()
        zero = torch.round(-low / scale).clamp(0, 15)
        codes = (torch.round(part / scale[:, None]) + zero[:, None]).clamp(0, 15)
        dense.append((codes - zero[:, None]) * scale[:, None])
        numbers.append(codes.t().long()), zeros.append(zero.long()), scales.append(scale.half())
    return (
        {
            "qweight": awq_words(torch.cat(numbers)),
            "qzeros": awq_words(torch.stack(zeros)),
            "scales": torch.stack(scales),
        },
        torch.cat(dense, 1).float(),
    )


def awq_checkpoint(
    tensors: Mapping[str, Tensor], group: int = 32
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the AWQ checkpoint of a float one, and the float checkpoint with its dequantised
    values.
    """
    stored, dense = {}, {}
    for name, tensor in tensors.items():
        if not quantised(name, tensor):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = awq_matrix(tensor, group)
        stored |= {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in parts.items()}
    return stored, dense


def tiny_facts(name: str, **changes: Any) -> ModelFacts:
    return model_facts(normalise({**CONFIGS[name], **SIZES[name], **changes}))


def float_tensors(facts: ModelFacts, seed: int = 2) -> dict[str, Tensor]:
    """Return a random float checkpoint with well-spread logits."""
    context = build_context(facts)
    family = "llama" if facts.architecture == "LlamaForCausalLM" else "deepseek_v3"
    plan = plan_for(facts)
    model = make("model", family, plan, context.worker).build(context)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for target in model.targets():
        value = torch.randn(target.shape, generator=generator)
        tensors[target.name] = (
            value / target.shape[-1] ** 0.5 if value.dim() > 1 else value * 0.1 + 1
        )
    return tensors


def write_folder(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a model folder with weights; ``config`` is its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {**CONFIGS[name], **SIZES[name], **changes}
    if config is not None:
        said["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(said))
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder

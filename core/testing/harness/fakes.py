"""Fakes for tests of the plan zone: a plugin of declarations only, and a model folder.

A plugin author can check a whole configuration around one real component:
``load_plugins(defaults=["glowplug.core.testing.harness.fakes", "my_package.my_plugin"])``.

Imports no torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import create_model

from glowplug.core.facts.inventory import Inventory, Split, TensorSpec
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.weight_classes import VOCAB
from glowplug.core.plugin.component import CONTRACT, Component, Options
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import ModelOffers, Offers, QuantizationOffers
from glowplug.core.plugin.options import OPTION_BASES

#: bytes of a number, by safetensors dtype
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}

#: a DeepSeek-V3 architecture small enough to plan with in microseconds
TINY_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
#: a Llama architecture as small
TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def component(
    slot: str, name: str, offers: Offers, fields: Mapping[str, Any] | None = None, **more: Any
) -> Component:
    """Return a declaration whose factory does not exist.

    The declaration is enough for all that runs before a worker builds the component.
    """
    use: Any = (Literal[name], name)
    options: Any = create_model(
        f"{name.title()}Options",
        __base__=OPTION_BASES.get(slot, Options),
        use=use,
        **dict(fields or {}),
    )
    return Component(
        name=name,
        options=cast(type[Options], options),
        factory="nowhere:Nothing",
        offers=offers,
        summary=f"fake {name}",
        **{"contract": CONTRACT, **more},
    )


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
) -> Path:
    """Write a model folder and return it.

    Args:
        folder: folder to write.
        config: content of config.json.
        tensors: name -> (safetensors dtype, shape); all are zeros in one file. None: no file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    if tensors:
        header: dict[str, Any] = {}
        at = 0
        for name, (dtype, shape) in tensors.items():
            size = DTYPE_BYTES[dtype]
            for count in shape:
                size *= count
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))
    return folder


def fake_inventory(model: ModelFacts) -> Inventory:
    """Return an inventory of a model that consists of its embedding."""
    split = Split("vocab_size", model.vocab_size)
    size = (model.vocab_size, model.hidden_size)
    table = TensorSpec("model.embed_tokens.weight", VOCAB, *size, split=split)
    return Inventory((table,), LayerSizes(width=stated(model, "intermediate_size")))


@hookimpl
def register_models() -> list[Component]:
    """Return two fake model families."""
    return [
        component(
            "model",
            "fake_v3",
            ModelOffers(
                architectures=frozenset({"DeepseekV3ForCausalLM"}),
                kind="mla",
                nextn=True,
                inventory=fake_inventory,
            ),
        ),
        component(
            "model",
            "fake_llama",
            ModelOffers(
                architectures=frozenset({"LlamaForCausalLM"}),
                kind="mha",
                inventory=fake_inventory,
            ),
        ),
    ]


@hookimpl
def register_quantization_schemes() -> list[Component]:
    """Return two fake quantization schemes."""
    return [
        component("quantization", "plain", QuantizationOffers(reads=frozenset({"none"}))),
        component(
            "quantization",
            "blocks",
            QuantizationOffers(reads=frozenset({"fp8"}), block_shape=(128, 128)),
        ),
    ]

"""The metadata of a GGUF file of architecture "llama" as a published ``LlamaForCausalLM``
checkpoint has it.
"""

from __future__ import annotations

from typing import Any

from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

from glowplug.core.api import FactsError, ModelFacts, TensorFact
from glowplug_gguf.header import GgufHeader

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
PLAIN = {GGMLQuantizationType.F16: "float16"}


def llama_facts(header: GgufHeader) -> ModelFacts:
    """Return the facts of the file.

    Raises:
        FactsError: Its architecture, or a feature of it, is not supported.
    """
    config = llama_config(header)
    names = checkpoint_names(header, config["num_hidden_layers"])
    file = header.path.name
    tensors = {
        name: TensorFact(
            PLAIN.get(header.tensors[own].kind, "float32"), header.tensors[own].shape, file
        )
        for name, own in names.items()
    }
    kinds = sorted({tensor.kind.name for tensor in header.tensors.values()})
    return ModelFacts(
        path=str(header.path),
        architecture="LlamaForCausalLM",
        format="gguf",
        kind="mha",
        config=config,
        dtype=config["torch_dtype"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        tensors=tensors,
        chat_template=str(header.metadata.get("tokenizer.chat_template", "")),
        notes=(f"GGUF ({', '.join(kinds)}), dequantised while loading",),
    )


def llama_config(header: GgufHeader) -> dict[str, Any]:
    """Return the file's metadata as in config.json."""
    get = _Getter(header)
    if header.metadata.get("general.architecture") != "llama":
        raise FactsError(
            f"{header.path}: architecture {header.metadata.get('general.architecture')!r} in GGUF "
            "is not supported",
            'use a GGUF file of architecture "llama", or safetensors',
        )
    if header.metadata.get("llama.expert_count"):
        raise FactsError(
            f"{header.path}: routed experts in GGUF are not supported", "use safetensors"
        )
    if "rope_freqs.weight" in header.tensors:
        raise FactsError(
            f"{header.path}: it scales RoPE by a table (rope_freqs), which is not supported",
            "use the model's safetensors, whose config.json states the scaling",
        )
    heads, hidden = get("attention.head_count"), get("embedding_length")
    vocab = (
        header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("rope.dimension_count", hidden // heads),
        "vocab_size": vocab or get("vocab_size"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config


class _Getter:
    """Positive numbers of the ``llama.`` metadata; ``default`` stands for a missing one."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def __call__(self, key: str, default: float | None = None) -> Any:
        value = self.header.metadata.get(f"llama.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise FactsError(
                f"{self.header.path}: llama.{key} is {value!r}, expected a positive number",
                "download the file again",
            )
        return value


def _scaling(header: GgufHeader) -> dict[str, Any] | None:
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        factor = header.metadata.get("llama.rope.scaling.factor", 1.0)
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    raise FactsError(
        f"{header.path}: RoPE scaling {kind!r} in GGUF is not supported",
        "use the model's safetensors",
    )


def checkpoint_names(header: GgufHeader, layers: int) -> dict[str, str]:
    """Return published tensor name -> the file's own name, for every tensor in it."""
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    modules += [f"model.layers.{layer}.{module}" for layer in range(layers) for module in MODULES]
    names: dict[str, str] = {}
    for module in modules:
        for suffix in (".weight", ".bias"):
            own = table.get_name(module + suffix, try_suffixes=(".weight", ".bias"))
            if own in header.tensors:
                names[module + suffix] = own
    unknown = header.tensors.keys() - names.values()
    if unknown:
        raise FactsError(
            f"{header.path}: tensors of unknown meaning: {', '.join(sorted(unknown)[:5])}",
            'use a GGUF file of architecture "llama", or safetensors',
        )
    return names

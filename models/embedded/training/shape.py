"""The embedded model's dimensions, and its config.json.

Every dimension of an FP8 weight is a multiple of 128, so that the weight consists of whole blocks.
Heads, experts and widths can be divided among 2 or 4 ranks.
"""

import math
from dataclasses import dataclass

from glowplug.models.embedded.training.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY

BLOCK = 128


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Dimensions of a DeepSeek-V3 model; the defaults are those of the shipped model."""

    vocab: int = VOCABULARY
    hidden: int = 256
    layers: int = 5
    dense_layers: int = 1
    dense_width: int = 768
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 64
    rope: int = 128
    value: int = 64
    experts: int = 8
    groups: int = 4
    top_groups: int = 2
    top_experts: int = 2
    expert_width: int = 128
    routed_scale: float = 2.5
    context: int = 2048
    trained_context: int = 512
    rope_theta: float = 10000.0
    epsilon: float = 1e-6

    @property
    def yarn_factor(self) -> float:
        return self.context / self.trained_context

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(query width), times the square of YaRN's attention temperature."""
        mscale = 0.1 * math.log(self.yarn_factor) + 1.0 if self.yarn_factor > 1 else 1.0
        return float((self.nope + self.rope) ** -0.5 * mscale * mscale)

    def config(self, *, fp8: bool) -> dict[str, object]:
        """Return the content of config.json in DeepSeek's published form."""
        settings: dict[str, object] = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": self.dense_layers,
            "intermediate_size": self.dense_width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "moe_intermediate_size": self.expert_width,
            "moe_layer_freq": 1,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "n_group": self.groups,
            "topk_group": self.top_groups,
            "num_experts_per_tok": self.top_experts,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": self.routed_scale,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.trained_context,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "rms_norm_eps": self.epsilon,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        if fp8:
            settings["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [BLOCK, BLOCK],
                "activation_scheme": "dynamic",
            }
        return settings

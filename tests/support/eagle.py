"""Random EAGLE heads in their published forms, and the heads in plain torch. float32, seeded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
LLAMA_1 = "LlamaForCausalLMEagle"
LLAMA_3 = "LlamaForCausalLMEagle3"
DEEPSEEK_3 = "Eagle3DeepseekV3ForCausalLM"
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def head_config(target: Mapping[str, Any], architecture: str, **changes: Any) -> dict[str, Any]:
    """Return config.json of a head for a target with this config.json.

    A head of another family than the target's has attention of its own sizes.
    """
    dropped: tuple[str, ...] = (
        "n_routed_experts",
        "num_nextn_predict_layers",
        "tie_word_embeddings",
    )
    own: dict[str, Any] = {}
    if architecture in (LLAMA_1, LLAMA_3) and "kv_lora_rank" in target:
        dropped += LATENT_KEYS
        own = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    elif architecture == DEEPSEEK_3 and "kv_lora_rank" not in target:
        own = dict(zip(LATENT_KEYS, (32, 48, 16, 8, 16), strict=True))
    kept = {key: value for key, value in target.items() if key not in dropped} | own
    return {**kept, "architectures": [architecture], "num_hidden_layers": 1, **changes}


def layer_of(architecture: str) -> str:
    return "layers.0" if architecture == LLAMA_1 else "midlayer"


def head_tensors(config: Mapping[str, Any], features: int = 3, seed: int = 3) -> Tensors:
    """Return random tensors of a head under their published names.

    With ``draft_vocab_size`` the head has a head of its own and a draft vocabulary of random ids.
    """
    generator = torch.Generator().manual_seed(seed)
    architecture = config["architectures"][0]
    hidden = config["hidden_size"]
    width = config["intermediate_size"]
    layer = layer_of(architecture)
    first = architecture == LLAMA_1
    inputs = hidden if first else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden if first else features * hidden),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (width, hidden),
        f"{layer}.mlp.up_proj.weight": (width, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, width),
        **{f"{layer}.self_attn.{k}": v for k, v in _attention_shapes(config, inputs).items()},
    }
    if first:
        shapes["fc.bias"] = (hidden,)
    else:
        for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
            shapes[f"{name}.weight"] = (hidden,)
    size = config.get("draft_vocab_size")
    if size:
        shapes["lm_head.weight"] = (size, hidden)
    found = {}
    for name, shape in shapes.items():
        # a small fc: otherwise the residual stream alone would decide every draft
        scale = 0.02 if name == "fc.weight" else 0.2 if len(shape) > 1 else 0.1
        tensor = torch.randn(shape, generator=generator) * scale
        found[name] = tensor + 1.0 if "norm" in name else tensor
    if size:
        vocab = config["vocab_size"]
        ids = torch.randperm(vocab, generator=generator)[:size].sort().values
        found["d2t"] = ids - torch.arange(size)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def _attention_shapes(config: Mapping[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if not config.get("kv_lora_rank"):
        size = config["head_dim"]
        keys = config["num_key_value_heads"] * size
        return {
            "q_proj.weight": (heads * size, inputs),
            "k_proj.weight": (keys, inputs),
            "v_proj.weight": (keys, inputs),
            "o_proj.weight": (hidden, heads * size),
        }
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value, queries = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    return {
        "q_a_proj.weight": (queries, inputs),
        "q_a_layernorm.weight": (queries,),
        "q_b_proj.weight": (heads * (nope + rope), queries),
        "kv_a_proj_with_mqa.weight": (rank + rope, inputs),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write a head's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def write_random_head(target: Path, architecture: str = DEEPSEEK_3) -> Path:
    """Write config.json of a head for the target in the folder ``target``, beside it; return it.

    Its weights are the engine's random ones (``weights.use = "random"``).
    """
    folder = target.parent / f"{target.name}-head"
    folder.mkdir(exist_ok=True)
    facts = json.loads((target / "config.json").read_text())
    few = facts["num_hidden_layers"] < 3  # the head then reads the embeddings and every layer
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if few else {}
    config = head_config(facts, architecture, **layers)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class PlainHead:
    """A head over a whole sequence, without cache, in plain torch.

    Args:
        config: its config.json.
        tensors: its tensors.
        embedding: the target's embedding [V, D], and ``head``, the target's output head [V, D].
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Tensors, embedding: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", head)
        self.first = config["architectures"][0] == LLAMA_1
        self.layer = layer_of(config["architectures"][0])

    def states(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return the states [T, D] that the head continues.

        Args:
            hidden: the target's final hidden states, [T, D].
            features: the target's features, [T, N].
        """
        return hidden if self.first else features @ self.tensors["fc.weight"].t()

    def run(self, states: Tensor, tokens: list[int]) -> Tensor:
        """Return the outputs [T, D] for states [T, D] and the tokens that follow each."""
        embedded = self.embedding[torch.tensor(tokens)]
        if self.first:
            joined = torch.cat([embedded, states], -1)
            stream = joined @ self.tensors["fc.weight"].t() + self.tensors["fc.bias"]
            normed = stream
        else:
            stream = states
            parts = self._norm(embedded, "input_layernorm"), self._norm(states, "hidden_norm")
            normed = torch.cat(parts, -1)
        stream = stream + self._attention(normed)
        x = self._norm(stream, "post_attention_layernorm")
        gate, up, down = (self._weight(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        return stream + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits over the draft vocabulary of outputs [T, D]."""
        if not self.first:
            outputs = _rms(outputs, self.tensors["norm.weight"], self.config["rms_norm_eps"])
        return outputs @ self.head.t()

    def token(self, output: Tensor) -> int:
        """Return the most likely token, as an id of the target, after an output [D]."""
        best = int(self.logits(output[None])[0].argmax())
        return best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best

    def chain(self, states: Tensor, tokens: list[int], steps: int) -> list[int]:
        """Return ``steps`` drafted tokens after the last of ``tokens``."""
        made: list[int] = []
        for _ in range(steps):
            outputs = self.run(states, tokens + made)
            made.append(self.token(outputs[-1]))
            states = torch.cat([states, outputs[-1:]])
        return made

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.layer}.{name}.weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self._weight(name), self.config["rms_norm_eps"])

    def _attention(self, x: Tensor) -> Tensor:
        latent = self.config.get("kv_lora_rank")
        q, k, v = (self._latent if latent else self._grouped)(x)
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        shares = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", shares, v).flatten(1)
        return out @ self._weight("self_attn.o_proj").t()

    def _grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = self.config["head_dim"]
        q, k, v = (
            (x @ self._weight(f"self_attn.{name}_proj").t()).unflatten(-1, (-1, size))
            for name in "qkv"
        )
        each = q.shape[1] // k.shape[1]
        q, k = (self._rotated(part, interleaved=False) for part in (q, k))
        return q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)

    def _latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, nope = self.config["kv_lora_rank"], self.config["qk_nope_head_dim"]
        heads = self.config["num_attention_heads"]

        def normed(part: Tensor, name: str) -> Tensor:
            return _rms(part, self._weight(f"self_attn.{name}"), 1e-6)

        queries = normed(x @ self._weight("self_attn.q_a_proj").t(), "q_a_layernorm")
        q = (queries @ self._weight("self_attn.q_b_proj").t()).unflatten(-1, (heads, -1))
        both = x @ self._weight("self_attn.kv_a_proj_with_mqa").t()
        latent = normed(both[:, :rank], "kv_a_layernorm")
        kv = (latent @ self._weight("self_attn.kv_b_proj").t()).unflatten(-1, (heads, -1))
        shared = self._rotated(both[:, None, rank:], interleaved=True).expand(-1, heads, -1)
        q = torch.cat([q[..., :nope], self._rotated(q[..., nope:], interleaved=True)], -1)
        return q, torch.cat([kv[..., :nope], shared], -1), kv[..., nope:]

    def _rotated(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate x [T, heads, N]; entry t is at position t + 1, as in a draft's cache."""
        size = x.shape[-1]
        steps = self.config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        turns = torch.outer(torch.arange(len(x)).float() + 1, steps)[:, None]
        if interleaved:
            one, two = x[..., 0::2], x[..., 1::2]
        else:
            one, two = x.chunk(2, -1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def teacher(config: Mapping[str, Any], follower: Tensor, features: int = 3) -> Tensors:
    """Return an EAGLE-3 head that drafts ``follower[t]`` after token t, for ``following_target``.

    Its attention adds nothing. Its feed-forward layer replaces the state of a token, a unit vector,
    by that of the token's follower.
    """
    tensors = head_tensors({**config, "draft_vocab_size": None}, features)
    hidden = config["hidden_size"]
    layer = layer_of(config["architectures"][0])
    unit = torch.eye(hidden)
    tensors["fc.weight"] = torch.cat([unit, torch.zeros(hidden, (features - 1) * hidden)], 1)
    tensors[f"{layer}.self_attn.o_proj.weight"].zero_()
    for name in ("norm", f"{layer}.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    rows = config["intermediate_size"]
    vocab = len(follower)
    step = torch.zeros(hidden, hidden)  # unit vector of a token -> that of its follower
    step[follower, torch.arange(vocab)] = 1.0
    step -= torch.eye(hidden) * (torch.arange(hidden) < vocab)
    open_ = torch.zeros(rows, hidden)
    open_[:hidden] = unit
    normed = torch.tensor(hidden**0.5)  # of a unit vector, at its place
    down = torch.zeros(hidden, rows)
    down[:, :hidden] = step / (F.silu(normed) * normed)
    tensors[f"{layer}.mlp.gate_proj.weight"] = open_
    tensors[f"{layer}.mlp.up_proj.weight"] = open_.clone()
    tensors[f"{layer}.mlp.down_proj.weight"] = down
    return tensors


def following_target(tensors: Tensors, follower: Tensor) -> Tensors:
    """Return a target's tensors, changed so that ``follower[t]`` comes after token t."""
    changed = dict(tensors)
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    unit = torch.eye(vocab, hidden)
    changed["model.embed_tokens.weight"] = unit
    head = torch.zeros(vocab, hidden)
    head[follower] = unit
    changed["lm_head.weight"] = head
    changed["model.norm.weight"] = torch.ones(hidden)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            changed[name] = torch.zeros_like(tensor)
    return changed

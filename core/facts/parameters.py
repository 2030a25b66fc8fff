"""Parameter counts from config.json, for plans without tensor headers. Plan zone: no torch.

The counts have the form of ``weight_classes.tally``. They use published keys only (MLA, MoE, GQA)
and the tensor names of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.stored_formats import stored_matrix
from glowplug.core.facts.weight_classes import TIED, VOCAB, WHOLE, WeightKind, role_of

#: linear layers that published quantised checkpoints do not quantise
LEFT_ALONE = frozenset({"eh_proj", "gate"})


class Tensor(NamedTuple):
    """A matrix [rows, columns], or a vector [rows] if ``columns`` is 0."""

    name: str
    rows: int
    columns: int = 0


def count_parameters(model: ModelFacts) -> int:
    """Return the number of parameters, without next-token layers and scales."""
    return sum(
        count for kind, count in count_elements(model).items() if kind.draft < 0 and not kind.scale
    )


def count_elements(model: ModelFacts) -> dict[WeightKind, int]:
    """Return the element counts by kind, including the first next-token layer if there is one.

    The next-token layer is assumed to share the target's embedding and head, as it does if a
    checkpoint has none for it.
    """
    found: dict[WeightKind, int] = {}
    tied = bool(model.config.get("tie_word_embeddings"))
    _add(
        found,
        WeightKind(TIED if tied else VOCAB, model.dtype),
        model.vocab_size * model.hidden_size * (1 if tied else 2),
    )
    _add(found, WeightKind(WHOLE, model.dtype), model.hidden_size)
    mixtures = sum(is_moe_layer(model, layer) for layer in range(model.num_layers))
    for moe, times in ((True, mixtures), (False, model.num_layers - mixtures)):
        if times:
            _layer(found, model, moe, times, -1)
    if model.nextn_layers:
        _layer(found, model, is_moe_layer(model, model.num_layers), 1, 0)
        _add(
            found,
            WeightKind(WHOLE, model.dtype, draft=0),
            model.hidden_size * (3 + 2 * model.hidden_size),
        )
    return found


def is_moe_layer(model: ModelFacts, layer: int) -> bool:
    """Return whether layer number ``layer`` routes to experts."""
    if not model.n_routed_experts:
        return False
    return (
        layer >= stated(model, "first_k_dense_replace")
        and layer % max(1, stated(model, "moe_layer_freq", 1)) == 0
    )


def stated(model: ModelFacts, key: str, default: int = 0) -> int:
    """Return a whole number of config.json, or ``default`` if ``key`` does not hold one."""
    value = model.config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _add(found: dict[WeightKind, int], kind: WeightKind, count: int) -> None:
    found[kind] = found.get(kind, 0) + count


def _layer(
    found: dict[WeightKind, int], model: ModelFacts, moe: bool, times: int, draft: int
) -> None:
    """Count ``times`` equal layers.

    Args:
        found: counts by kind, which are added to.
        moe: the layers route to experts.
        draft: value of ``WeightKind.draft``.
    """
    tensors = [*_norms(model), *_attention(model)]
    if moe:
        tensors += [Tensor("mlp.gate.weight", model.n_routed_experts, model.hidden_size)]
        if model.config.get("topk_method") == "noaux_tc":
            tensors.append(Tensor("mlp.gate.e_score_correction_bias", model.n_routed_experts))
        shared = stated(model, "n_shared_experts") * stated(model, "moe_intermediate_size")
        tensors += _mlp(model, "mlp.shared_experts", shared) if shared else []
        for tensor in _mlp(model, "mlp.experts.0", stated(model, "moe_intermediate_size")):
            _count(found, model, tensor, times * model.n_routed_experts, draft)
    else:
        tensors += _mlp(model, "mlp", stated(model, "intermediate_size", 4 * model.hidden_size))
    for tensor in tensors:
        _count(found, model, tensor, times, draft)


def _count(
    found: dict[WeightKind, int], model: ModelFacts, tensor: Tensor, times: int, draft: int
) -> None:
    """Count a tensor that occurs ``times`` times, with its scales."""
    role = role_of(tensor.name)
    if not tensor.columns or tensor.name.rsplit(".", 2)[-2] in LEFT_ALONE:
        _add(
            found,
            WeightKind(role, model.dtype, False, draft),
            tensor.rows * (tensor.columns or 1) * times,
        )
        return
    for stored in stored_matrix(model, tensor.rows, tensor.columns):
        _add(found, WeightKind(role, stored.dtype, stored.scale, draft), stored.numbers * times)


def _norms(model: ModelFacts) -> Iterator[Tensor]:
    yield Tensor("input_layernorm.weight", model.hidden_size)
    yield Tensor("post_attention_layernorm.weight", model.hidden_size)


def _attention(model: ModelFacts) -> Iterator[Tensor]:
    hidden = model.hidden_size
    heads = model.num_heads
    dim = model.head_dim
    if model.kind == "mha":
        yield Tensor("self_attn.q_proj.weight", heads * dim, hidden)
        yield Tensor("self_attn.k_proj.weight", model.num_kv_heads * dim, hidden)
        yield Tensor("self_attn.v_proj.weight", model.num_kv_heads * dim, hidden)
        yield Tensor("self_attn.o_proj.weight", hidden, heads * dim)
        return
    q_rank = stated(model, "q_lora_rank")
    v_dim = stated(model, "v_head_dim", dim)
    nope = dim - model.qk_rope_head_dim
    if q_rank:
        yield Tensor("self_attn.q_a_proj.weight", q_rank, hidden)
        yield Tensor("self_attn.q_a_layernorm.weight", q_rank)
        yield Tensor("self_attn.q_b_proj.weight", heads * dim, q_rank)
    else:
        yield Tensor("self_attn.q_proj.weight", heads * dim, hidden)
    yield Tensor(
        "self_attn.kv_a_proj_with_mqa.weight", model.kv_lora_rank + model.qk_rope_head_dim, hidden
    )
    yield Tensor("self_attn.kv_a_layernorm.weight", model.kv_lora_rank)
    yield Tensor("self_attn.kv_b_proj.weight", heads * (nope + v_dim), model.kv_lora_rank)
    yield Tensor("self_attn.o_proj.weight", hidden, heads * v_dim)


def _mlp(model: ModelFacts, name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.gate_proj.weight", width, model.hidden_size)
    yield Tensor(f"{name}.up_proj.weight", width, model.hidden_size)
    yield Tensor(f"{name}.down_proj.weight", model.hidden_size, width)

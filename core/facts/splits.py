"""The dimensions of a model that are split over ranks, and a check that they divide evenly.

The first layer of a kind represents all layers of this kind. Names and roles are those that layers
pass to ``ParallelStrategy.shard``. Plan zone: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from glowplug.core.facts.mesh import axis_size, deal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.parameters import is_moe_layer

#: role -> mesh axis that splits it after all strategies were applied
AXES = {
    "column": "tp",
    "vocab": "attn_tp",
    "heads": "attn_tp",
    "kv_heads": "attn_tp",
    "expert_width": "moe_tp",
}


class AxisSplit(NamedTuple):
    """A dimension of a weight that is split over the ranks of a mesh axis.

    Attributes:
        layer: module path of the layer, the first of its kind.
        dimension: name of the dimension, the one in config.json if it has one.
        full: size of the dimension in units.
        role: role in ``ParallelStrategy.shard``. There may be fewer units of "kv_heads" than ranks;
            each is then held by several ranks.
        axis: mesh axis that splits the dimension.
        unit: elements per unit.
        quantized: block formats quantise this weight, so it can be split only at multiples of their
            block.
    """

    layer: str
    dimension: str
    full: int
    role: str
    axis: str
    unit: int = 1
    quantized: bool = True

    def parts(self, mesh: Mapping[str, int]) -> int:
        """Return the number of ranks that split the dimension."""
        return axis_size(self.axis, mesh)

    def divides(self, parts: int, block: int) -> bool:
        """Return whether ``parts`` ranks can split the dimension.

        Args:
            block: block size of the quantization; 1 for none.
        """
        if self.role == "vocab":
            return deal(self.full, parts, parts - 1)[1] > 0
        if self.role == "kv_heads" and self.full < parts:
            return parts % self.full == 0
        whole = block // math.gcd(block, self.unit) if self.quantized else 1
        return self.full % parts == 0 and (parts == 1 or self.full // parts % whole == 0)


def splits(model: ModelFacts, mesh: Mapping[str, int]) -> Iterator[AxisSplit]:
    """Yield each kind of split dimension of ``model``.

    ``mesh`` decides the axes: with an exchange of tokens between experts ("ep"), the shared expert
    is split within a dp group.
    """
    yield from _attention(model)
    layers = range(model.num_layers + model.nextn_layers)
    dense = next((layer for layer in layers if not is_moe_layer(model, layer)), None)
    if dense is not None:
        yield AxisSplit(
            f"model.layers.{dense}.mlp",
            "intermediate_size",
            _stated(model, "intermediate_size"),
            "column",
            "tp",
        )
    moe = next((layer for layer in layers if is_moe_layer(model, layer)), None)
    if moe is not None:
        width = _stated(model, "moe_intermediate_size")
        shared = _stated(model, "n_shared_experts")
        yield AxisSplit(
            f"model.layers.{moe}.mlp.experts",
            "moe_intermediate_size",
            width,
            "expert_width",
            "moe_tp",
        )
        if shared:
            yield AxisSplit(
                f"model.layers.{moe}.mlp.shared_experts",
                "n_shared_experts x moe_intermediate_size",
                shared * width,
                "column",
                "attn_tp" if "ep" in mesh else "tp",
            )
    yield AxisSplit(
        "model.embed_tokens", "vocab_size", model.vocab_size, "vocab", "attn_tp", quantized=False
    )


def _attention(model: ModelFacts) -> Iterator[AxisSplit]:
    name = "model.layers.0.self_attn"
    heads = "num_attention_heads"
    axis = "attn_tp"
    if model.kind == "mha":
        for part, role in (("q_proj", "heads"), ("o_proj", "row")):
            yield AxisSplit(f"{name}.{part}", heads, model.num_heads, role, axis, model.head_dim)
        yield AxisSplit(
            f"{name}.k_proj",
            "num_key_value_heads",
            model.num_kv_heads,
            "kv_heads",
            axis,
            model.head_dim,
        )
        return
    query = model.head_dim
    value = _stated(model, "v_head_dim") or model.head_dim
    up = query - model.qk_rope_head_dim + value
    first = "q_b_proj" if _stated(model, "q_lora_rank") else "q_proj"
    yield AxisSplit(f"{name}.{first}", heads, model.num_heads, "heads", axis, query)
    yield AxisSplit(f"{name}.kv_b_proj", heads, model.num_heads, "heads", axis, up)
    yield AxisSplit(f"{name}.o_proj", heads, model.num_heads, "row", axis, value)


def uneven(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[AxisSplit]:
    """Return the splits that ``mesh`` does not divide, the first one of each dimension.

    Raises:
        ValueError: the axes of ``mesh`` do not divide its tp ranks.
    """
    found: dict[str, AxisSplit] = {}
    for split in splits(model, mesh):
        if not split.divides(split.parts(mesh), block):
            found.setdefault(split.dimension, split)
    return list(found.values())


def fitting_sizes(model: ModelFacts, mesh: Mapping[str, int], block: int = 1) -> list[int]:
    """Return the sizes of tp, in descending order from the mesh's, that divide all dimensions.

    The other axes of the mesh stay as they are.
    """
    sizes = range(mesh.get("tp", 1), 0, -1)
    return [size for size in sizes if _fits(model, {**mesh, "tp": size}, block)]


def _fits(model: ModelFacts, mesh: Mapping[str, int], block: int) -> bool:
    try:
        return not uneven(model, mesh, block)
    except ValueError:
        return False


def _stated(model: ModelFacts, key: str) -> int:
    value = model.config.get(key)
    return value if isinstance(value, int) else 0

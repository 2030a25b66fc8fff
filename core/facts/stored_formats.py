"""Tensors that a quantised checkpoint stores for one weight matrix. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.weight_classes import INT4, SCALE

FP8 = "float8_e4m3fn"  #: dtype of FP8 weights
#: values of ``quant_method`` for int8 weights with one scale per row
INT8_METHODS = frozenset({"w8a8_int8", "compressed-tensors"})


class StoredTensor(NamedTuple):
    """One tensor stored for a weight matrix.

    Attributes:
        dtype: dtype, as in ``Kind``.
        scale: it holds scales or zero points, as in ``Kind``.
        numbers: number of elements.
    """

    dtype: str
    scale: bool
    numbers: int


def quantization_config(model: ModelFacts) -> Mapping[str, Any]:
    """Return ``quantization_config`` of config.json; empty if it has none."""
    stated = model.config.get("quantization_config")
    return stated if isinstance(stated, dict) else {}


def awq_group(model: ModelFacts) -> int:
    """Return how many inputs share a scale in an AWQ checkpoint.

    The result is -1 if all inputs of a row share one, and 0 if config.json does not state a whole
    number.
    """
    stated = quantization_config(model)
    group = stated.get("group_size", stated.get("q_group_size", 128))
    return group if isinstance(group, int) and not isinstance(group, bool) else 0


def stored_matrix(model: ModelFacts, rows: int, columns: int) -> list[StoredTensor]:
    """Return the tensors stored for a quantised weight [rows, columns]: values, scales, zeros."""
    whole = rows * columns
    if model.quant_method == "fp8" and model.quant_block is not None:
        blocks = -(-rows // model.quant_block[0]) * -(-columns // model.quant_block[1])
        return [StoredTensor(FP8, False, whole), StoredTensor(SCALE, True, blocks)]
    if model.quant_method in INT8_METHODS:
        return [StoredTensor("int8", False, whole), StoredTensor(SCALE, True, rows)]
    if model.quant_method == "awq":
        group = awq_group(model)
        grid = rows * (-(-columns // group) if group > 0 else 1)
        return [
            StoredTensor(INT4, False, whole),
            StoredTensor(INT4, True, grid),
            StoredTensor("float16", True, grid),
        ]
    return [StoredTensor(model.dtype, False, whole)]

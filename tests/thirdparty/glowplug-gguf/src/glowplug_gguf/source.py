"""The runtime of the ``gguf`` weight source: rows are dequantised as they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tqdm import tqdm

from glowplug.core.api import EnginePlan, ModelFacts, TensorFact, WeightError
from glowplug.core.protocols import WeightTarget, Worker
from glowplug_gguf.header import GgufHeader, GgufTensor, read_gguf
from glowplug_gguf.llama import checkpoint_names, llama_facts
from glowplug_gguf.plugin import GgufOptions

PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


class GgufSource:
    """Serves the tensors of one GGUF file under their published names, in float32 or float16."""

    def __init__(self, options: GgufOptions, plan: EnginePlan, worker: Worker) -> None:
        self._progress = worker.rank == 0 and sys.stderr.isatty()

    def open(self, facts: ModelFacts) -> None:
        self._header: GgufHeader = read_gguf(Path(facts.path))
        found = llama_facts(self._header)
        if found.tensors != facts.tensors:
            raise WeightError(f"{facts.path}: the file changed since the plan was made")
        self._entries = found.tensors
        self._names = checkpoint_names(self._header, facts.num_layers)
        self._heads = {"q_proj": facts.num_heads, "k_proj": facts.num_kv_heads}
        self._data = np.memmap(self._header.path, mode="r")
        self._bar: tqdm[Any] = tqdm(
            total=len(self._entries),
            desc="Loading weights",
            unit="tensor",
            disable=not self._progress,
        )

    def entries(self) -> Mapping[str, TensorFact]:
        return self._entries

    def read(self, target: WeightTarget) -> torch.Tensor:
        if target.name not in self._names:
            raise WeightError(f"{self._header.path}: the file has no tensor {target.name!r}")
        tensor = self._header.tensors[self._names[target.name]]
        if tensor.shape != tuple(target.shape):
            raise WeightError(
                f"{self._header.path}: tensor {target.name!r} has shape {list(tensor.shape)}, the "
                f"model needs {list(target.shape)}"
            )
        heads = self._heads.get(target.name.split(".")[-2])
        value = self._rows(tensor, slice(None) if heads else target.index[0])
        if heads:
            value = unpermute(value, heads)[target.index[0]]
        self._bar.update()
        return torch.from_numpy(np.ascontiguousarray(value[(slice(None), *target.index[1:])]))

    def close(self) -> None:
        self._bar.close()
        del self._data

    def _rows(self, tensor: GgufTensor, rows: slice) -> np.ndarray[Any, Any]:
        """Return rows of a tensor as float32 (float16 for an F16 tensor); other rows are not
        read.
        """
        raw = self._data[tensor.start : tensor.start + tensor.size].reshape(tensor.shape[0], -1)[
            rows
        ]
        if tensor.kind in PLAIN:
            value: np.ndarray[Any, Any] = np.ascontiguousarray(raw).view(PLAIN[tensor.kind])
        else:
            value = dequantize(np.ascontiguousarray(raw), tensor.kind)
        return value.reshape(-1, *tensor.shape[1:]).copy()


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the row order that llama.cpp gives Q and K: from pairs side by side to the two halves of
    each head.
    """
    rows = weight.shape[0]
    paired = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)

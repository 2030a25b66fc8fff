"""The runtime of the ``safetensors`` weight source."""
from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from glowplug.core.errors import WeightError
from glowplug.core.facts import ModelFacts, TensorFact
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import WeightTarget, Worker
from glowplug.core.safetensors_header import read_tensors
from glowplug.plugins.weights.safetensors import SafetensorsOptions


class SafetensorsSource:
    """Reads slices of the tensors of a model folder. Files stay mapped until ``close``."""

    def __init__(self, options: SafetensorsOptions, plan: EnginePlan, worker: Worker) -> None:
        self._progress = options.progress and worker.rank == 0 and sys.stderr.isatty()
        self._folder = Path()
        self._entries: dict[str, TensorFact] = {}
        self._files: dict[str, Any] = {}
        self._bar: tqdm[Any] | None = None

    def open(self, facts: ModelFacts) -> None:
        self._folder = Path(facts.path)
        self._entries = read_tensors(self._folder)
        if not self._entries:
            raise WeightError(f"{self._folder}: no safetensors weights were found")
        if facts.tensors:
            self._compare(facts.tensors)
        self._bar = tqdm(total=len(self._entries), desc="Loading weights", unit="tensor", disable=not self._progress)

    def entries(self) -> Mapping[str, TensorFact]:
        return self._entries

    def read(self, target: WeightTarget) -> Tensor:
        fact = self._entries.get(target.name)
        if fact is None:
            raise WeightError(f"{self._folder}: the checkpoint has no tensor {target.name!r}")
        if fact.shape != tuple(target.shape):
            raise WeightError(f"{self._folder / fact.file}: tensor {target.name!r} has shape {list(fact.shape)}, "
                              f"the model needs {list(target.shape)}")
        try:
            value: Tensor = self._read(self._mapped(fact.file), target)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self._folder / fact.file}: tensor {target.name!r} cannot be read: {error}") from None
        if self._bar is not None:
            self._bar.update()
        return value

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._files.clear()

    @staticmethod
    def _read(file: Any, target: WeightTarget) -> Tensor:
        whole = all(cut.indices(size) == (0, size, 1) for cut, size in zip(target.index, target.shape, strict=True))
        value: Tensor = file.get_tensor(target.name) if whole else file.get_slice(target.name)[target.index]
        return value

    def _mapped(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt", device="cpu")
        return self._files[file]

    def _compare(self, planned: Mapping[str, TensorFact]) -> None:
        """The files must still hold what the plan was made for."""
        for name in planned.keys() | self._entries.keys():
            if planned.get(name) != self._entries.get(name):
                raise WeightError(f"{self._folder}: tensor {name!r} changed since the plan was made: it was "
                                  f"{_shown(planned.get(name))}, it is {_shown(self._entries.get(name))}")


def _shown(fact: TensorFact | None) -> str:
    return "absent" if fact is None else f"{fact.dtype} {list(fact.shape)} in {fact.file}"

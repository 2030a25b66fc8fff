"""Runtime of the ``safetensors`` weight source."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.facts.safetensors_header import read_places, read_tensors
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import WeightTarget, Worker
from glowplug.plugins.weights.cut import Cut
from glowplug.plugins.weights.direct_read import THREADS, Columns, DirectReader, Span, blocks_of
from glowplug.plugins.weights.safetensors import SafetensorsOptions

#: fewest bytes that a cut to columns must save while reading; smaller tensors are read whole, so
#: that they share blocks with their neighbours
CUT_BYTES = 64 << 10

Wanted = tuple[WeightTarget, TensorFact]


class SafetensorsSource:
    """``WeightSource`` of the tensors in a model folder. Files stay mapped until ``close``.

    For a CUDA device ``stream`` reads many tensors at a time, across files.
    """

    def __init__(self, options: SafetensorsOptions, plan: EnginePlan, worker: Worker) -> None:
        self._progress = options.progress and worker.rank == 0 and sys.stderr.isatty()
        self._device = worker.device
        self._threads = _threads(plan) if worker.device.startswith("cuda") else 1
        self._folder = Path()
        self._entries: dict[str, TensorFact] = {}
        self._files: dict[str, Any] = {}
        self._bar: tqdm[Any] | None = None

    def open(self, facts: ModelFacts) -> None:
        self._folder = Path(facts.path)
        self._entries = read_tensors(self._folder)
        if not self._entries:
            raise WeightError(f"{self._folder}: no safetensors weights found")
        if facts.tensors:
            self._compare(facts.tensors)
        self._bar = tqdm(
            total=len(self._entries),
            desc="Loading weights",
            unit="tensor",
            disable=not self._progress,
        )

    def entries(self) -> Mapping[str, TensorFact]:
        return self._entries

    def read(self, target: WeightTarget) -> Tensor:
        fact = self._fact(target)
        try:
            value: Tensor = self._read(self._mapped(fact.file), target)
        except (SafetensorError, OSError) as error:
            raise WeightError(
                f"{self._folder / fact.file}: tensor {target.name!r} cannot be read: {error}"
            ) from None
        self._count()
        return value

    def stream(self, targets: Sequence[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        if self._device.startswith("cuda"):
            yield from self.through(DirectReader(self._device, self._threads), targets)
            return
        for target in targets:
            yield target, self.read(target)

    def through(
        self, reader: DirectReader[Wanted], targets: Sequence[WeightTarget]
    ) -> Iterator[tuple[WeightTarget, Tensor]]:
        """Yield each target with its tensor, read by ``reader``; finally close ``reader``."""
        try:
            for span, held in reader.read(blocks_of(self._spans(targets, reader.piece))):
                target, fact = span.key
                yield target, slice_of(held, fact, target, span.columns is not None)
                self._count()
        finally:
            reader.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._files.clear()

    def _count(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def _fact(self, target: WeightTarget) -> TensorFact:
        fact = self._entries.get(target.name)
        if fact is None:
            raise WeightError(f"{self._folder}: the checkpoint has no tensor {target.name!r}")
        if fact.shape != tuple(target.shape):
            raise WeightError(
                f"{self._folder / fact.file}: tensor {target.name!r} has shape {list(fact.shape)}, "
                f"the model needs {list(target.shape)}"
            )
        return fact

    def _spans(self, targets: Sequence[WeightTarget], longest: int) -> list[Span[Wanted]]:
        """Return the byte range of each target's rows in its file, and the columns to keep.

        Args:
            targets: the targets.
            longest: bytes of the longest row that can be cut while reading.
        """
        facts = {target.name: self._fact(target) for target in targets}
        places = {
            file: read_places(self._folder / file)
            for file in sorted({fact.file for fact in facts.values()})
        }
        spans = []
        for target in targets:
            fact, first, end = places[facts[target.name].file][target.name]
            begin, rows, each = _rows(fact, target, end - first)
            columns = _columns(fact, target, each)
            if columns and (each > longest or rows * (each - columns.width) < CUT_BYTES):
                columns = None
            path = self._folder / fact.file
            spans.append(Span((target, fact), path, first + begin * each, rows * each, columns))
        return spans

    @staticmethod
    def _read(file: Any, target: WeightTarget) -> Tensor:
        whole = all(
            cut.indices(size) == (0, size, 1)
            for cut, size in zip(target.index, target.shape, strict=True)
        )
        value: Tensor = (
            file.get_tensor(target.name) if whole else file.get_slice(target.name)[target.index]
        )
        return value

    def _mapped(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt", device="cpu")
        return self._files[file]

    def _compare(self, planned: Mapping[str, TensorFact]) -> None:
        """Raise ``WeightError`` if the tensors in the files differ from ``planned``."""
        for name in planned.keys() | self._entries.keys():
            if planned.get(name) != self._entries.get(name):
                raise WeightError(
                    f"{self._folder}: tensor {name!r} changed since the plan was made: it was "
                    f"{_shown(planned.get(name))}, it is {_shown(self._entries.get(name))}"
                )


def _shown(fact: TensorFact | None) -> str:
    return "absent" if fact is None else f"{fact.dtype} {list(fact.shape)} in {fact.file}"


def slice_of(held: Tensor, fact: TensorFact, target: WeightTarget, packed: bool) -> Tensor:
    """Return the slice of a tensor that ``target`` describes, from bytes of its rows.

    Args:
        held: the bytes of the slice's rows, uint8.
        fact: dtype and shape of the whole tensor.
        target: the slice.
        packed: True: ``held`` has the columns of the slice only; False: whole rows.
    """
    dtype = getattr(torch, fact.dtype)
    if held.storage_offset() % dtype.itemsize:
        held = held.clone()  # unaligned, after a tensor of an odd number of bytes
    if not fact.shape:
        return held.view(dtype).view(())
    cut = Cut.of(fact.shape, target.index)
    if packed:
        return held.view(dtype).view(cut.shape)
    return held.view(dtype).view(cut.shape[0], *fact.shape[1:])[(slice(None), *target.index[1:])]


def _columns(fact: TensorFact, target: WeightTarget, each: int) -> Columns | None:
    """Return the columns of the slice of ``target``; None: whole rows, or no range of columns.

    ``each``: bytes per row.
    """
    if len(fact.shape) < 2 or not each:
        return None
    cut = Cut.of(fact.shape[1:], target.index[1:])
    size = each // math.prod(fact.shape[1:])
    if cut.outer or not cut.width or cut.width * size == each:
        return None
    return Columns(each, cut.first * size, cut.width * size)


def _rows(fact: TensorFact, target: WeightTarget, size: int) -> tuple[int, int, int]:
    """Return the first row, number of rows and bytes per row of the slice of ``target``.

    A scalar counts as one row. ``size``: bytes per element.
    """
    if not fact.shape or not fact.shape[0]:
        return 0, 1, size
    begin, end, _ = target.index[0].indices(fact.shape[0])
    return begin, end - begin, size // fact.shape[0]


def _threads(plan: EnginePlan) -> int:
    """Return the number of reading threads: this rank's share of the cores, at most ``THREADS``."""
    return max(1, min(THREADS, plan.facts.hardware.cpu_cores * plan.hosts // plan.ranks))

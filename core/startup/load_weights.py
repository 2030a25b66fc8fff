"""Fills a model from a weight source: every target exactly once, every tensor of the checkpoint
accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.protocols import Model, StreamingSource, WeightSource, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]  #: tensors done, tensors in all
SHOWN = 8  #: names listed in an error
FLOATING = frozenset(
    {"float64", "float32", "float16", "bfloat16"}
)  #: what a target of no fixed dtype can be made from


def load_model(
    model: Model, source: WeightSource, facts: ModelFacts, progress: Progress | None = None
) -> int:
    """Match the model's targets with the source's tensors, store each, and finalize the model.
    Returns the bytes read.

    A source without entries is synthetic and is asked for every target that is not optional.
    WeightError lists what is missing, unexpected or of another shape or dtype; nothing is read
    before all of them agree.
    """
    targets = _by_name(model.targets())
    entries = source.entries()
    if entries:
        _check(targets, entries, model, facts)
        wanted = [target for name, target in targets.items() if name in entries]
    else:
        wanted = [target for target in targets.values() if not target.optional]
    waiting = {target.name for target in wanted}
    size = 0
    for target, value in _values(source, wanted):
        waiting.remove(target.name)
        target.store(value)
        size += value.nbytes
        if progress is not None:
            progress(len(wanted) - len(waiting), len(wanted))
    if waiting:
        raise WeightError(f"the source left out {len(waiting)} tensors: {_listed(sorted(waiting))}")
    model.finalize()
    return size


def _values(
    source: WeightSource, wanted: list[WeightTarget]
) -> Iterator[tuple[WeightTarget, Tensor]]:
    if isinstance(source, StreamingSource):
        yield from source.stream(wanted)
        return
    for target in wanted:
        yield target, source.read(target)


def _by_name(targets: Iterable[WeightTarget]) -> dict[str, WeightTarget]:
    found: dict[str, WeightTarget] = {}
    for target in targets:
        if target.name in found:
            raise WeightError(f"the model asks twice for the tensor {target.name}")
        found[target.name] = target
    return found


def _check(
    targets: dict[str, WeightTarget],
    entries: Mapping[str, TensorFact],
    model: Model,
    facts: ModelFacts,
) -> None:
    where = facts.path or "the checkpoint"
    problems = []
    missing = [
        name for name, target in targets.items() if name not in entries and not target.optional
    ]
    if missing:
        problems.append(f"{len(missing)} missing: {_listed(missing)}")
    unexpected = [name for name in entries if name not in targets and not model.ignored(name)]
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {_listed(unexpected)}")
    found = [(name, target, entries[name]) for name, target in targets.items() if name in entries]
    wrong = [
        f"{name} is {_size(entry.shape)}, {facts.architecture} needs {_size(target.shape)}"
        for name, target, entry in found
        if tuple(entry.shape) != tuple(target.shape)
    ]
    if wrong:
        problems.append(f"{len(wrong)} of the wrong shape: {_listed(wrong)}")
    typed = [
        f"{name} is {entry.dtype}, {facts.architecture} needs {target.dtype or 'a floating-point type'}"
        for name, target, entry in found
        if not _readable(entry.dtype, target.dtype)
    ]
    if typed:
        problems.append(f"{len(typed)} of the wrong dtype: {_listed(typed)}")
    if problems:
        raise WeightError(
            f"{where}: tensors do not fit config.json: {'; '.join(problems)}. Fix: download the files "
            "again, config.json with them"
        )


def _readable(stored: str, fixed: str | None) -> bool:
    """8-bit floats mean nothing without their scales, so only a format that fixes them may ask for
    them.
    """
    return stored == fixed if fixed is not None else stored in FLOATING


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _size(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"

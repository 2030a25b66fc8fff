"""Loading of a model from a weight source.

Every target is filled exactly once, and every tensor of the checkpoint is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.protocols import Model, StreamingSource, WeightSource, WeightTarget

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]  #: callback: tensors done, all tensors
NAMES_SHOWN = 8  #: most names listed in an error
#: stored dtypes that a target without a fixed dtype can be loaded from
FLOATING_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


def load_model(
    model: Model, source: WeightSource, facts: ModelFacts, progress: Progress | None = None
) -> int:
    """Match the model's targets with the source's tensors, store each, and finalize the model.

    A source without entries is synthetic: it provides every target that is not optional. Nothing is
    read before all names, shapes and dtypes agree.

    Args:
        progress: callback for (tensors done, all tensors).

    Returns:
        The number of bytes read.

    Raises:
        WeightError: the message lists tensors that are missing, unexpected, or of another shape or
            dtype.
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
        raise WeightError(
            f"the source did not return {len(waiting)} tensors: {_listed(sorted(waiting))}"
        )
    model.finalize()
    return size


def _values(
    source: WeightSource, wanted: list[WeightTarget]
) -> Iterator[tuple[WeightTarget, Tensor]]:
    """Yield each wanted target with its tensor, in one stream if the source supports streams."""
    if isinstance(source, StreamingSource):
        yield from source.stream(wanted)
        return
    for target in wanted:
        yield target, source.read(target)


def _by_name(targets: Iterable[WeightTarget]) -> dict[str, WeightTarget]:
    """Return targets by checkpoint name.

    Raises:
        WeightError: two targets have the same name.
    """
    found: dict[str, WeightTarget] = {}
    for target in targets:
        if target.name in found:
            raise WeightError(f"two targets of the model have the name {target.name}")
        found[target.name] = target
    return found


def _check(
    targets: dict[str, WeightTarget],
    entries: Mapping[str, TensorFact],
    model: Model,
    facts: ModelFacts,
) -> None:
    """Raise WeightError if names, shapes or dtypes of targets and entries disagree."""
    found = {name: target for name, target in targets.items() if name in entries}
    needed = [name for name, target in targets.items() if not target.optional]
    misfits = {
        "missing": [name for name in needed if name not in entries],
        "unexpected": [name for name in entries if name not in targets and not model.ignored(name)],
        "of the wrong shape": list(_misshapen(found, entries, facts.architecture)),
        "of the wrong dtype": list(_mistyped(found, entries, facts.architecture)),
    }
    problems = [
        f"{len(names)} {what}: {_listed(names)}" for what, names in misfits.items() if names
    ]
    if problems:
        raise WeightError(
            f"{facts.path or 'the checkpoint'}: tensors do not match config.json: "
            f"{'; '.join(problems)}. Fix: download the files again, including config.json"
        )


def _misshapen(
    found: dict[str, WeightTarget], entries: Mapping[str, TensorFact], architecture: str
) -> Iterator[str]:
    """Yield a message for each target in ``found`` whose entry has another shape."""
    for name, target in found.items():
        shape = entries[name].shape
        if tuple(shape) != tuple(target.shape):
            yield f"{name} is {_size(shape)}, {architecture} needs {_size(target.shape)}"


def _mistyped(
    found: dict[str, WeightTarget], entries: Mapping[str, TensorFact], architecture: str
) -> Iterator[str]:
    """Yield a message for each target in ``found`` whose entry has an unsuitable dtype."""
    for name, target in found.items():
        stored = entries[name].dtype
        if not _readable(stored, target.dtype):
            needed = target.dtype or "a floating-point type"
            yield f"{name} is {stored}, {architecture} needs {needed}"


def _readable(stored: str, fixed: str | None) -> bool:
    """Return whether a target of dtype ``fixed`` can be loaded from the dtype ``stored``.

    If ``fixed`` is None, every floating-point type except those of 8 bits can be loaded: 8-bit
    floats are meaningless without their scales.
    """
    return stored == fixed if fixed is not None else stored in FLOATING_DTYPES


def _listed(names: list[str]) -> str:
    """Return the first names and the number of the others as text."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _size(shape: Iterable[int]) -> str:
    """Convert a shape to text, e.g. "128x64"."""
    return "x".join(map(str, shape)) or "a scalar"

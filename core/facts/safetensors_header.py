"""Reading and checks of safetensors headers, without torch and without mapping data. Plan zone.

A file consists of 8 bytes (little-endian length N), N bytes of JSON (name -> dtype, shape,
data_offsets) and the data. Every length is checked against the size of the file. A truncated
download or a hostile header thus raises a :class:`WeightError` that names file and tensor, before
anything is allocated.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import TensorFact

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  #: size limit of a header in bytes, which the format defines
MAX_DIMS = 16  #: most dimensions of a tensor

#: safetensors' name of a dtype -> (torch's name, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
#: file names that may hold pickled weights
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: file name of a numbered shard, such as "model-00001-of-00002.safetensors"
SHARD = re.compile(r"(?P<stem>.*-)(?P<number>\d{1,9})-of-(?P<count>\d{1,9})\.safetensors")


def read_header(path: Path | str) -> dict[str, TensorFact]:
    """Return the tensors of one file by name; ``TensorFact.file`` is the file's name.

    Raises:
        WeightError: the header is not valid, or the file has a wrong length.
    """
    return {name: fact for name, (fact, _, _) in read_places(path).items()}


def read_places(path: Path | str) -> dict[str, tuple[TensorFact, int, int]]:
    """Return the tensors of one file as (fact, start, end) by name.

    ``start`` and ``end`` are the byte range of the tensor's data in the file, without ``end``.

    Raises:
        WeightError: the header is not valid, or the file has a wrong length.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        raw = _header_bytes(path, size)
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror or error}") from None
    entries = _parse(path, raw)
    places: dict[str, tuple[TensorFact, int, int]] = {}
    spans: list[tuple[int, int, str]] = []
    data = 8 + len(raw)
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        fact, start, end = _tensor(path, name, entry)
        places[name] = fact, data + start, data + end
        spans.append((start, end, name))
    _check_spans(path, spans, size - data)
    return places


def read_tensors(folder: Path | str) -> dict[str, TensorFact]:
    """Return all tensors of a model folder by name; {} if it has no weights.

    Raises:
        WeightError: a file is missing that the index names or, without an index, one of a numbered
            series such as "00001-of-00002"; a tensor is missing, is in two files or is not in the
            index; or the folder has only pickled weights, which are never read.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_pickles(folder)
        return {}
    _refuse_gaps(folder, [file.name for file in files])
    tensors: dict[str, TensorFact] = {}
    for file in files:
        _merge(tensors, read_header(file), folder)
    return tensors


def _header_bytes(path: Path, size: int) -> bytes:
    """Return the JSON bytes of the header of a file of ``size`` bytes."""
    if size < 8:
        raise WeightError(
            f"{path}: {size} bytes is too short for a safetensors file; incomplete download?"
        )
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise WeightError(
                f"{path}: the header claims {length} bytes, the format allows {MAX_HEADER}; "
                "not a safetensors file, or damaged"
            )
        if length > size - 8:
            raise WeightError(
                f"{path}: the header claims {length} bytes but the file holds {size - 8} after its "
                "first 8; incomplete download?"
            )
        raw = file.read(length)
    if len(raw) != length:
        raise WeightError(
            f"{path}: the header claims {length} bytes but only {len(raw)} could be read"
        )
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return ``pairs`` as a dict; raise ValueError if a key appears twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found


def _load_json(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in ``raw``, whose keys must be unique; ``what`` names it in errors."""
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path}: {what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise WeightError(f"{path}: {what} is a JSON {type(parsed).__name__}, expected an object")
    return parsed


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the entries of a safetensors header, ``__metadata__`` included."""
    entries = _load_json(path, raw, "the header")
    metadata = entries.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise WeightError(f"{path}: the header's __metadata__ must map text to text")
    return entries


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(path: Path, name: str, entry: Any) -> tuple[TensorFact, int, int]:
    """Return (fact, start, end) of one header entry; the byte range is relative to the data."""

    def bad(reason: str) -> WeightError:
        return WeightError(f"{path}: tensor {name[:200]!r}: {reason}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("its entry must hold exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"unknown dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise bad(f"shape {str(shape)[:80]} is not a list of at most {MAX_DIMS} sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise bad(f"data_offsets {str(offsets)[:80]} is not [start, end]")
    torch_name, width = DTYPES[dtype]
    needed = math.prod(shape) * width
    if offsets[1] - offsets[0] != needed:
        raise bad(
            f"{dtype} {shape} needs {needed} bytes, its data_offsets hold {offsets[1] - offsets[0]}"
        )
    return TensorFact(torch_name, tuple(shape), path.name), offsets[0], offsets[1]


def _check_spans(path: Path, spans: list[tuple[int, int, str]], actual: int) -> None:
    """Check that tensors fill the data without gaps and overlaps.

    Args:
        spans: (start, end, name) of each tensor; the list is sorted in place.
        actual: number of data bytes in the file.
    """
    spans.sort()
    at = 0
    total = max((end for _, end, _ in spans), default=0)
    for start, end, name in spans:
        if start != at:
            kind = (
                "overlaps the tensor before it"
                if start < at
                else f"leaves {start - at} unused bytes before it"
            )
            raise WeightError(
                f"{path}: tensor {name[:200]!r} {kind} (starts at byte {start}, expected {at})"
            )
        if end > actual:
            raise WeightError(
                f"{path}: truncated: tensor {name[:200]!r} ends at data byte {end}, the file holds "
                f"{actual} data bytes of {total} expected; incomplete download?"
            )
        at = end
    if at != actual:
        raise WeightError(
            f"{path}: {actual} data bytes, the header accounts for {at}; "
            "damaged or not a whole file"
        )


def _merge(tensors: dict[str, TensorFact], found: dict[str, TensorFact], folder: Path) -> None:
    """Add the tensors of a file to ``tensors``; raise WeightError if a tensor is in two files."""
    for name, fact in found.items():
        if name in tensors:
            raise WeightError(
                f"{folder}: tensor {name!r} is in two files, {tensors[name].file} and {fact.file}"
            )
        tensors[name] = fact


def _read_indexed(folder: Path, index: Path) -> dict[str, TensorFact]:
    """Return the tensors of a folder with an index, and check its files against the index."""
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise WeightError(
            f"{folder}: {len(missing)} of {len(files)} files named by {INDEX_NAME} are missing: "
            f"{_some(missing)}; incomplete download?"
        )
    tensors: dict[str, TensorFact] = {}
    for file in files:
        _merge(tensors, read_header(folder / file), folder)
    absent = [
        f"{name} ({file})"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file != file
    ]
    if absent:
        raise WeightError(
            f"{folder}: {len(absent)} tensors are not in the file that {INDEX_NAME} names: "
            f"{_some(absent)}"
        )
    extra = [f"{name} ({fact.file})" for name, fact in tensors.items() if name not in weight_map]
    if extra:
        raise WeightError(
            f"{folder}: {len(extra)} tensors are in files but not in {INDEX_NAME}: {_some(extra)}"
        )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor from a folder's index."""
    try:
        if index.stat().st_size > MAX_HEADER:
            raise WeightError(f"{index}: larger than {MAX_HEADER} bytes")
        raw = index.read_bytes()
    except OSError as error:
        raise WeightError(f"{index}: cannot be read: {error.strerror or error}") from None
    weight_map = _load_json(index, raw, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{index}: it has no weight_map")
    for name, file in weight_map.items():
        # NOTE: a file name from the index must stay inside the model folder.
        if (
            not isinstance(file, str)
            or os.path.basename(file) != file
            or not file.endswith(".safetensors")
        ):
            raise WeightError(
                f"{index}: tensor {name[:200]!r} names {str(file)[:80]!r}, "
                "which is not a safetensors file of this folder"
            )
    return weight_map


def _refuse_gaps(folder: Path, files: list[str]) -> None:
    """Raise WeightError if a series of numbered files is incomplete; series start at 0 or 1."""
    for shard in filter(None, map(SHARD.fullmatch, files)):
        stem = shard["stem"]
        count = int(shard["count"])
        digits = len(shard["number"])
        ending = f"-of-{shard['count']}.safetensors"
        there = {
            name
            for name in files
            if name.startswith(stem) and name.endswith(ending) and SHARD.fullmatch(name)
        }
        if len(there) < count:
            first = 0 if f"{stem}{0:0{digits}d}{ending}" in there else 1
            names = (f"{stem}{number:0{digits}d}{ending}" for number in range(first, first + count))
            raise WeightError(
                f"{folder}: {count - len(there)} of {count} files are missing: "
                f"{', '.join(islice((name for name in names if name not in there), 5))}"
                f"{' and more' if count - len(there) > 5 else ''}; incomplete download?"
            )


def _refuse_pickles(folder: Path) -> None:
    """Raise WeightError if a folder holds pickled weights."""
    pickles = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise WeightError(
            f"{folder}: only pickled weights were found ({_some(pickles)}); they can run code when "
            "they are opened and are never read. Convert them to safetensors"
        )


def _some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first ``limit`` names as text, followed by the number of names left out."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more

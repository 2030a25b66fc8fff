"""The header of a GGUF file: metadata and tensor table. Every length is checked against the
file.

Layout (little-endian): "GGUF", u32 version, u64 tensors, u64 pairs; the pairs (string key, u32
type, value); the tensor table (string name, u32 dimensions, u64 each, u32 type, u64 offset);
padding; the data. A string is a u64 length and its bytes; an array a u32 type, a u64 length and its
items.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from glowplug.core.api import WeightError

MAX_ITEMS = 1 << 21  #: strings in an array, pairs, tensors: far beyond any model
MAX_STRING = 1 << 24  #: bytes
MAX_DIMS = 4
MAX_DEPTH = 3
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class GgufTensor:
    """A row of the tensor table.

    Attributes:
        shape: Outermost dimension first, as in torch.
        start: First byte in the file.
        size: Bytes in the file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header.

    Raises:
        WeightError: The file is inconsistent; the message names the file and the fault.
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise WeightError(
                f"{path}: {size} bytes is too short for a GGUF file; incomplete download?"
            )
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Parser:
    """A cursor over the mapped file that refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def header(self) -> GgufHeader:
        if self.data[:4] != b"GGUF":
            raise self.bad("it does not start with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            raise self.bad(f"version {version} is not supported (2 and 3 are)")
        tensors, pairs = self.count("tensors"), self.count("metadata pairs")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.bad(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.number("I"), key, 0)
        table = [self.tensor() for _ in range(tensors)]
        return GgufHeader(
            self.path, metadata, self.place(table, metadata.get("general.alignment", 32))
        )

    def bad(self, reason: str) -> WeightError:
        return WeightError(f"{self.path}: damaged GGUF header at byte {self.at}: {reason}")

    def need(self, size: int, what: str) -> None:
        if size > self.end - self.at:
            raise WeightError(
                f"{self.path}: {what} needs {size} bytes at byte {self.at}, the file holds "
                f"{self.end - self.at} more; incomplete download?"
            )

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.need(size, "a number")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def count(self, what: str) -> int:
        count: int = self.number("Q")
        if count > MAX_ITEMS:
            raise self.bad(f"{count} {what}, at most {MAX_ITEMS} are accepted")
        return count

    def string(self, what: str) -> str:
        length: int = self.number("Q")
        if length > MAX_STRING:
            raise self.bad(f"{what} of {length} bytes")
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind == STRING:
            return self.string(f"the value of {key[:80]!r}")
        if kind == ARRAY:
            return self.array(key, depth + 1)
        if kind not in NUMBERS:
            raise self.bad(f"{key[:80]!r} has unknown type {kind}")
        return self.number(NUMBERS[kind])

    def array(self, key: str, depth: int) -> list[Any]:
        kind, length = self.number("I"), self.count(f"items in {key[:80]!r}")
        if depth > MAX_DEPTH:
            raise self.bad(f"{key[:80]!r} nests arrays deeper than {MAX_DEPTH}")
        if kind in NUMBERS:
            size = length * struct.calcsize(NUMBERS[kind])
            self.need(size, f"the array {key[:80]!r}")
            values = np.frombuffer(self.data, NUMBERS[kind], length, self.at).tolist()
            self.at += size
            return values
        return [self.value(kind, key, depth) for _ in range(length)]

    def tensor(self) -> GgufTensor:
        """Read a row of the table; ``start`` is still relative to the data."""
        name = self.string("a tensor name")
        dims = self.number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self.bad(f"tensor {name[:80]!r} has {dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(dims))[::-1]
        number, offset = self.number("I"), self.number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.bad(f"tensor {name[:80]!r} has unknown type {number}") from None
        block, width = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.bad(
                f"tensor {name[:80]!r}: shape {list(shape)} does not fill {kind.name} blocks of "
                f"{block}"
            )
        return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * width)

    def place(self, table: list[GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
        """Compute the place of each tensor in the file, and check that it is inside."""
        if (
            type(alignment) is not int
            or alignment < 1
            or alignment & (alignment - 1)
            or alignment > 1 << 20
        ):
            raise self.bad(f"alignment {alignment!r} is not a power of two")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for tensor in table:
            if tensor.name in tensors:
                raise self.bad(f"tensor {tensor.name[:80]!r} appears twice")
            start = base + tensor.start
            if start + tensor.size > self.end:
                raise WeightError(
                    f"{self.path}: truncated: tensor {tensor.name[:80]!r} ends at byte "
                    f"{start + tensor.size}, the file holds {self.end}; incomplete download?"
                )
            tensors[tensor.name] = GgufTensor(
                tensor.name, tensor.kind, tensor.shape, start, tensor.size
            )
        return tensors

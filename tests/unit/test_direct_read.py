"""Reading byte ranges of files to a device: blocks, staging, slices and refusals. Runs on the CPU;
GPU tests measure the speed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from glowplug.core.errors import WeightError
from glowplug.core.protocols import Worker
from glowplug.core.testing.suites.weights import WantedTensor, cuts, same
from glowplug.plugins.weights import direct_read, safetensors_runtime
from glowplug.plugins.weights.direct_read import GAP, Columns, DirectReader, Span, blocks_of
from glowplug.plugins.weights.safetensors import SafetensorsOptions
from glowplug.plugins.weights.safetensors_runtime import SafetensorsSource


def test_blocks_join_neighbours_of_one_file() -> None:
    a, b = Path("a"), Path("b")
    spans = [
        Span(0, b, 100, 50),
        Span(1, a, 900, 100),
        Span(2, a, 0, 300),
        Span(3, a, 300, 600),
        Span(4, a, 1000 + GAP + 1, 10),
        Span(5, b, 150, 0),
    ]
    blocks = blocks_of(spans, max_bytes=1000)
    assert [
        (block.file, block.start, block.end, [span.key for span in block.spans]) for block in blocks
    ] == [(a, 0, 1000, [2, 3, 1]), (a, 1001 + GAP, 1011 + GAP, [4]), (b, 100, 150, [0, 5])]
    assert [[span.key for span in block.spans] for block in blocks_of(spans, max_bytes=899)][
        :2
    ] == [
        [2],
        [3, 1],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_every_span_arrives_whole(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans arrive complete for any sizes of pieces, blocks and staging, and any number of
    files; those with columns without the other bytes.
    """
    rng, contents = random.Random(seed), {}
    for name in ("x", "y", "z"):
        contents[tmp_path / name] = os.urandom(rng.randrange(1, 5000))
        (tmp_path / name).write_bytes(contents[tmp_path / name])
    spans = []
    piece = rng.choice([1, 7, 64, 4096])
    monkeypatch.setattr(direct_read, "SCRATCH_BYTES", rng.choice([1, 100]))
    for file, data in contents.items():
        for number in range(30):
            start = rng.randrange(len(data))
            size = rng.randrange(len(data) - start + 1)
            columns = None
            if number % 2:
                pitch = rng.randint(1, piece)
                first = rng.randrange(pitch)
                columns = Columns(pitch, first, rng.randint(1, pitch - first))
                size -= size % pitch
            spans.append(Span(len(spans), file, start, size, columns))
    reader: DirectReader[int] = DirectReader("cpu", rng.randrange(1, 5), piece=piece)
    got = {
        span.key: bytes(held.tolist())
        for span, held in reader.read(blocks_of(spans, max_bytes=rng.choice([1, 500])))
    }
    reader.close()
    assert got == {span.key: wanted_bytes(contents[span.file], span) for span in spans}


def wanted_bytes(data: bytes, span: Span[int]) -> bytes:
    rows = data[span.start : span.start + span.size]
    if span.columns is None:
        return rows
    pitch, first, width = span.columns
    return b"".join(rows[at + first : at + first + width] for at in range(0, len(rows), pitch))


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    reader: DirectReader[str] = DirectReader("cpu", 2, piece=16)
    with pytest.raises(WeightError, match="ends at byte 100, expected 120"):
        list(reader.read(blocks_of([Span("all", tmp_path / "x", 0, 120)])))
    with pytest.raises(WeightError, match="cannot be read"):
        list(reader.read(blocks_of([Span("all", tmp_path / "absent", 0, 1)])))
    reader.close()


@pytest.mark.parametrize("piece", [13, 40, 4096])
@pytest.mark.parametrize("saving", [0, 1 << 16])
def test_tensors_and_their_slices(
    piece: int, saving: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slice of every dtype is read correctly, also from files whose tensors begin at odd
    offsets.
    """
    monkeypatch.setattr(safetensors_runtime, "CUT_BYTES", saving)
    generator = torch.Generator().manual_seed(0)
    first = {
        "a.codes": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "b.weight": torch.randn(6, 10, generator=generator),
        "c.flag": torch.tensor([True, False, True]),
        "d.weight": torch.randn(4, 3, 5, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
    }
    second = {
        "e.weight": torch.randn(9, 7, generator=generator).half(),
        "scalar": torch.tensor(3.5),
    }
    save_file(first, tmp_path / "one.safetensors")
    save_file(second, tmp_path / "two.safetensors")
    values = {**first, **second}
    source = SafetensorsSource(SafetensorsOptions(), cast(Any, None), Worker())
    source.open(cast(Any, SimpleNamespace(path=str(tmp_path), tensors={})))
    for number in range(12):
        targets = {
            name: WantedTensor(name, tuple(value.shape), wanted[number % len(wanted)])
            for name, value in values.items()
            for wanted in [cuts(value) + odd_cuts(value)]
        }
        reader: DirectReader[Any] = DirectReader("cpu", 2, piece=piece)
        got = [
            (target.name, value.clone())
            for target, value in source.through(reader, list(targets.values()))
        ]
        assert sorted(name for name, _ in got) == sorted(values)
        for name, value in got:
            assert same(value, values[name][targets[name].index]), (name, targets[name].index)
    source.close()


def odd_cuts(value: torch.Tensor) -> list[tuple[slice, ...]]:
    """Return cuts to the first, the last and no element of the last dimension, and none at all."""
    if not value.dim():
        return []
    rows = tuple(slice(0, size) for size in value.shape[:-1])
    last = value.shape[-1]
    return [(*rows, cut) for cut in (slice(0, 1), slice(last - 1, last), slice(1, 1))]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_only_the_columns_of_a_slice_are_copied(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are copied to the device are those of the slices, with the real thresholds."""
    value = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"down_proj.weight": value}, tmp_path / "one.safetensors")
    source = SafetensorsSource(SafetensorsOptions(), cast(Any, None), Worker())
    source.open(cast(Any, SimpleNamespace(path=str(tmp_path), tensors={})))
    copied: list[int] = []
    copy = DirectReader._copy

    def counted(reader: DirectReader[Any], buffer: int, place: torch.Tensor) -> None:
        copied.append(len(place))
        copy(reader, buffer, place)

    monkeypatch.setattr(DirectReader, "_copy", counted)
    for first in range(0, 2048, 256):
        index = (slice(0, 512), slice(first, first + 256))
        copied.clear()
        reader: DirectReader[Any] = DirectReader("cpu", 2)
        target = WantedTensor("down_proj.weight", (512, 2048), index)
        ((_, got),) = source.through(reader, [target])
        assert same(got, value[index]) and got.untyped_storage().nbytes() == got.nbytes
        assert sum(copied) == value.nbytes // 8
    source.close()

"""The safetensors source reads slices correctly and refuses every damaged folder by name before
reading data.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from glowplug.core.errors import WeightError
from glowplug.core.facts.model_facts import TensorFact
from glowplug.core.facts.safetensors_header import DTYPES, INDEX_NAME, read_header, read_tensors
from glowplug.core.protocols import WeightSource, Worker
from glowplug.core.testing.suites.weights import WeightSourceSuite
from glowplug.plugins.weights.safetensors import SafetensorsOptions
from glowplug.plugins.weights.safetensors_runtime import SafetensorsSource
from tests.support.work import at_most


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(6, 10, generator=generator),
        "a.bias": torch.randn(6, generator=generator).half(),
        "b.weight": torch.randn(3, 4, 5, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "c.weight": torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn),
    }


def write_folder(folder: Path, shards: int = 2) -> dict[str, torch.Tensor]:
    """Write an indexed folder of ``shards`` files."""
    folder.mkdir(exist_ok=True)
    values, weight_map = tensors(), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            name: value for i, (name, value) in enumerate(values.items()) if i % shards == shard
        }
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return values


def open_source(folder: Path, known: dict[str, TensorFact] | None = None) -> SafetensorsSource:
    source = SafetensorsSource(SafetensorsOptions(), cast(Any, None), Worker())
    source.open(cast(Any, SimpleNamespace(path=str(folder), tensors=known or {})))
    return source


class TestIndexed(WeightSourceSuite):
    def open_source(self, folder: Path) -> tuple[WeightSource, dict[str, torch.Tensor]]:
        values = write_folder(folder)
        return open_source(folder, read_tensors(folder)), values


class TestWithoutAnIndex(WeightSourceSuite):
    def open_source(self, folder: Path) -> tuple[WeightSource, dict[str, torch.Tensor]]:
        values = write_folder(folder)
        (folder / INDEX_NAME).unlink()
        return open_source(folder), values


def test_a_truncated_shard_names_file_tensor_and_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-3])
    with pytest.raises(WeightError) as error:
        open_source(tmp_path)
    header = struct.unpack("<Q", data[:8])[0]
    wanted = len(data) - 8 - header
    for part in (
        "model-00002-of-00002.safetensors",
        "tensor '",
        str(wanted),
        str(wanted - 3),
        "incomplete download?",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("first", "digits"), [(0, 5), (1, 5), (1, 6)])
def test_numbered_files_must_all_be_there_without_an_index(
    tmp_path: Path, first: int, digits: int
) -> None:
    names = [
        f"model-{first + shard:0{digits}d}-of-{9:0{digits}d}.safetensors" for shard in range(9)
    ]
    for number, name in enumerate(names):
        save_file({f"tensor.{number}": torch.ones(2)}, tmp_path / name)
    assert len(read_tensors(tmp_path)) == 9
    for name in (names[2], names[8]):
        (tmp_path / name).unlink()
    with pytest.raises(WeightError) as error:
        read_tensors(tmp_path)
    assert f"2 of 9 files are missing: {names[2]}, {names[8]}; incomplete download?" in str(
        error.value
    )


def test_a_count_that_no_folder_holds_is_not_counted_out(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-1-of-999999999.safetensors")
    with pytest.raises(
        WeightError, match=r"999999998 of 999999999 files are missing: model-2-of-.* and more"
    ):
        read_tensors(tmp_path)


def break_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    def refused(change: Any, *words: str) -> None:
        write_folder(tmp_path)
        break_index(tmp_path, change)
        with pytest.raises(WeightError) as error:
            open_source(tmp_path)
        for word in words:
            assert word in str(error.value), str(error.value)

    refused(
        lambda names: names.update({"ghost": "model-00001-of-00002.safetensors"}),
        "ghost",
        "not in the file",
    )
    refused(lambda names: names.pop("a.bias"), "a.bias", "not in model.safetensors.index.json")
    refused(
        lambda names: names.update({"x": "model-00003-of-00003.safetensors"}),
        "model-00003",
        "missing",
        "incomplete download?",
    )
    refused(
        lambda names: names.update({"x": "../../etc/passwd"}),
        "not a safetensors file of this folder",
    )
    refused(lambda names: names.clear(), "no weight_map")


def test_missing_shard_doubled_tensor_and_changed_file(tmp_path: Path) -> None:
    values = write_folder(tmp_path)
    planned = read_tensors(tmp_path)
    save_file({"a.bias": torch.zeros(6)}, tmp_path / "extra.safetensors")
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(WeightError, match="'a.bias' is in two files"):
        open_source(tmp_path)
    (tmp_path / "extra.safetensors").unlink()
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / file).unlink()
    save_file(
        {name: value.float() for name, value in values.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(WeightError, match="changed since the plan was made"):
        open_source(tmp_path, planned)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin.*never read.*safetensors"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(WeightError, match="no safetensors weights"):
        open_source(tmp_path)


def test_false_header_entries_are_named(tmp_path: Path) -> None:
    """Each header has one false entry about one tensor; the message names the tensor."""
    good = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    lies: list[dict[str, Any]] = [
        {"dtype": "F33"},
        {"dtype": ["F32"]},
        {"shape": [2, -3]},
        {"shape": [2, 3.0]},
        {"shape": "23"},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [True, 6]},
        {"data_offsets": [0, 23]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [8, 32]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 1 << 64]},
        {"extra": 1},
        {"shape": [1] * 40},
        {"shape": None},
    ]
    file = tmp_path / "model.safetensors"
    for lie in lies:
        header = json.dumps({"w": {**good, **lie}}).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
        with pytest.raises(WeightError) as error:
            read_header(file)
        assert "'w'" in str(error.value) and "model.safetensors" in str(error.value), lie


def test_duplicate_names_deep_json_and_trailing_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    for header, data, words in (
        (f'{{"w":{entry},"w":{entry}}}', bytes(4), "'w' appears twice"),
        ("[" * 100_000, bytes(4), "not valid JSON"),
        ("[]", b"", "expected an object"),
        ('{"__metadata__":{"a":1}}', b"", "text to text"),
        (f'{{"w":{entry}}}', bytes(9), "9 data bytes"),
        (f'{{"w":{entry},"v":{entry}}}', bytes(4), "overlaps"),
    ):
        raw = header.encode()
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        with pytest.raises(WeightError, match=words):
            read_header(file)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Break the length or the header of a valid file in one random way."""
    length = struct.unpack("<Q", data[:8])[0]
    kind = rng.randrange(6)
    if kind == 0:
        return (
            struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1]))
            + data[8:]
        )
    if kind == 1:
        return data[: rng.randrange(len(data) - 1)]
    header = bytearray(data[8 : 8 + length])
    if kind == 2:
        for _ in range(rng.randrange(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
    elif kind == 3:
        digits = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
        header[rng.choice(digits)] = ord(rng.choice("0123456789-.e"))
    elif kind == 4:
        at = rng.randrange(len(header))
        header[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    else:
        parsed = json.loads(header)
        name = rng.choice([key for key in parsed if key != "__metadata__"])
        key = rng.choice(["dtype", "shape", "data_offsets"])
        parsed[name][key] = rng.choice(
            [None, 0, [], {}, "F32", [1, 2], [0, 1 << 70], rng.choice(list(DTYPES))]
        )
        header = bytearray(json.dumps(parsed).encode())
        return struct.pack("<Q", len(header)) + bytes(header) + data[8 + length :]
    return struct.pack("<Q", length) + bytes(header) + data[8 + length :]


def test_five_hundred_mutated_headers(tmp_path: Path) -> None:
    """Each file is either still consistent or refused with a WeightError that names the file, with
    little work.
    """
    write_folder(tmp_path, shards=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    good, rng, refused = file.read_bytes(), random.Random(7), 0
    for _ in range(500):
        file.write_bytes(mutate(good, rng))
        try:
            with at_most(most_lines=20_000, most_bytes=4 << 20):
                found = read_header(file)
            body = sum(bytes_of(fact) for fact in found.values())
            header = struct.unpack("<Q", file.read_bytes()[:8])[0]
            assert 8 + header + body == file.stat().st_size
        except WeightError as error:
            refused += 1
            assert file.name in str(error) and len(str(error)) < 2000
    assert refused > 400


def bytes_of(fact: TensorFact) -> int:
    size = dict(DTYPES.values())[fact.dtype]
    for dim in fact.shape:
        size *= dim
    return size

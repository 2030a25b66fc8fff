"""Takes the next-token layer out of a checkpoint: its tensors as they are, renamed, in a folder
that drafts. No torch.

Tensors are copied as bytes from file to file in pieces, so that memory does not grow with the
layer; the folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from glowplug.core.errors import FactsError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import NEXTN_ALONE, read_json
from glowplug.core.facts.weight_classes import next_token_layer
from glowplug.entrypoints.checkpoints.tokenizer_files import TOKENIZER_FILES

PIECE = 16 << 20  #: bytes copied at a time
WEIGHTS = "model.safetensors"
LAYER = "model.layers."


@dataclass(frozen=True)
class Stored:
    """A tensor's place: ``file`` of the checkpoint, bytes ``start`` to ``stop`` of it."""

    file: Path
    start: int
    stop: int
    dtype: str
    shape: list[int]


def export(facts: ModelFacts, output: Path, *, force: bool = False) -> tuple[int, int]:
    """Write the first next-token layer of ``facts.path`` to ``output``: (tensors, bytes).
    FactsError before anything is written when there is none, or when ``output`` is in the way."""
    model = Path(facts.path)
    if facts.architecture.endswith(NEXTN_ALONE):
        raise FactsError(f"{model} is a next-token layer already", "draft with it as it is")
    tensors = _stored(model, facts)
    if not tensors:
        told = f" ({'; '.join(facts.notes)})" if facts.notes else ""
        raise FactsError(
            f"{model} holds no next-token layer behind its {facts.num_layers} layers{told}",
            "a checkpoint that has one: DeepSeek-V3 or R1 as published",
        )
    _check_output(model, output, force)
    size = sum(tensor.stop - tensor.start for tensor in tensors.values())
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if size > free:
        raise FactsError(f"{output}: {size} bytes are needed, {free} are free", "another --output")
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as place:
        made = Path(place) / "made"
        made.mkdir()
        _write(made, model, facts, tensors)
        _put(made, output.absolute(), Path(place) / "old")
    return len(tensors), size


def _check_output(model: Path, output: Path, force: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise FactsError(f"{output} is a file", "another --output")
    inside = model.resolve()
    target = output.resolve()
    if target == inside or target in inside.parents:
        raise FactsError(f"{output} holds the checkpoint itself", "another --output")
    if any(output.iterdir()) and not force:
        raise FactsError(
            f"{output} exists and is not empty", "another --output, or --force to replace it"
        )


def _put(made: Path, output: Path, old: Path) -> None:
    """``made`` takes the place of ``output``; what stood there goes with the temporary folder."""
    if output.exists():
        os.rename(output, old)
    try:
        os.rename(made, output)
    except OSError:
        if old.exists():
            os.rename(old, output)
        raise


# ---- what is written -----------------------------------------------------------------------------


def _write(folder: Path, model: Path, facts: ModelFacts, tensors: dict[str, Stored]) -> None:
    text = (
        json.dumps(draft_config(read_json(model / "config.json"), facts.num_layers), indent=2)
        + "\n"
    )
    (folder / "config.json").write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    with open(folder / WEIGHTS, "wb") as out:
        out.write(_header(tensors))
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                out.write(piece)
        out.flush()
        os.fsync(out.fileno())


def draft_config(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """config.json of the draft: one layer, a mixture, quantised as it was. ``layers``: of the
    checkpoint.
    """
    own = dict(config)
    own["architectures"] = [
        f"{str(config['architectures'][0]).removesuffix('ForCausalLM')}{NEXTN_ALONE}"
    ]
    own |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 1}
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("modules_to_not_convert"):
        own["quantization_config"] = {
            **quantization,
            "modules_to_not_convert": list(
                _left_alone(quantization["modules_to_not_convert"], layers)
            ),
        }
    return own


def _left_alone(modules: list[str], layers: int) -> Iterator[str]:
    """Modules that are not quantised: those of the layer under its new name, and those of no layer."""
    for module in modules:
        number = next_token_layer(f"{module}.", layers)
        if number == 0:
            yield renamed(module, layers)
        elif not module.startswith(LAYER):
            yield module


def renamed(name: str, layers: int) -> str:
    """``model.layers.{layers}.x`` as ``model.layers.0.x``."""
    return f"{LAYER}0{name.removeprefix(f'{LAYER}{layers}')}"


# ---- safetensors ---------------------------------------------------------------------------------


def _stored(model: Path, facts: ModelFacts) -> dict[str, Stored]:
    """The layer's tensors by their new names, in the checkpoint's order. Headers were checked when
    facts were read.
    """
    wanted = {
        name: fact
        for name, fact in facts.tensors.items()
        if next_token_layer(name, facts.num_layers) == 0
    }
    headers: dict[str, tuple[int, dict[str, Any]]] = {}
    found = {}
    for name, fact in wanted.items():
        if fact.file not in headers:
            headers[fact.file] = _read_header(model / fact.file)
        data, entries = headers[fact.file]
        start, stop = entries[name]["data_offsets"]
        found[renamed(name, facts.num_layers)] = Stored(
            model / fact.file,
            data + start,
            data + stop,
            entries[name]["dtype"],
            entries[name]["shape"],
        )
    return found


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """(where the data begins, entries by name)."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(length))
    return 8 + length, entries


def _header(tensors: dict[str, Stored]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.stop - tensor.start
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + size],
        }
        at += size
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format wants the data aligned
    return len(raw).to_bytes(8, "little") + raw


def _pieces(tensor: Stored) -> Iterator[bytes]:
    file: BinaryIO
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        left = tensor.stop - tensor.start
        while left:
            piece = file.read(min(PIECE, left))
            if not piece:
                raise FactsError(
                    f"{tensor.file} ended {left} bytes early", "download the checkpoint again"
                )
            left -= len(piece)
            yield piece

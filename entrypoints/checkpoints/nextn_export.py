"""Export of a checkpoint's next-token layer to a folder of its own, for drafting. No torch.

Tensors are renamed and copied unchanged, as bytes from file to file in pieces, so that memory use
does not depend on the size of the layer. The folder gets its name only when it is complete.
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
from glowplug.core.facts.model_folder import read_json
from glowplug.core.facts.weight_classes import next_token_layer
from glowplug.entrypoints.checkpoints.tokenizer_files import TOKENIZER_FILES

PIECE_BYTES = 16 << 20  #: bytes copied at a time
WEIGHTS = "model.safetensors"
LAYER = "model.layers."
#: ending of the architecture's name if a folder holds only next-token layers
NEXTN_ALONE = "ForCausalLMNextN"


@dataclass(frozen=True)
class ExportedTensor:
    """The location of a checkpoint's tensor to export: bytes ``start`` to ``stop`` of ``file``."""

    file: Path
    start: int
    stop: int
    dtype: str
    shape: list[int]


def export(facts: ModelFacts, output: Path, *, force: bool = False) -> tuple[int, int]:
    """Write the first next-token layer of a checkpoint to a folder, as a draft model.

    Args:
        facts: facts of the checkpoint.
        output: folder to write.
        force: replace ``output`` if it is not empty.

    Returns:
        The number of tensors and of bytes.

    Raises:
        FactsError: the checkpoint has no next-token layer, ``output`` cannot be written, or the
            disk is full; nothing has been written.
    """
    model = Path(facts.path)
    tensors = _layer_tensors(model, facts)
    _check_output(model, output, force)
    size = sum(tensor.stop - tensor.start for tensor in tensors.values())
    parent = output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if size > free:
        raise FactsError(
            f"{output}: {size} bytes are needed, {free} are free",
            "choose another --output",
        )
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=parent) as place:
        made = Path(place) / "made"
        made.mkdir()
        _write(made, model, facts, tensors)
        _put(made, output.absolute(), Path(place) / "old")
    return len(tensors), size


def _layer_tensors(model: Path, facts: ModelFacts) -> dict[str, ExportedTensor]:
    """Return the tensors of the first next-token layer by their names in the export.

    Raises:
        FactsError: the checkpoint has no next-token layer, or is itself an exported one.
    """
    if facts.architecture.endswith(NEXTN_ALONE):
        raise FactsError(
            f"{model} is already an exported next-token layer",
            "use it as it is for drafting",
        )
    tensors = _stored(model, facts)
    if not tensors:
        notes = f" ({'; '.join(facts.notes)})" if facts.notes else ""
        raise FactsError(
            f"{model} holds no next-token layer after its {facts.num_layers} layers{notes}",
            "use a checkpoint that has one: DeepSeek-V3 or R1 as published",
        )
    return tensors


def _check_output(model: Path, output: Path, force: bool) -> None:
    """Raise FactsError if ``output`` cannot or must not be written."""
    if not output.exists():
        return
    if not output.is_dir():
        raise FactsError(f"{output} is a file", "choose another --output")
    inside = model.resolve()
    target = output.resolve()
    if target == inside or target in inside.parents:
        raise FactsError(f"{output} contains the checkpoint itself", "choose another --output")
    if any(output.iterdir()) and not force:
        raise FactsError(
            f"{output} exists and is not empty",
            "choose another --output, or add --force to replace it",
        )


def _put(made: Path, output: Path, old: Path) -> None:
    """Move the folder ``made`` to ``output``, after moving an existing ``output`` to ``old``."""
    if output.exists():
        os.rename(output, old)
    try:
        os.rename(made, output)
    except OSError:
        if old.exists():
            os.rename(old, output)
        raise


# ---- files of the folder -------------------------------------------------------------------------


def _write(
    folder: Path, model: Path, facts: ModelFacts, tensors: dict[str, ExportedTensor]
) -> None:
    """Write config.json, the tokenizer's files and the tensors to ``folder``."""
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
    """Return config.json of the draft model: one MoE layer, quantised like the checkpoint's.

    Args:
        config: config.json of the checkpoint.
        layers: number of the checkpoint's layers, not counting next-token layers.
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
                _unquantised_modules(quantization["modules_to_not_convert"], layers)
            ),
        }
    return own


def _unquantised_modules(modules: list[str], layers: int) -> Iterator[str]:
    """Yield the names of the draft's unquantised modules.

    Modules of the first next-token layer get their exported names. Modules outside of layers, such
    as the head, keep their names. Modules of all other layers are left out.
    """
    for module in modules:
        number = next_token_layer(f"{module}.", layers)
        if number == 0:
            yield renamed(module, layers)
        elif not module.startswith(LAYER):
            yield module


def renamed(name: str, layers: int) -> str:
    """Return the exported tensor's name: ``model.layers.0.x`` for ``model.layers.{layers}.x``."""
    return f"{LAYER}0{name.removeprefix(f'{LAYER}{layers}')}"


# ---- safetensors ---------------------------------------------------------------------------------


def _stored(model: Path, facts: ModelFacts) -> dict[str, ExportedTensor]:
    """Return the tensors of the first next-token layer by their names in the export.

    They are in the checkpoint's order.

    NOTE: headers were checked when the facts were read.
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
        found[renamed(name, facts.num_layers)] = ExportedTensor(
            model / fact.file,
            data + start,
            data + stop,
            entries[name]["dtype"],
            entries[name]["shape"],
        )
    return found


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data and the header's entries by tensor name."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(length))
    return 8 + length, entries


def _header(tensors: dict[str, ExportedTensor]) -> bytes:
    """Return the safetensors header of the exported file."""
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
    raw += b" " * (-len(raw) % 8)  # the format requires aligned data
    return len(raw).to_bytes(8, "little") + raw


def _pieces(tensor: ExportedTensor) -> Iterator[bytes]:
    """Yield the bytes of a tensor, at most ``PIECE_BYTES`` at a time."""
    file: BinaryIO
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        left = tensor.stop - tensor.start
        while left:
            piece = file.read(min(PIECE_BYTES, left))
            if not piece:
                raise FactsError(
                    f"{tensor.file} is {left} bytes too short", "download the checkpoint again"
                )
            left -= len(piece)
            yield piece

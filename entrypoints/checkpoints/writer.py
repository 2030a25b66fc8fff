"""Writer of checkpoints with random weights.

The names and shapes of the weights come from the model itself, which is built on torch's meta
device.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import HardwareFacts, ModelFacts, TensorFact
from glowplug.core.facts.safetensors_header import INDEX_NAME
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import WeightSource, WeightTarget, Worker
from glowplug.core.startup.components import build_component, build_context
from glowplug.entrypoints.checkpoints.byte_tokenizer import TOKENS, write_byte_tokenizer
from glowplug.entrypoints.checkpoints.tokenizer_files import BYTES, NONE, TOKENIZER_FILES


def write_random(
    out: Path, config: dict[str, Any], *, seed: int, shard_bytes: int, tokenizer: str
) -> int:
    """Write a model folder with random weights.

    Args:
        out: folder to write; must be empty or not exist.
        config: config.json of the model.
        seed: seed of the weights.
        shard_bytes: maximum bytes per file.
        tokenizer: "bytes", "none" or a folder to copy the tokenizer from.

    Returns:
        The number of bytes of the weights.

    Raises:
        GlowplugError: ``out`` is not empty, the disk is full or the tokenizer does not fit.
        PlanRefused: the model cannot be planned. After either error nothing has been written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GlowplugError(f"{out} exists and is not an empty folder")
    plugins = load_plugins()
    plan = _plan(config, seed, plugins)
    targets = list(weight_targets(plan, plugins))
    needed, shards = _divide_into_shards(targets, plan.facts.model.dtype, shard_bytes)
    _check_space(out, needed)
    copied = _tokenizer_files(tokenizer, int(config["vocab_size"]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in copied:
        shutil.copyfile(path, out / path.name)
    if tokenizer == BYTES:
        write_byte_tokenizer(out)
    source: WeightSource = build_component(plugins, plan.choice("weights"), plan, Worker())
    source.open(plan.facts.model)
    return _write_shards(out, shards, source)


def _check_space(out: Path, needed: int) -> None:
    """Raise GlowplugError if the disk of ``out`` has less than ``needed`` bytes free."""
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise GlowplugError(f"{out}: {needed} bytes are needed, {free} are free")


def _plan(config: dict[str, Any], seed: int, plugins: PluginSet) -> EnginePlan:
    """Return a plan for the model of ``config`` on an imaginary machine with unlimited memory.

    The plan only lists the weights; none of its memory is ever allocated.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return make_plan(
            {"model": folder, "device": "cpu", "weights": {"use": "random", "seed": seed}},
            source="the checkpoint's config.json",
            plugins=plugins,
            hardware=HardwareFacts(cpu_cores=1, cpu_memory=1 << 60, name="no machine"),
        )


def weight_targets(plan: EnginePlan, plugins: PluginSet) -> Iterator[WeightTarget]:
    """Yield every tensor of the plan's model, NextN layers included, in a checkpoint's order."""
    worker = Worker(device="meta", dtype=getattr(torch, plan.dtype))

    facts = _with_nextn(plan.facts.model)
    context = build_context(plan, plugins, worker, facts=facts, context=plan.sizes.page_size)
    family = build_component(plugins, plan.choice("model"), plan, worker)
    model = family.build(context)
    yield from model.targets()
    for number in range(facts.nextn_layers):
        yield from family.build_nextn(context, model, number).targets()


def _with_nextn(facts: ModelFacts) -> ModelFacts:
    """Return ``facts`` with the copies of embedding and head that published NextN layers have."""
    shared = (
        f"model.layers.{facts.num_layers + number}.{name}.weight"
        for number in range(facts.nextn_layers)
        for name in ("embed_tokens", "shared_head.head")
    )
    table = TensorFact(facts.dtype, (facts.vocab_size, facts.hidden_size))
    return replace(facts, tensors=dict.fromkeys(shared, table))


def _divide_into_shards(
    targets: list[WeightTarget], dtype: str, shard_bytes: int
) -> tuple[int, list[list[WeightTarget]]]:
    """Divide the tensors among files of at most ``shard_bytes``.

    NOTE: a tensor larger than ``shard_bytes`` gets a file of its own.

    Returns:
        The total bytes and the targets of each file.
    """
    shards: list[list[WeightTarget]] = [[]]
    held = total = 0
    for target in targets:
        size = math.prod(target.shape) * DTYPE_BYTES.get(target.dtype or dtype, 4)
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(target)
        held += size
        total += size
    return total, shards


def _write_shards(out: Path, shards: list[list[WeightTarget]], source: WeightSource) -> int:
    """Write the weight files and, for several files, the index; return the bytes of all weights."""
    weight_map: dict[str, str] = {}
    total = 0
    progress = tqdm(
        total=sum(map(len, shards)), desc="Writing weights", unit="tensor", disable=None
    )
    for number, shard in enumerate(shards, 1):
        name = _file_name(number, len(shards))
        tensors = {}
        for target in shard:
            tensors[target.name] = source.read(target).contiguous()
            progress.update()
        save_file(tensors, out / name, metadata={"format": "pt"})
        # NOTE: only the owner can read files that safetensors writes
        shutil.copymode(out / "config.json", out / name)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    progress.close()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    return total


def _file_name(number: int, count: int) -> str:
    """Return the name that weight file ``number`` (from 1) of ``count`` has in checkpoints."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _tokenizer_files(tokenizer: str, vocab_size: int) -> list[Path]:
    """Return the tokenizer's files to copy; none for "bytes" and "none".

    Raises:
        GlowplugError: the vocabulary is too small for the byte-level tokenizer, or the folder
            has no tokenizer.json.
    """
    if tokenizer == BYTES and vocab_size < TOKENS:
        raise GlowplugError(
            f"a byte tokenizer needs {TOKENS} token ids, the config's vocab_size is {vocab_size}; "
            "use --tokenizer none"
        )
    if tokenizer in (BYTES, NONE):
        return []
    if not (Path(tokenizer) / "tokenizer.json").is_file():
        raise GlowplugError(f"{tokenizer} holds no tokenizer.json")
    return [
        Path(tokenizer) / name for name in TOKENIZER_FILES if (Path(tokenizer) / name).is_file()
    ]

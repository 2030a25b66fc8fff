"""A third party's scheme whose stored format depends on the module, from plan to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan
from tests.plan.test_rank_bytes import held_bytes
from tests.support.tiny import write_config

PLUGIN = ["tests.plugins.mixed"]
CONFIG: dict[str, Any] = {
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 64,
    "memory": {"kv_tokens": 256},
}


def folder_of(path: Path, *wide: str) -> Path:
    """Write the config.json of a checkpoint whose modules with these names have 8 bits."""
    stated = {"quant_method": "mixed", "wide": list(wide)}
    return write_config(path, "llama", quantization_config=stated)


def with_weights(folder: Path) -> Path:
    """Write the checkpoint's tensors, as the loaded model needs them."""
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    plan = rank_plan({**CONFIG, "weights": {"use": "random"}, "model": str(folder)}, plugins)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    with RankSet(plan, plugins) as ranks:
        for target in ranks.engines[0].runner.model.targets():
            shape, name = tuple(target.shape), target.name
            if name.endswith(".codes"):
                found = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            elif name.endswith(".scales"):
                found = torch.rand(shape, generator=generator).half() / 4
            else:
                found = torch.rand(shape, generator=generator)
            tensors[name] = found
    save_file(tensors, folder / "model.safetensors")
    return folder


def planned_and_held(folder: Path, **config: Any) -> tuple[int, int]:
    """Return the bytes of weights in the plan, and those of the loaded model."""
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    plan = rank_plan({**CONFIG, **config, "model": str(folder)}, plugins)
    with RankSet(plan, plugins) as ranks:
        planned = next(line.bytes for line in plan.budget if line.name == "weights")
        return planned, held_bytes(ranks.engines[0].runner.model)


@pytest.mark.parametrize("headers", [False, True])
def test_the_plan_counts_each_module_in_its_own_format(tmp_path: Path, headers: bool) -> None:
    found = []
    for number, wide in enumerate(((), ("self_attn",), ("self_attn", "mlp"))):
        folder = folder_of(tmp_path / str(number), *wide)
        config: dict[str, Any] = {} if headers else {"weights": {"use": "random"}}
        planned, held = planned_and_held(with_weights(folder) if headers else folder, **config)
        assert planned == held
        found.append(planned)
    assert found[0] < found[1] < found[2]


def test_a_checkpoint_of_two_formats_is_served(tmp_path: Path) -> None:
    folder = with_weights(folder_of(tmp_path, "self_attn"))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model=str(folder), plugins=PLUGIN, **CONFIG) as llm:
        (answer,) = llm.generate([[2, 3, 4, 5]], params)
    assert len(answer.token_ids) == 8 and answer.finish_reason == "length"

"""Layers leave sums over the ranks to the next norm where the collectives compute them there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import ExpertsShape, Model, WeightTarget
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup.load_weights import load_model
from glowplug.core.testing.harness.build import DictSource
from glowplug.core.testing.harness.ranks import rank_plan
from glowplug.kernels.formats import fp8
from glowplug.plugins.quantization.block_fp8.cuda import Fp8ExpertsCuda
from glowplug.plugins.quantization.dense.experts_cuda import CudaExperts
from tests.models.test_tensor_parallel import CASES, checkpoint, config_of, on_ranks, steps
from tests.support.tiny import write_config

pytestmark = pytest.mark.usefixtures("quick_switches")


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(["tests.plugins.norm_collectives"], entry_points=False)


def logits_of(tensors: dict[str, Tensor], model: Model, context: BuildContext) -> Tensor:
    """Return the logits of three steps, in which norms have computed all sums over ranks."""
    load_model(model, DictSource(tensors), context.facts)
    logits = steps(model, context)
    sums = getattr(context.collectives, "sums", [])
    # one sum after attention and one after the feed-forward layer
    assert len(sums) == (context.worker.ranks > 1) * 2 * 3 * context.facts.num_layers
    return logits


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("v2", []),
        ("v3", []),
        ("llama, tied, two key heads", []),
        ("v2", [{"use": "ep_moe", "size": 2}]),
        ("v3", [{"use": "ep_moe", "size": 2}]),
        ("v3", [{"use": "ep_moe", "size": 2, "redundant_experts": 2}]),
    ],
)
def test_norms_sum_over_the_ranks(
    case: str, more: list[dict[str, Any]], tmp_path: Path, plugins: PluginSet
) -> None:
    name, changes = CASES[case]
    folder = write_config(tmp_path, name, **changes)
    collectives = {"use": "norm_collectives", "timeout": 30}
    found: dict[int, list[Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for size in (1, 2):
        config = config_of(folder, size)
        if size > 1:
            config = {**config, "collectives": collectives}
            config["parallel"] = [*config["parallel"], *more]
        plan = rank_plan(config, plugins)
        tensors = tensors or checkpoint(plan.facts.model)

        found[size] = on_ranks(plan, plugins, tmp_path, partial(logits_of, tensors))
    for logits in found[2]:
        torch.testing.assert_close(logits, found[1][0], rtol=1e-4, atol=1e-4)


def part_of(target: WeightTarget, tensor: Tensor) -> Tensor:
    """Return the part of a checkpoint tensor that a target reads."""
    return tensor[target.index]


@pytest.mark.parametrize("scheme", ["dense", "block_fp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fused_shared_expert_is_split_like_the_routed_ones(scheme: str, ranks: int) -> None:
    hidden, inter, fused = 128, 256, 2
    generator = torch.Generator().manual_seed(ranks)
    stored = {
        "shared.gate_proj.weight": torch.randn(fused * inter, hidden, generator=generator),
        "shared.up_proj.weight": torch.randn(fused * inter, hidden, generator=generator),
        "shared.down_proj.weight": torch.randn(hidden, fused * inter, generator=generator),
    }
    x = torch.randn(3, hidden, generator=generator)
    total = torch.zeros(3, hidden)
    for rank in range(ranks):
        width = inter // ranks
        shape = ExpertsShape(
            prefix="experts",
            count=1,
            first=0,
            hidden=hidden,
            inter=width,
            inter_start=rank * width,
            inter_full=inter,
            total=1,
            fused_shared=fused,
            shared_prefix="shared",
        )
        w13, w2 = loaded(scheme, shape, stored)
        for expert in (1, 2):
            gate, up = (x @ w13[expert].t()).chunk(2, -1)
            total += (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
    gate, up = (x @ stored[f"shared.{part}_proj.weight"].t() for part in ("gate", "up"))
    wanted = (torch.nn.functional.silu(gate) * up) @ stored["shared.down_proj.weight"].t()
    error = (total - wanted).norm() / wanted.norm()
    assert error < (0.08 if scheme == "block_fp8" else 1e-5)


def loaded(scheme: str, shape: ExpertsShape, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return w13 and w2 in float32 of experts that have loaded ``stored``."""
    method: Any
    if scheme == "dense":
        method = CudaExperts(shape, torch.float32, "cpu")
    else:
        method = Fp8ExpertsCuda(shape, torch.float32, "cpu", False, None)  # type: ignore[arg-type]
    for target in method.targets():
        if target.name in stored:
            target.store(part_of(target, stored[target.name]))
    if scheme == "dense":
        return method.w13, method.w2
    every = [
        torch.stack([fp8.dequantize_weight(v, s, torch.float32) for v, s in zip(values, scales)])
        for values, scales in ((method.w13, method.scales13), (method.w2, method.scales2))
    ]
    return every[0], every[1]

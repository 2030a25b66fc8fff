"""The sample quantization scheme of a third party: int4 in groups of inputs, quantised at load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.api import EnginePlan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import LinearShape, QuantizationScheme, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan
from glowplug.core.testing.suites.quantization import QuantizationSuite
from tests.plan.test_rank_bytes import held_bytes
from tests.support.tiny import write_config
from tests.thirdparty.packages import (
    FOLDER,
    MOST_LINES,
    lines_of,
    private_imports,
)

NAME = "glowplug-int4"
PLUGIN = ["glowplug_int4.plugin"]
CONFIG: dict[str, Any] = {
    "weights": {"use": "random"},
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 512},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def _package() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER / NAME / "src"))
        yield


def engine(folder: Path, **config: Any) -> LLM:
    return LLM(model=str(folder), plugins=PLUGIN, **{**CONFIG, **config})


def shape_of(inputs: int, col_start: int = 0, full: int = 96) -> LinearShape:
    return LinearShape("m", ("m",), (24,), inputs, (0,), col_start, ((24, full),), bias=True)


def scheme(group: int = 32) -> Any:
    from glowplug_int4.plugin import Int4Options
    from glowplug_int4.runtime import Int4Groups

    return Int4Groups(Int4Options(group=group), bare_plan(), Worker(dtype=torch.float32))


class TestInt4(QuantizationSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
        from glowplug_int4.plugin import Int4Options
        from glowplug_int4.runtime import Int4Groups

        found: QuantizationScheme = Int4Groups(Int4Options(group=2), plan, worker)
        return found

    def value(self, weight: Tensor) -> Tensor:
        grouped = weight.unflatten(1, (-1, 2))
        scales = (grouped.abs().amax(-1, keepdim=True) / 7).half().clamp(min=1e-7).float()
        return ((grouped / scales).round().clamp(-8, 7) * scales).flatten(1)


@pytest.mark.parametrize("col_start", [0, 32])
def test_a_layer_multiplies_by_its_dequantised_weight(col_start: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(24, 96, generator=generator)
    weight[3] *= 100  # each row has scales of its own
    bias = torch.randn(24, generator=generator)
    method = scheme().linear(shape_of(64, col_start))
    tensors = {"m.weight": weight, "m.bias": bias}
    for target in method.targets():
        target.store(tensors[target.name][target.index])
    method.finalize()
    held = weight[:, col_start : col_start + 64]
    largest = held.unflatten(1, (2, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert ((method.dense() - held).abs() <= largest / 7 * 0.51).all()
    x = torch.randn(5, 64, generator=generator)
    wanted = x @ method.dense().T + (bias if col_start == 0 else 0)
    torch.testing.assert_close(method.apply(x), wanted)
    assert method.codes.numel() == 24 * 32 and method.scales.numel() == 24 * 2


def test_parts_of_groups_are_handed_back() -> None:
    made = scheme()
    assert made.covers("m", 24, 96) and not made.covers("m", 24, 100)
    assert made.linear(shape_of(64)) is not None
    assert made.linear(shape_of(48)) is None and made.linear(shape_of(64, 16)) is None


@pytest.mark.parametrize("name", ["llama", "v2"])
def test_the_plan_counts_the_bytes_of_layers_quantised_and_left_alone(
    name: str, tmp_path: Path
) -> None:
    """104 inputs are no whole number of groups of 32, 64 and 96 are; 8 divides them all."""
    folder = write_config(tmp_path, name, intermediate_size=104)
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    found = {}
    for group in (8, 32):
        config = {**CONFIG, "quantization": {"use": "int4_groups", "group": group}}
        plan = rank_plan({**config, "model": str(folder)}, plugins)
        with RankSet(plan, plugins) as ranks:
            (engine,) = ranks.engines
            planned = next(line.bytes for line in plan.budget if line.name == "weights")
            assert held_bytes(engine.runner.model) == planned
            found[group] = planned
    assert found[8] < found[32]


def test_two_ranks_leave_layers_alone_that_they_split_within_a_group(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama", intermediate_size=104)
    plugins = load_plugins([THREADS, *PLUGIN], entry_points=False)
    config = {**CONFIG, "model": str(folder), "quantization": {"use": "int4_groups", "group": 8}}
    config["parallel"] = [{"use": "tensor", "size": 2}]
    with RankSet(rank_plan(config, plugins), plugins) as ranks:
        model: Any = ranks.engines[0].runner.model
        down = model.layers[0].feed_forward.down.methods
        assert [type(one).__name__ for one in down] == ["DenseLinear"]  # 52 inputs on each rank


def test_it_serves_a_model_with_latent_attention_and_experts(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "v2")
    found = []
    for use in ("none", "int4_groups"):
        with engine(folder, quantization={"use": use}) as llm:
            (answer,) = llm.generate([[2, 3, 4, 5]], GREEDY)
            found.append(answer.logprobs.token[0])
    assert 0 < abs(found[0] - found[1]) < 0.4


def test_the_sample_is_small_and_imports_the_public_interface_only() -> None:
    assert private_imports(NAME) == []
    assert lines_of(NAME) <= MOST_LINES

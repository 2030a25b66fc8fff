"""Ranks that share every layer compute the result of one rank, read only their own slices, and load
independently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glowplug.core.errors import CollectiveError, WeightError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import Model, WeightTarget
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.startup.components import build_component, build_context, make_worker
from glowplug.core.startup.load_weights import load_model
from glowplug.core.testing.harness.build import DictSource, Stepper
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan, run_ranks, submit
from glowplug.plugins.weights import direct_read, safetensors_runtime
from glowplug.plugins.weights.safetensors import SafetensorsOptions
from glowplug.plugins.weights.safetensors_runtime import SafetensorsSource
from tests.support.tiny import write_config
from tests.unit.test_layers import random_tensors

#: uneven everywhere: 157 tokens are three slices of 40 and one of 37
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("v2", {"vocab_size": 157}),
    "v3": ("v3", {"vocab_size": 157, "attention_bias": True}),
    "v3 in FP8": ("v3_fp8", {"vocab_size": 157, "n_shared_experts": 2}),
    "llama, tied, two key heads": ("llama", {"vocab_size": 157}),
    "llama with biases and a head of its own": (
        "llama",
        {
            "vocab_size": 157,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "llama with one key head": ("llama", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins([THREADS], entry_points=False)


@pytest.fixture(autouse=True)
def torch_threads(quick_switches: None) -> Iterator[None]:
    """The number of torch's threads, restored after the test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def config_of(folder: Path, size: int, **more: Any) -> dict[str, Any]:
    collectives = {"use": "gloo", "timeout": 30} if size > 1 else {"use": "local"}
    return {
        "model": str(folder),
        "device": "cpu",
        "weights": {"use": "random"},
        "context_length": 256,
        "parallel": [{"use": "tensor", "size": size}],
        "collectives": collectives,
        **more,
    }


@dataclass
class CountingSource(DictSource):
    """A source that counts the bytes of every slice it returns, by tensor name."""

    tensors: dict[str, Tensor]
    read_names: list[str] = field(default_factory=list)
    read_bytes: dict[str, int] = field(default_factory=dict)

    def read(self, target: WeightTarget) -> Tensor:
        value = super().read(target)
        self.read_bytes[target.name] = value.numel() * value.element_size()
        return value


def build(
    plan: EnginePlan, plugins: PluginSet, rank: int, meeting: str
) -> tuple[Model, BuildContext]:
    """Build one rank's model, empty, over real process groups."""
    torch.set_num_threads(1)
    worker = make_worker(plan, rank, meeting)
    context = build_context(plan, plugins, worker)
    return build_component(plugins, plan.choice("model"), plan, worker).build(context), context


def on_ranks(
    plan: EnginePlan, plugins: PluginSet, folder: Path, work: Callable[[Model, BuildContext], Any]
) -> list[Any]:
    """Run ``work`` on every rank in a thread, and close its collectives afterwards."""
    meeting = f"file://{folder}/ranks-{plan.ranks}"

    def one(rank: int) -> Any:
        model, context = build(plan, plugins, rank, meeting)
        try:
            return work(model, context)
        finally:
            context.collectives.close()

    with ThreadPoolExecutor(plan.ranks) as pool:
        return list(pool.map(one, range(plan.ranks)))


def checkpoint(facts: ModelFacts) -> dict[str, Tensor]:
    return random_tensors(facts, "block_fp8" if facts.quant_method == "fp8" else "none")


def steps(model: Model, context: BuildContext) -> Tensor:
    """Return logits of two prompts, of a mixed step and of two that decode: [13, V]."""
    stepper = Stepper(model, context)
    found = [
        stepper.logits({0: [3, 1, 4, 1, 5, 9], 1: [2, 6]}),
        stepper.logits({1: [5], 2: [8, 9]}, decodes=1),
        stepper.logits({0: [5], 1: [3]}, decodes=2),
    ]
    return torch.cat(found)


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_logits_of_one(case: str, tmp_path: Path, plugins: PluginSet) -> None:
    name, changes = CASES[case]
    folder = write_config(tmp_path, name, **changes)
    tensors: dict[str, Tensor] = {}
    found: dict[int, list[Tensor]] = {}

    def work(model: Model, context: BuildContext) -> Tensor:
        load_model(model, DictSource(tensors), context.facts)
        return steps(model, context)

    for size in (1, 2, 4):
        plan = rank_plan(config_of(folder, size), plugins)
        assert plan.ranks == size
        tensors = tensors or checkpoint(plan.facts.model)
        found[size] = on_ranks(plan, plugins, tmp_path, work)
    wanted = found[1][0]
    assert wanted.shape == (13, plan.facts.model.vocab_size) and wanted.std() > 0.01
    for size in (2, 4):
        for got in found[size]:
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
            assert torch.equal(got, found[size][0]), "all ranks have the same logits"


REPLICATED = (
    "layernorm",
    "norm.weight",
    ".gate.",
    "q_a_proj",
    "kv_a_proj",
    "o_proj.bias",
    "down_proj.bias",
)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_its_slices_only(case: str, tmp_path: Path, plugins: PluginSet) -> None:
    """Split tensors are read once over all ranks together (key heads as often as ranks share
    them).
    """
    name, changes = CASES[case]
    plan = rank_plan(config_of(write_config(tmp_path, name, **changes), 4), plugins)
    facts = plan.facts.model
    tensors = checkpoint(facts)

    def work(model: Model, context: BuildContext) -> dict[str, int]:
        source = CountingSource(tensors)
        load_model(model, source, facts)
        return source.read_bytes

    read = on_ranks(plan, plugins, tmp_path, work)
    for tensor, value in tensors.items():
        total = value.numel() * value.element_size()
        times = 4 if any(part in tensor for part in REPLICATED) else 1
        if "k_proj" in tensor or "v_proj" in tensor:
            times = 4 // min(4, facts.num_kv_heads)
        if tensor.endswith(
            "_scale_inv"
        ):  # a block's scale is read by every rank that holds part of the block
            assert sum(rank[tensor] for rank in read) <= 4 * total
        else:
            assert sum(rank[tensor] for rank in read) == times * total, tensor


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_device_reads_its_rows_and_experts_from_the_files(
    whole_experts: bool, tmp_path: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of four reads a fourth of tensors that are split by rows, and a fourth of the experts.

    Of tensors that are split by columns it reads whole rows, and copies its columns only.
    """
    monkeypatch.setattr(direct_read, "GAP", 0)  # tiny tensors are neighbours
    monkeypatch.setattr(safetensors_runtime, "CUT_BYTES", 0)
    folder = write_config(tmp_path / "model", "v3")
    parallel = [{"use": "tensor", "size": 4}]
    if whole_experts:
        parallel.append({"use": "ep_moe", "size": 4})
    plan = rank_plan(config_of(folder, 4, parallel=parallel), plugins)
    facts = plan.facts.model
    tensors = checkpoint(facts)
    save_file(tensors, folder / "model.safetensors")
    targets = on_ranks(plan, plugins, tmp_path, lambda model, context: list(model.targets()))
    read = direct_read.os.preadv
    counts: list[int] = []
    copied: list[int] = []
    monkeypatch.setattr(direct_read.os, "preadv", lambda *given: counted(counts, read(*given)))
    copy = direct_read.DirectReader._copy
    monkeypatch.setattr(
        direct_read.DirectReader,
        "_copy",
        lambda self, buffer, place: copy(self, buffer, place[: counted(copied, len(place))]),
    )
    for rank in range(4):
        source = SafetensorsSource(SafetensorsOptions(), plan, make_worker(plan, rank))
        source.open(replace(facts, path=str(folder), tensors={}))
        counts.clear()
        copied.clear()
        sizes = {
            target.name: value.nbytes
            for target, value in source.through(
                direct_read.DirectReader("cpu", threads=2), targets[rank]
            )
        }
        source.close()
        assert sum(copied) == sum(sizes.values()), f"rank {rank}"
        total = 0
        for name, value in tensors.items():
            columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            if whole_experts and ".experts." in name:
                total += value.nbytes * (int(name.split(".experts.")[1].split(".")[0]) // 2 == rank)
            else:
                whole = columns or any(part in name for part in REPLICATED)
                total += value.nbytes // (1 if whole else 4)
        assert sum(counts) == total, f"rank {rank}"


def counted(counts: list[int], size: int) -> int:
    counts.append(size)
    return size


def test_an_online_quantization_reads_whole_blocks_of_its_slice(
    tmp_path: Path, plugins: PluginSet
) -> None:
    """It quantises them as one rank does: blocks are those of the checkpoint's matrix."""
    folder = write_config(
        tmp_path, "v3", hidden_size=256, intermediate_size=1024, num_hidden_layers=1
    )
    found: dict[int, list[Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    read: list[dict[str, int]] = []

    def work(model: Model, context: BuildContext) -> Tensor:
        source = CountingSource(tensors)
        load_model(model, source, context.facts)
        read.append(source.read_bytes)
        return steps(model, context)

    for size in (1, 2):
        plan = rank_plan(
            config_of(folder, size, quantization={"use": "block_fp8", "activations": "none"}),
            plugins,
        )
        tensors = tensors or random_tensors(plan.facts.model, "none")
        found[size] = on_ranks(plan, plugins, tmp_path, work)
    torch.testing.assert_close(found[2][0], found[1][0], atol=1e-5, rtol=0)
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert [rank[gate] for rank in read] == [
        tensors[gate].numel() * 4 // size for size in (1, 2, 2)
    ]


def test_loading_does_not_wait_for_other_ranks(tmp_path: Path, plugins: PluginSet) -> None:
    """Rank 1 begins only when the others have loaded, and fails: they notice it at their first
    step, at once.
    """
    plan = rank_plan(config_of(write_config(tmp_path, "v3"), 4), plugins)
    tensors = checkpoint(plan.facts.model)
    loaded, everyone_else = threading.Semaphore(0), 3

    class Truncated(DictSource):
        def read(self, target: WeightTarget) -> Tensor:
            raise WeightError("model.safetensors: file is truncated")

    def work(model: Model, context: BuildContext) -> str:
        late = context.worker.rank == 1
        for _ in range(everyone_else if late else 0):
            assert loaded.acquire(timeout=20), "a rank waits for another one to load"
        try:
            load_model(model, (Truncated if late else DictSource)(tensors), context.facts)
            loaded.release()
            steps(model, context)
        except (WeightError, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = on_ranks(plan, plugins, tmp_path, work)
    assert found[1] == "WeightError: model.safetensors: file is truncated"
    for rank in (0, 2, 3):
        assert found[rank].startswith(
            f"CollectiveError: all_reduce over tp failed on rank {rank} of 4"
        ), found[rank]


def test_a_whole_engine_over_process_groups(tmp_path: Path, plugins: PluginSet) -> None:
    """Greedy tokens agree for two ranks over gloo, four in memory, and ``tensor`` with one rank."""
    folder = write_config(tmp_path, "v3")
    requests = [submit(1, [5, 6, 7] * 9, 12), submit(2, [9], 5), submit(3, list(range(40)), 20)]
    small = {"scheduler": {"chunk_size": 16}, "attention": {"page_size": 4}}
    alone = run_ranks(config_of(folder, 1, **small), requests, plugins)
    assert [len(alone[id].tokens) for id in (1, 2, 3)] == [12, 5, 20]
    for config in (
        config_of(folder, 2, **small),
        {**config_of(folder, 4, **small), "collectives": {"use": "threads"}},
    ):
        with RankSet(rank_plan(config, plugins), plugins) as ranks:
            collected = ranks.run(requests)
            ranks.check_idle()
        assert {id: collected[id].tokens for id in collected} == {
            id: alone[id].tokens for id in alone
        }

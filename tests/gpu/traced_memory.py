"""The allocations of a step on one H200, found without a GPU: a rank over fake CUDA tensors, whose
live bytes are counted.

Kernels are not run. Triton's launches do nothing; libraries' functions return tensors of the real
ones' sizes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glowplug.core.engine.runner import Runner
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.startup import build_rank, components, warmup
from glowplug.core.step import to_device
from glowplug.core.step.batch import shape_of
from glowplug.core.step.kv_pool import KVPool
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

INSTALLED = {
    "sglang-kernel": "0.4.2.post2",
    "flashinfer-python": "0.6.11.post1",
    "triton": "3.6.0",
    "sgl-deep-gemm": "0.1.0",
}
BLOCK = 512  #: torch's allocator returns multiples of this many bytes
OURS = "glowplug"
MIB = 1 << 20


class Tally(TorchDispatchMode):
    """The bytes of live CUDA storages, and the allocation sites of those at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.most, self.at_most = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            self.see(torch.exp(args[0]))  # a device's implementation allocates this tensor
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                self.see(leaf)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if known is not None and not known[0].expired():
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._alive[key] = (StorageWeakRef(storage), size, _site())
        held = self.held()
        if held > self.most:
            self.most, self.at_most = held, self._by_site()

    def held(self) -> int:
        for key in [key for key, (ref, _, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]
        return sum(size for _, size, _ in self._alive.values())

    def restart(self) -> tuple[int, Counter[str]]:
        """Begin a new peak; return the held bytes, in total and by allocation site."""
        held, sites = self.held(), self._by_site()
        self.most, self.at_most = held, sites
        return held, sites

    def _by_site(self) -> Counter[str]:
        found = Counter[str]()
        for _, size, where in self._alive.values():
            found[where] += size
        return found


def _site() -> str:
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    ours = ((name, line) for name, line in frames if "/glowplug/" in name)
    return " < ".join(f"{Path(name).name}:{line}" for name, line in islice(ours, 4))


def plugins_of_the_card() -> PluginSet:
    made = load_plugins(entry_points=False)
    found = {
        name: INSTALLED[name] for name in made.packages & INSTALLED.keys()
    }  # other packages are not looked for
    made.__dict__["software"] = replace(made.software, packages={**made.software.packages, **found})
    return made


def planned(folder: Path, plugins: PluginSet, sheet: str = "1xh200", **config: Any) -> EnginePlan:
    given = {"model": str(folder), "weights": {"use": "random"}, "skip_tokenizer": True, **config}
    return make_plan(given, plugins=plugins, hardware=replace(read_sheet(sheet), packages=None))


class Traced:
    """A rank's model, attention and sampler over fake tensors; ``peak`` runs a step and returns its
    bytes.
    """

    def __init__(self, plan: EnginePlan, plugins: PluginSet, tally: Tally) -> None:
        self.plan, self.tally = plan, tally
        self.place = components.make_worker(plan, 0)
        self.builder = build_rank.RankBuilder(
            plan, self.place, plugins, lambda *_: None, lambda *_: None
        )
        self.context = components.build_context(plan, plugins, self.builder.worker)
        self.model, self.draft, speculative = self.builder._models(self.context)
        for made in (self.model, self.draft):
            if made is not None:
                made.finalize()
        self.runner = self.builder._runner(self.context, self.model, speculative)
        pool = KVPool(self.runner.attention.kv_layout(), warmup.FEW_PAGES, self.place.device)
        self.builder.memory._reserve(pool, self.runner.attention, speculative, self.runner.sampler)

    def peak(self, steps: Callable[..., None]) -> tuple[int, Counter[str]]:
        before, sites = self.tally.restart()
        with torch.inference_mode():
            steps(self.runner, self.plan)
        taken = self.tally.at_most.copy()
        taken.subtract(sites)
        return self.tally.most - before, +taken


def _run(runner: Runner, batch: Any, agreed: Any = None) -> None:
    batch.agreed = agreed or shape_of(batch)
    runner.sampler_rows.plan_step(batch)
    runner._complete(batch)
    _, hidden = runner.step(batch)
    if batch.prompt_logprobs is not None:
        with mock.patch.object(torch.Tensor, "numpy", lambda tensor: np.zeros(tensor.shape)):
            runner._prompt_logprobs(batch, hidden)


def _libraries() -> dict[str, ModuleType]:
    sgl, flash, mla, deep = (
        ModuleType(name)
        for name in ("sgl_kernel", "sgl_kernel.flash_attn", "sgl_kernel.flash_mla", "deep_gemm")
    )

    def varlen(q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
        given["out"] = (
            q.new_empty(*q.shape[:2], v.shape[2]) if given.get("out") is None else given["out"]
        )
        return given["out"], q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def with_cache(q: Any, k_cache: Any, v_cache: Any, **given: Any) -> Any:
        return q.new_empty(*q.shape[:3], v_cache.shape[-1])

    def metadata(lens: Any, queries: int, heads: int, *rest: Any) -> tuple[Any, Any]:
        return lens.new_empty(132, 8), lens.new_empty(len(lens) + 1)

    def mla_cache(
        q: Any, kv: Any, table: Any, lens: Any, lora: int, *rest: Any, **given: Any
    ) -> tuple[Any, Any]:
        rows, width, heads = q.shape[:3]
        parts = rows + 132
        keep = (
            q.new_empty(parts, heads * width, lora, dtype=torch.float32),
            q.new_empty(parts, heads * width),
        )
        del keep
        return q.new_empty(rows, width, heads, lora), q.new_empty(
            rows, heads, width, dtype=torch.float32
        )

    flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache = varlen, with_cache  # type: ignore[attr-defined]
    mla.get_mla_metadata, mla.flash_mla_with_kvcache = metadata, mla_cache  # type: ignore[attr-defined]
    sgl.flash_attn, sgl.flash_mla = flash, mla  # type: ignore[attr-defined]
    sgl.fp8_blockwise_scaled_mm = lambda x, w, *rest: x.new_empty(  # type: ignore[attr-defined]
        len(x), w.shape[1], dtype=rest[-1]
    )
    sgl.fp8_blockwise_scaled_grouped_mm = lambda *_: None  # type: ignore[attr-defined]
    deep.fp8_gemm_nt = deep.m_grouped_fp8_gemm_nt_contiguous = lambda *_: None  # type: ignore[attr-defined]
    deep.m_grouped_fp8_gemm_nt_masked = lambda *_: None  # type: ignore[attr-defined]
    return {module.__name__: module for module in (sgl, flash, mla, deep)}


def _get(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    """Read an element through torch's functions: Python's indexing uses a guard of a device that
    does not exist.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    at = next((i for i, part in enumerate(keys) if part is Ellipsis), None)
    if at is not None:
        named = sum(part is not None and part is not Ellipsis for part in keys)
        keys[at : at + 1] = [slice(None)] * (tensor.dim() - named)
    dim, tensors = 0, {}
    for part in keys:
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, torch.Tensor):
            tensors[dim], dim = part, dim + 1
        else:
            tensor = torch.ops.aten.select(tensor, dim, int(part))
    if tensors:
        return torch.ops.aten.index(tensor, [tensors.get(at) for at in range(max(tensors) + 1)])
    return tensor


@contextmanager
def fake_card() -> Iterator[Tally]:
    """Make tensors of device "cuda" fake and Triton's launches empty within the block."""
    from triton.runtime.jit import JITFunction

    from glowplug.kernels.launch import dependent_launch as dependent, tuned_tables as tuned
    from glowplug.kernels.moe import gemm_hopper as moe_gemm_hopper

    fake, tally = FakeTensorMode(allow_non_fake_inputs=True), Tally()
    from_numpy, original = torch.from_numpy, to_device.send

    def sent(parts: Any, device: Any) -> tuple[Any, ...]:
        widths = [to_device.device_dtype(part) for part in parts]
        words = [
            len(part) * width.itemsize // to_device.WORD
            for part, width in zip(parts, widths, strict=True)
        ]
        sizes = [-(-size // to_device.ALIGNED) * to_device.ALIGNED for size in words]
        pieces = torch.empty(sum(sizes), dtype=torch.int32, device="cuda").split(sizes)
        return tuple(
            piece[:size].view(to_device.ON_DEVICE[width])
            for piece, size, width in zip(pieces, words, widths, strict=True)
        )

    with ExitStack() as stack:

        def patch(where: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, value))

        for (
            name,
            module,
        ) in _libraries().items():  # without patch.dict, which would undo imports made meanwhile
            sys.modules[name] = module
        patch(JITFunction, "run", lambda *args, **given: None)
        patch(dependent, "options", lambda: {"DEPENDENT": True, "launch_pdl": True})
        patch(moe_gemm_hopper, "processors", lambda device: 132)
        patch(tuned, "device_name", lambda: "NVIDIA_H200")
        patch(tuned, "triton_version", lambda: "3.6")
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        patch(warmup, "_run", _run)
        patch(
            torch,
            "from_numpy",
            lambda array: torch.empty(array.shape, dtype=from_numpy(array[:0]).dtype),
        )
        patch(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch(torch.Tensor, "cpu", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        patch(torch.Tensor, "copy_", lambda tensor, *_, **given: tensor)
        patch(torch.Tensor, "__getitem__", _get)
        patch(torch.Tensor, "__setitem__", lambda *_: None)
        for module in [
            m
            for name, m in list(sys.modules.items())
            if name.startswith(OURS) and hasattr(m, "send")
        ]:
            if module.send is original:
                patch(module, "send", sent)
        stack.enter_context(fake)
        stack.enter_context(tally)
        yield tally


TINY = {"dtype": "bfloat16", "scheduler": {"last_layer": "all"}}
FULL: dict[str, Any] = {"context_length": 8192, "scheduler": {"max_running_requests": 512}}
LONG = {"context_length": 65536, "scheduler": {"max_running_requests": 8}}
MASKED: dict[str, Any] = {
    "context_length": 8192,
    "scheduler": {"max_running_requests": 256, "chunk_size": 512},
}
#: name -> (shape that ships or tiny model, layers of a shape, configuration). Only the sampled
#: tokens of prompts go through the last layer, so another layer is the widest
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "v2-lite": ("deepseek-v2-lite", 4, FULL),
    "v2-lite, long": ("deepseek-v2-lite", 4, LONG),
    "v2-lite, few tokens": (
        "deepseek-v2-lite",
        4,
        {"scheduler": {"max_running_requests": 16, "chunk_size": 1536}},
    ),
    "v2-lite, triton_mla": ("deepseek-v2-lite", 4, {**LONG, "attention": {"use": "triton_mla"}}),
    "v2-lite, dense layer": (
        "deepseek-v2-lite",
        1,
        {**FULL, "scheduler": {**FULL["scheduler"], "last_layer": "all"}},
    ),
    "v2-lite, int8": ("deepseek-v2-lite", 4, {**FULL, "quantization": {"use": "w8a8_int8"}}),
    "v3": ("deepseek-v3", 5, FULL),
    "v3, long": ("deepseek-v3", 5, LONG),
    "v3, own experts": (
        "deepseek-v3",
        6,
        {**FULL, "quantization": {"use": "block_fp8", "experts": "triton"}},
    ),
    "v3, masked experts": (
        "deepseek-v3",
        6,
        {**MASKED, "quantization": {"use": "block_fp8", "experts": "deep_gemm_masked"}},
    ),
    "v3, cutlass experts": (
        "deepseek-v3",
        6,
        {**FULL, "quantization": {"use": "block_fp8", "experts": "cutlass"}},
    ),
    "v3, few tokens": (
        "deepseek-v3",
        5,
        {**FULL, "scheduler": {"max_running_requests": 16, "chunk_size": 1024}},
    ),
    "tiny v2": ("v2", 0, TINY),
    "tiny v3": ("v3", 0, TINY),
    "tiny v3_fp8": ("v3_fp8", 0, TINY),
    "tiny llama": ("llama", 0, TINY),
}


def written(folder: Path, name: str, layers: int) -> Path:
    """Write a folder with the config.json of a case."""
    if not layers:
        return write_config(folder, name)
    shape = json.loads((ROOT / "models" / "shapes" / f"{name}.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**shape, "num_hidden_layers": layers, "num_nextn_predict_layers": 0})
    )
    return folder


def case(name: str, plugins: PluginSet, show: bool) -> dict[str, tuple[int, int]]:
    """Return (planned, traced) bytes by line; the line of graphs only with ``show``."""
    shape, layers, config = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(written(Path(folder), shape, layers), plugins, **config)
    lines = {line.name: line.bytes for line in plan.budget}
    steps = {"activations": warmup.most_tokens, "logits": warmup.most_logits}
    if show:
        sizes = [min(512, plan.sizes.max_running)]
        steps["graphs"] = partial(warmup.most_captured, batch_sizes=sizes)
    found = {}
    with fake_card() as tally:
        traced = Traced(plan, plugins, tally)
        for line, run in steps.items():
            peak, sites = traced.peak(run)
            found[line] = lines[line], peak
            if show:
                print(
                    f"{name}, {line}: planned {lines[line] / MIB:.1f}, traced {peak / MIB:.1f} MiB"
                )
                for where, size in sites.most_common(12):
                    print(f"   {size / MIB:9.2f}  {where}")
    return found


def main() -> None:
    """Print planned and traced bytes of the named cases, or of all, as JSON; with ``--show`` also
    those of graphs, and the largest allocations.
    """
    wanted, plugins = [name for name in sys.argv[1:] if name != "--show"], plugins_of_the_card()
    print(
        json.dumps({name: case(name, plugins, "--show" in sys.argv) for name in wanted or CASES}),
        flush=True,
    )


if __name__ == "__main__":
    main()

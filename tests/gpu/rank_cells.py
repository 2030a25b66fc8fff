"""The combinations that are tried on two ranks: every layout of tensor parallelism, expert
parallelism and data-parallel attention, with the switches of ``tests.gpu.cells``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from glowplug.core.plugin.registry import PluginSet
from tests.gpu.cells import AGREEING, BOUNDS, CONTEXT, KINDS, ROWS, Bound, Cell, named, write_models
from tests.support.layouts import Layout, layout

RANKS = 2
BLOCKED = ("v3_fp8", "v2_awq")  #: models whose weights have scales of 128 channels
WIDE_EXPERTS = {"moe_intermediate_size": 2 * 128}
PLUGINS = (*AGREEING, "tests.plugins.replaying")
#: (model, dtype of the KV cache) of the product of all switches
FORMATS = (("v3", "auto"), ("v3_fp8", "auto"), ("v3_fp8", "fp8_e4m3"))
#: seconds without a sign of life, and in an exchange, after which a combination has failed
PATIENCE = 180.0
#: device -> graph runner; on a CPU captured steps are functions
GRAPHS = {"cuda": "cuda_graph", "cpu": "replaying"}
#: few sizes to capture, so that a combination takes seconds
CAPTURED = {"batch_sizes": [2, ROWS], "prefill": True, "prefill_tokens": [64, CONTEXT]}


@dataclass(frozen=True)
class RankCell(Cell):
    """One combination of two ranks.

    Attributes:
        layout: "tp", "ep", "dp" or "ep+dp"; the last three are with tensor parallelism, too.
        exchange: the option ``exchange`` of ``ep_moe``.
        copies: redundant experts of each layer.
        collectives: the component that exchanges data.
        dtype: "auto": that of the device, see ``Cell.config``.
    """

    layout: str = "tp"
    exchange: str = "auto"
    copies: int = 0
    collectives: str = "auto"
    dtype: str = "auto"

    @property
    def name(self) -> str:
        said = [
            self.layout,
            self.exchange if self.exchange != "auto" else "",
            f"copies{self.copies}" if self.copies else "",
            self.collectives if self.collectives != "auto" else "",
            self.dtype if self.dtype != "auto" else "",
            super().name,
        ]
        return "-".join(part for part in said if part)

    @property
    def strategies(self) -> Layout:
        """The sections ``[[parallel]]``."""
        experts: dict[str, Any] = {"exchange": self.exchange} if self.exchange != "auto" else {}
        if self.copies:
            experts["redundant_experts"] = self.copies
        parts = self.layout.split("+")
        ep, dp = (RANKS if part in parts else 0 for part in ("ep", "dp"))
        return layout(RANKS, ep, dp, **experts)

    def runs_on(self, device: str) -> bool:
        """Return whether the cell can be tried on a device.

        On a CPU a step's results are not copied, and functions in place of graphs overwrite them
        in the next step, which ``overlap`` launches first.
        """
        return device != "cpu" or self.graphs == "eager" or not self.overlap

    def bound(self, device: str) -> Bound:
        """Return the permitted error: exact in float32, except where activations are rounded."""
        found = super().bound(device)
        exact = self.dtype == "float32" and found != BOUNDS["fp8"]
        return BOUNDS["exact"] if exact else found

    def config(self, folder: Path, device: str) -> dict[str, Any]:
        found = super().config(folder, device)
        found["parallel"] = self.strategies
        found["executor"] = {"use": "multiprocess", "watchdog": PATIENCE}
        if device == "cpu":
            found["executor"]["oversubscribe"] = True
        found["collectives"] = {"timeout": PATIENCE}
        if self.collectives != "auto":
            found["collectives"]["use"] = self.collectives
        if self.dtype != "auto":
            found["dtype"] = self.dtype
        if self.graphs != "eager":
            found["graphs"] |= CAPTURED
        if self.ops == "torch_compile":
            found["ops"]["max_batch"] = ROWS
        return found


def write_rank_models(folder: Path, small: bool = False) -> Path:
    """Write the models of ``tests.gpu.cells``, with experts whose width ranks can divide.

    ``small``: see ``write_models``.
    """
    write_models(folder, small)
    for name in BLOCKED:
        file = folder / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **WIDE_EXPERTS}))
    return folder


def layouts(plugins: PluginSet) -> list[RankCell]:
    """Return a cell of each layout, with every exchange that ``ep_moe`` has by name.

    Exchanges that move no tokens in a layout are left out there, since "auto" does the same.
    """
    strategy = next(
        component
        for component, _, _ in plugins.components("parallel")
        if component.name == "ep_moe"
    )
    plain = RankCell("v3", "auto")
    found = [replace(plain, layout="tp"), replace(plain, layout="dp")]
    for name, dp in (("ep", 1), ("ep+dp", RANKS)):
        mesh = {"tp": RANKS, "ep": RANKS, "dp": dp}
        for exchange in get_args(strategy.options.model_fields["exchange"].annotation):
            options = strategy.options(size=RANKS, exchange=exchange)
            if exchange == "auto" or strategy.offers.exchanges(options, mesh):
                found.append(replace(plain, layout=name, exchange=exchange))
    return found + [
        replace(plain, layout=name, copies=4, exchange=exchange)
        for name in ("ep", "ep+dp")
        for exchange in ("auto", "all_to_all_static")
    ]


def rank_matrix(plugins: PluginSet, device: str) -> list[Cell]:
    """Return the whole matrix, admitted or not: the switches of every layout in full, the other
    axes one at a time.
    """
    every = layouts(plugins)
    graphs = ("eager", GRAPHS[device])
    found = [
        replace(
            one,
            model=model,
            kv_dtype=kv_dtype,
            steps=steps,
            radix=radix,
            chunked=chunked,
            overlap=overlap,
            graphs=graph,
        )
        for one, (model, kv_dtype), steps, radix, chunked, overlap, graph in itertools.product(
            every,
            FORMATS,
            (0, 1, 3),
            (True, False),
            (False, True),
            (True, False),
            graphs,
        )
    ]
    for one, graph, steps in itertools.product(every, graphs, (0, 1)):
        base = replace(one, graphs=graph, steps=steps, overlap=device != "cpu")
        found += _one_at_a_time(base, plugins, device)
    return [one for one in dict.fromkeys(found) if one.runs_on(device)]


def _one_at_a_time(one: RankCell, plugins: PluginSet, device: str) -> Sequence[RankCell]:
    """Return ``one`` with each value of the axes that the product of switches leaves at "auto"."""
    found = [replace(one, dtype="float32"), replace(one, model="v3_fp8", dtype="float32")]
    found += [replace(one, ops=ops) for ops in named(plugins, "ops", device)]
    found += [
        replace(one, model="v3_fp8", ops=ops)
        for ops in named(plugins, "ops", device)
        if ops == "torch_compile"
    ]
    found += [
        replace(one, attention=backend, model=model)
        for model in ("v3", "llama")
        for backend in named(plugins, "attention", device, KINDS.get(model, "mla"))
    ]
    found += [replace(one, kv_dtype="fp8_e4m3")]
    found += [replace(one, collectives=name) for name in named(plugins, "collectives", device)]
    found += [replace(one, quantization=scheme) for scheme in ("block_fp8", "w8a8_int8")]
    found += [replace(one, model=model) for model in ("v2", "v2_awq", "v3_int8")]
    return found

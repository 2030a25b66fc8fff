"""The combinations that are tried on one GPU: models of the libraries' head sizes, cells, and the
admitted ones.

Each model has one dense and one MoE layer, and weights for which drafts are sometimes accepted;
``gpu_combinations.py`` runs the cells.
"""

from __future__ import annotations

import itertools
import json
import random
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glowplug import PlanRefused
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet
from tests.support.tiny import CONFIGS

VOCAB, CONTEXT, ROWS, KV_TOKENS, SEED = 509, 256, 6, 2048, 5
AGREEING = ("tests.plugins.agreeing",)
WEIGHTS = {"use": "agreeing", "seed": SEED, "spread": 1.2}
_MLA = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "v2": {**CONFIGS["v2"], **_MLA},
    "v3": {**CONFIGS["v3"], **_MLA, "q_lora_rank": 256, "num_nextn_predict_layers": 1},
    "v3_fp8": {**CONFIGS["v3_fp8"], **_MLA, "q_lora_rank": 256, "num_nextn_predict_layers": 1},
    "v2_awq": {
        **CONFIGS["v2"],
        **_MLA,
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
        },
    },
    "v3_int8": {
        **CONFIGS["v3"],
        **_MLA,
        "q_lora_rank": 256,
        "quantization_config": {"quant_method": "w8a8_int8"},
    },
    "llama": {
        **CONFIGS["llama"],
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
    },
}
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "head_dim",
    "q_lora_rank",
)
KINDS = {"llama": "mha"}
SCHEMES = {
    "v3_fp8": "block_fp8",
    "v2_awq": "awq",
    "v3_int8": "w8a8_int8",
}  #: schemes of checkpoints that are quantised
NARROW = {
    "v2_awq": "v2",
    "v3_int8": "v3",
}  #: models that each backend runs once -> the model with the same sizes
#: the reference's treatment of quantised weights: dequantised, activations not rounded
DENSE: dict[str, dict[str, Any]] = {
    "fp8": {"use": "block_fp8", "activations": "none"},
    "int8": {"use": "w8a8_int8", "activations": "none"},
    "awq": {"use": "awq", "dequantize": True},
}


@dataclass(frozen=True)
class Bound:
    """The permitted error of a number format.

    Attributes:
        regret: Distance of a chosen token's log-probability below the reference's best (mean over
            all tokens).
        shift: Distance of the engine's own log-probability from the reference's (median).
    """

    regret: float
    shift: float


BOUNDS = {"exact": Bound(1e-3, 1e-3), "bfloat16": Bound(0.02, 0.03), "fp8": Bound(0.08, 0.12)}


@dataclass(frozen=True)
class Cell:
    """One combination: ``steps`` is NextN's, 0 for none; ``provider`` names the GEMM provider
    ("experts=cutlass").
    """

    model: str
    attention: str
    quantization: str = "auto"
    ops: str = "auto"
    kv_dtype: str = "auto"
    absorbed: str = "auto"
    provider: str = "auto"
    graphs: str = "eager"
    steps: int = 0
    radix: bool = True
    chunked: bool = False
    overlap: bool = True

    @property
    def name(self) -> str:
        chosen = [
            value for value in (self.quantization, self.ops, self.kv_dtype) if value != "auto"
        ]
        chosen += [f"absorbed_{self.absorbed}"] if self.absorbed != "auto" else []
        chosen += [self.provider.replace("=", "_")] if self.provider != "auto" else []
        said = [
            self.model,
            self.attention,
            *chosen,
            self.graphs,
            f"nextn{self.steps}" if self.steps else "",
            "" if self.radix else "no_radix",
            "chunked" if self.chunked else "",
            "" if self.overlap else "no_overlap",
        ]
        return "-".join(part for part in said if part)

    @property
    def weights(self) -> str:
        """Name of the weights: of the model, as the scheme stores them."""
        return f"{self.model}-{self.quantization}"

    def bound(self, device: str) -> Bound:
        if device == "cpu":
            return BOUNDS["exact"]
        rough = any(name in f"{self.weights} {self.kv_dtype}" for name in ("fp8", "int8"))
        return BOUNDS["fp8" if rough else "bfloat16"]

    def config(self, folder: Path, device: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model": str(folder / self.model),
            "skip_tokenizer": True,
            "device": device,
            "context_length": CONTEXT,
            "dtype": "float32" if device == "cpu" else "bfloat16",
            "memory": {"kv_tokens": KV_TOKENS},
            "attention": {
                "use": self.attention,
                "kv_dtype": self.kv_dtype,
                **({} if self.absorbed == "auto" else {"absorbed": self.absorbed}),
            },
            "weights": WEIGHTS,
            "cache": {"use": "radix" if self.radix else "none"},
            "graphs": {"use": self.graphs},
            "scheduler": {
                "max_running_requests": ROWS,
                "chunk_size": 48 if self.chunked else CONTEXT,
                "overlap": self.overlap,
            },
        }
        if self.quantization != "auto":
            found["quantization"] = {"use": self.quantization}
        if self.provider != "auto":
            option, _, value = self.provider.partition("=")
            found["quantization"] = {"use": SCHEMES[self.model], option: value}
        if self.ops != "auto":
            found["ops"] = {"use": self.ops}
        if self.steps:
            found["speculative"] = {"use": "nextn", "adaptive": False, "steps": self.steps}
        return found


def named(plugins: PluginSet, slot: str, device: str, kind: str = "") -> list[str]:
    """Return the components of a slot that run on ``device``; of attention, those of ``kind``."""
    return [
        component.name
        for component, _, _ in plugins.components(slot)
        if device in component.offers.devices
        and (not kind or kind in getattr(component.offers, "kinds", ()))
    ]


def providers(plugins: PluginSet, scheme: str) -> list[str]:
    """Return every provider that the scheme's options can name, as ``option=value``."""
    options = next(
        component.options
        for component, _, _ in plugins.components("quantization")
        if component.name == scheme
    )
    return [
        f"{option}={value}"
        for option in ("gemm", "experts")
        if option in options.model_fields
        for value in typing.get_args(options.model_fields[option].annotation)
        if value != "auto"
    ]


def matrix(plugins: PluginSet, device: str) -> list[Cell]:
    """Return the whole matrix, admitted or not."""
    found = []
    absorbing = [
        component.name
        for component, _, _ in plugins.components("attention")
        if "absorbed" in component.options.model_fields and device in component.offers.devices
    ]
    for model in MODELS:
        backends = named(plugins, "attention", device, KINDS.get(model, "mla"))
        if model in SCHEMES:
            own = "triton_mla" if "triton_mla" in backends else backends[0]
            found += [
                Cell(model, own, provider=provider, graphs=graph, steps=steps)
                for provider, graph, steps in itertools.product(
                    providers(plugins, SCHEMES[model]),
                    named(plugins, "graphs", device),
                    (0, 1) if model.startswith("v3") else (0,),
                )
            ]
        if model in NARROW:
            found += [
                Cell(model, backend, graphs=graph)
                for backend, graph in itertools.product(backends, named(plugins, "graphs", device))
            ]
            continue
        quantizations = ["auto"] if model.endswith("fp8") else ["auto", "block_fp8"]
        graphs = named(plugins, "graphs", device)
        switches = itertools.product((0, 1, 3), (True, False), (False, True), (True, False))
        for backend, quantization, graph, (steps, *rest) in itertools.product(
            backends, quantizations, graphs, list(switches)
        ):
            found.append(
                Cell(
                    model,
                    backend,
                    quantization,
                    graphs=graph,
                    steps=steps,
                    radix=rest[0],
                    chunked=rest[1],
                    overlap=rest[2],
                )
            )
        found += [
            Cell(model, backend, "w8a8_int8", graphs=graph)
            for backend, graph in itertools.product(backends, graphs)
            if not model.endswith("fp8")
        ]
        found += [
            Cell(model, backend, ops=ops, graphs=graph)
            for backend, ops, graph in itertools.product(
                backends, named(plugins, "ops", device), graphs
            )
        ]
        found += [
            Cell(model, backend, absorbed="fp8", graphs=graph, steps=steps)
            for backend, graph, steps in itertools.product(
                absorbing if model == "v3_fp8" else (), graphs, (0, 1)
            )
        ]
        found += [
            Cell(model, backend, kv_dtype="fp8_e4m3", graphs=graph, steps=steps)
            for backend, graph, steps in itertools.product(backends, graphs, (0, 1))
        ]
    return found


def admitted(
    cells: Sequence[Cell],
    plugins: PluginSet,
    folder: Path,
    device: str,
    hardware: HardwareFacts | None = None,
) -> tuple[list[Cell], dict[str, int]]:
    """Return the cells that have a plan, and the reasons of the others with their counts.

    ``hardware``: facts of a sheet; None for this machine.
    """
    kept, reasons = [], {}
    for cell in cells:
        try:
            make_plan(
                cell.config(folder, device),
                plugins=plugins,
                hardware=hardware,
                contributed={"executor.use": "inline"},
            )
            kept.append(cell)
        except PlanRefused as refused:
            reason = refused.refusals[0].reason.replace(f"{folder}/", "")
            why = f"{refused.refusals[0].field}: {reason}"
            reasons[why] = reasons.get(why, 0) + 1
    return kept, reasons


def pairwise(cells: Sequence[Cell], seed: int, most: int = 1 << 30) -> list[Cell]:
    """Return a sample of at most ``most`` cells in which, if possible, every two values that occur
    together in a cell do so.
    """
    rng = random.Random(seed)
    pool = list(cells)
    rng.shuffle(pool)
    pairs = {cell: _pairs(cell) for cell in pool}
    open_ = set().union(*pairs.values()) if pool else set()
    chosen: list[Cell] = []
    while open_ and len(chosen) < most:
        best = max(pool, key=lambda cell: len(pairs[cell] & open_))
        chosen.append(best)
        open_ -= pairs[best]
    return chosen


def _pairs(cell: Cell) -> frozenset[Any]:
    values = list(asdict(cell).items())
    return frozenset(itertools.combinations(values, 2))


def write_models(folder: Path, small: bool = False) -> Path:
    """Write the models; ``small`` gives heads of no library's size, for a CPU."""
    for name, sized in MODELS.items():
        tiny = CONFIGS[NARROW.get(name, name)]
        config = {**sized, **{key: tiny[key] for key in SIZES if key in tiny}} if small else sized
        if small and name == "v2_awq":  # its small matrices are whole numbers of such groups
            config["quantization_config"] = {**config["quantization_config"], "group_size": 32}
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder

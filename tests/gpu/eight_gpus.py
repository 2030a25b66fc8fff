"""Setups of two, four and eight GPUs, and their plans on the machines that fact sheets describe.

``whole_v3.py`` writes the record of the plans and measures the setups.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.entrypoints.bench.others.layout import RankLayout
from glowplug.entrypoints.bench.ranks.exchange_times import step_exchanges
from glowplug.entrypoints.cli.flags.command_line import read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.main import COMMANDS
from tests.support.published_commands import LINES, plugins
from tests.support.source_tree import ROOT

SHAPES = ROOT / "models" / "shapes"
V3, V3_16, V3_SLICE, LITE, TINY = (
    "deepseek-v3",
    "deepseek-v3-16-layers",
    "deepseek-v3-slice",
    "deepseek-v2-lite",
    "tiny-v3",
)
#: model -> file with its shape, and values of config.json that differ from it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    V3: ("deepseek-v3.json", {}),
    V3_16: ("deepseek-v3.json", {"num_hidden_layers": 16}),
    V3_SLICE: ("deepseek-v3-slice.json", {}),
    LITE: ("deepseek-v2-lite.json", {}),
    TINY: ("tiny-v3.json", {"num_nextn_predict_layers": 1}),
}
ACCEPT_LENGTH = 1.85  #: tokens of a verify step with one draft, on average
DRAFTS = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1")
BATCHES = (1, 128)  #: sequences of the decode steps whose exchanges are recorded


@dataclass(frozen=True)
class Setup:
    """A model on the ranks of a machine.

    Attributes:
        name: name in records.
        model: a key of ``MODELS``.
        ranks: number of ranks.
        options: options of ``glowplug serve`` besides the model and its weights.
        layout: how the ranks share the model; None: as ``options`` say.
        drafts: one draft a step by the checkpoint's next-token layer.
    """

    name: str
    model: str
    ranks: int
    options: tuple[str, ...]
    layout: RankLayout | None = None
    drafts: bool = False


def layouts(ranks: int) -> dict[str, RankLayout]:
    """Return the layouts of a whole V3, by name."""
    return {
        f"tp {ranks}": RankLayout(ranks),
        f"tp {ranks}, ep {ranks}": RankLayout(ranks, ranks),
        f"dp {ranks}, ep {ranks}": RankLayout(ranks, ranks, ranks),
    }


def of_v3(model: str, ranks: int) -> Iterator[Setup]:
    """Yield each layout without and with drafts."""
    for name, layout in layouts(ranks).items():
        for drafts in (False, True):
            options = (*layout.ours(), *(DRAFTS if drafts else ()))
            title = f"{model}, {name}{', nextn' if drafts else ''}"
            yield Setup(title, model, ranks, options, layout, drafts)


def of_lite(ranks: int) -> Iterator[Setup]:
    """Yield V2-Lite with tensor, data and expert parallelism."""
    for name, layout in {
        f"tp {ranks}": RankLayout(ranks),
        f"dp {ranks}": RankLayout(ranks, 1, ranks),
        f"ep {ranks}": RankLayout(ranks, ranks),
    }.items():
        yield Setup(f"{LITE}, {name}", LITE, ranks, tuple(layout.ours()), layout)


# ---- the published ablation ----------------------------------------------------------------------

EP = ("--enable-ep-moe", "--ep-size", "16")
DP = ("--enable-dp-attention", "--dp-size", "16")
NEXTN = (*DRAFTS, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2")
COMPILED = ("--enable-torch-compile", "--torch-compile-max-bs", "1")
FLASHINFER, EAGER = "--enable-flashinfer-mla", "--disable-cuda-graph"
LIMIT = ("--max-running-requests", "768")
#: rows of the ablation that have figures and are not among the published command lines
UNPUBLISHED = (
    EP,
    (*EP, FLASHINFER),
    (*NEXTN, *EP, EAGER),
    (*EP, *DP),
    (*COMPILED, *EP, EAGER),
    (*DP, FLASHINFER),
)
#: options of the published lines that this engine's setups have in another place, with the number
#: of their values; the draft is the checkpoint's own next-token layer
ELSEWHERE = {
    **dict.fromkeys(("--model-path", "--tp", "--nnodes", "--node-rank", "--dist-init-addr"), 1),
    **dict.fromkeys(("--speculative-draft", "--max-running-requests"), 1),
    "--trust-remote-code": 0,
}


def ablation_rows() -> list[tuple[str, ...]]:
    """Return the options of the published ablation's rows, for 16 ranks: ten command lines that it
    publishes, then six combinations that only its tables name.
    """
    published = [tuple(_kept(line.words)) for line in LINES if line.source == "S0"]
    return [*published, *UNPUBLISHED]


def _kept(words: Sequence[str]) -> Iterator[str]:
    skipped = 0
    for word in words:
        if skipped or word in ELSEWHERE:
            skipped = skipped - 1 if skipped else ELSEWHERE[word]
        else:
            yield word


def of_ablation(model: str, ranks: int) -> Iterator[Setup]:
    """Yield the rows of the published ablation, with its 16 ranks replaced by ``ranks``."""
    hosts = ("--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "10.0.0.1:5000")
    for number, row in enumerate(ablation_rows(), 1):
        words = [str(ranks) if word == "16" else word for word in row]
        options = ("--tp-size", str(ranks), *(hosts if ranks == 16 else ()), *LIMIT, *words)
        name = f"S0 row {number}, {model}, {ranks} GPUs"
        yield Setup(name, model, ranks, options, drafts="NEXTN" in row)


def all_setups() -> list[Setup]:
    """Return every setup whose plan is recorded."""
    return [
        *of_v3(V3, 8),
        *of_v3(V3_16, 4),
        *of_lite(4),
        *of_ablation(V3_16, 4),
        *of_ablation(V3, 16),
        *of_ablation(V3, 8),
        *of_ablation(V3_SLICE, 2),
    ]


# ---- plans ---------------------------------------------------------------------------------------


def write_model(name: str, folder: Path, tokenizer: Path | None = None) -> Path:
    """Write the config.json of a model to its folder in ``folder``, and return this one.

    ``tokenizer``: folder whose tokenizer is copied.
    """
    shape, changes = MODELS[name]
    config = json.loads((SHAPES / shape).read_text()) | changes
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    for file in tokenizer.glob("tokenizer*.json") if tokenizer is not None else ():
        shutil.copy(file, target)
    return target


def machine(ranks: int) -> HardwareFacts:
    """Return the smallest machine with so many H200."""
    if ranks > 8:
        return read_sheet("2x8xh200")
    if ranks > 4:
        return read_sheet("8xh200")
    four = read_sheet("4xh200")
    return replace(four, devices=four.devices[:ranks], name=f"{ranks} x H200")


def plan_of(setup: Setup, folder: Path) -> EnginePlan:
    """Return the plan of a setup with random weights. ``folder``: place for files.

    Raises:
        PlanRefused: the setup is refused.
    """
    sheet = folder / f"{setup.ranks}.json"
    sheet.write_bytes(msgspec.json.encode(machine(setup.ranks)))
    parser = Parser(prog="glowplug serve")
    importlib.import_module(COMMANDS["serve"].module).configure(parser)
    model = write_model(setup.model, folder)
    words = ("--model", str(model), "--load-format", "dummy", "--facts", str(sheet))
    return read_command_line(parser.parse_args([*words, *setup.options]), plugins()).plan()


def planned(setup: Setup, folder: Path) -> dict[str, Any]:
    """Return the record of a setup's plan, or of the refusals. ``folder``: place for files."""
    found: dict[str, Any] = {
        "machine": machine(setup.ranks).name,
        "options": f"--model {setup.model} {' '.join(setup.options)}",
    }
    try:
        plan = plan_of(setup, folder)
    except PlanRefused as refused:
        reasons = [f"{one.field}: {one.reason}; fix: {one.fix}" for one in refused.refusals]
        return found | {"refused": reasons}
    return found | _summary(plan)


def _summary(plan: EnginePlan) -> dict[str, Any]:
    """Return a plan's bytes by name, KV tokens, graphs and exchanges."""
    sizes = plan.sizes
    graphs = plan.choice("graphs").name
    decided = {one.field: one.value for one in plan.decisions}
    lines = {line.name: line.bytes for line in plan.budget if not line.place}
    return {
        "mesh": {axis: size for axis, size in plan.mesh.items() if size > 1},
        "chosen": {
            slot: plan.choice(slot).name
            for slot in ("attention", "quantization", "collectives", "speculative", "ops")
        },
        "bytes_per_rank": lines,
        "total_bytes_per_rank": sum(lines.values()),
        "device_bytes": min(device.memory for device in plan.facts.hardware.devices),
        "kv_tokens_per_group": (sizes.num_pages - 1) * sizes.page_size,
        "groups": sizes.groups,
        "rows_per_group": sizes.max_running,
        "graphs": {
            "use": graphs,
            "batch_sizes": decided.get("graphs.batch_sizes", []),
            "prefill_tokens": list(sizes.pass_tokens),
            "draft_extend_tokens": list(sizes.extend_tokens),
        },
        "exchanges_of_a_decode_step": {
            str(batch): [
                {
                    "operation": one.operation,
                    "ranks": one.ranks,
                    "size": one.size,
                    "count": one.count,
                }
                for one in step_exchanges(plan.facts.model, plan.mesh, batch)
            ]
            for batch in BATCHES
        },
    }


def plans() -> dict[str, Any]:
    """Return the record of all setups' plans, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        return {setup.name: planned(setup, Path(folder)) for setup in all_setups()}

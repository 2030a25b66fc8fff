"""``glowplug bench kernels``: every kernel of a step timed by itself, all providers side by side.

The model is cut to one layer of each kind, and one step of it is run. Each call to a component of a
slot (ops, linear, experts, attention, sampling) is then timed alone. Its time is compared with the
least possible time, which follows from the bytes it must move and the operations it must compute.
The providers are the components of a slot and the values of component options that are marked as
providers; this module names none of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from glowplug.core.errors import ConfigError, GlowplugError, PlanRefused
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.offers import AttentionOffers
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.startup.components import write_exchange_table
from glowplug.core.startup.lone_rank import plan_of_ranks
from glowplug.entrypoints.bench.kernel.rows import SLOTS, call_row, difference, show
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.bench.others.floor import card_bandwidth
from glowplug.entrypoints.bench.ranks import collectives, tables
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.entrypoints.bench.kernel.calls import Call
    from glowplug.entrypoints.bench.kernel.world import KernelStepShape

#: substring of the card's name -> operations per second of dense GEMMs in (16-bit, FP8), measured;
#: used for the floor in the tables
MATRIX_RATES = {"H200": (7.9e14, 1.5e15), "H100": (7.9e14, 1.5e15)}
#: slot of a call -> configuration section whose components provide it
SLOT_SECTIONS = {
    "attention": "attention",
    "ops": "ops",
    "linear": "quantization",
    "experts": "quantization",
    "sampling": "sampling",
}


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kernels")
    group.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    group.add_argument(
        "--context", type=int, default=1024, help="tokens of each sequence in the KV cache"
    )
    group.add_argument(
        "--prefill",
        type=int,
        nargs="*",
        default=[],
        metavar="TOKENS",
        help="also measure a prefill of this length",
    )
    group.add_argument("--slots", nargs="+", choices=SLOTS, default=list(SLOTS))
    group.add_argument(
        "--auto-only", action="store_true", help="measure only the providers that the plan chooses"
    )
    group.add_argument("--bandwidth", type=float, default=None, metavar="TB/S")
    group.add_argument(
        "--output-file",
        default=None,
        metavar="FILE",
        help="write the conditions and all rows as JSON",
    )
    collectives.configure(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the kernels of each slot's providers and print the tables.

    Returns:
        Exit status 0; 1 when an exchange between ranks failed; 2 when the model, or the plan's own
            choice for it, is refused.
    """
    try:
        config = engine_config(args)
        plugins = load_plugins(extra=args.extra_plugins)
        with tempfile.TemporaryDirectory(prefix="glowplug-kernels-") as folder:
            measured = collectives.measure if args.collectives else measure
            found = measured(args, config, plugins, Path(folder))
    except (GlowplugError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for row in found["rows"]:
        for key in ("out", "key"):  # tensors, and the key they were compared under
            row.pop(key, None)
    print((tables.show if args.collectives else show)(found["rows"]))
    failed = found.get("failed", {})
    for label, why in (found["refused"] | failed).items():
        print(f"not measured: {label}: {why}")
    if args.collectives and args.save_table:
        print(_save_table(found, plugins))
    if args.output_file:
        report.write_json(Path(args.output_file), found)
    return 1 if failed else 0


# ---- variants ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One configuration to measure: the plan's own choice, or one change to it.

    Attributes:
        label: the provider's name in the tables.
        overrides: changed options by section.
        slots: the slots whose calls are timed.
    """

    label: str
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slots: tuple[str, ...] = SLOTS


def variants(plan: EnginePlan, plugins: PluginSet) -> Iterator[Variant]:
    """Yield the variants that each replace one component or provider option of ``plan``."""
    for section in ("attention", "ops", "quantization", "sampling"):
        slots = tuple(slot for slot in SLOTS if SLOT_SECTIONS[slot] == section)
        chosen = plan.choice(section)
        for component, _, _ in plugins.components(section):
            if component.name == chosen.name:
                # NOTE: on other devices every provider runs the same GEMM on dequantised weights.
                if plan.device == "cuda":
                    yield from _providers(section, component, chosen.options, slots)
            elif section != "quantization" and _fits(component, plan):
                yield Variant(component.name, {section: {"use": component.name}}, slots)


def _fits(component: Component, plan: EnginePlan) -> bool:
    offers = component.offers
    if isinstance(offers, AttentionOffers) and plan.facts.model.kind not in offers.kinds:
        return False
    return plan.device in offers.devices


def _providers(
    section: str, component: Component, options: Mapping[str, Any], slots: tuple[str, ...]
) -> Iterator[Variant]:
    """Yield the variants that each change one provider option of a component.

    There is one for each value of the option besides "auto" and the current one. A provider option
    is marked by ``json_schema_extra={"provider": ...}``: True, or the slots that it affects.
    """
    for name, about in component.options.provider_fields().items():
        concerned = (
            slots if about is True else tuple(slot for slot in slots if slot in str(about).split())
        )
        for value in get_args(component.options.model_fields[name].annotation):
            if value not in ("auto", options.get(name)):
                yield Variant(
                    f"{component.name} {name}={value}",
                    {section: {"use": component.name, name: value}},
                    concerned,
                )


# ---- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps that every variant runs.

    Attributes:
        shapes: shapes of the steps.
        slots: slots whose calls are timed.
        times: for each layer index of the cut model, the number of layers of this kind in the
            whole model.
        rates: (bytes, operations) per second that the device reaches; 0: unknown.
    """

    shapes: list[KernelStepShape]
    slots: tuple[str, ...]
    times: Mapping[int, int]
    rates: tuple[float, float]

    def layers(self, call: Call) -> int:
        """Return the number of the whole model's layers that make ``call``; 1 outside of layers."""
        return 1 if call.layer is None else self.times.get(call.layer, 1)


def measure(
    args: argparse.Namespace, config: dict[str, Any], plugins: PluginSet, folder: Path
) -> dict[str, Any]:
    """Measure the plan's own choices and every variant.

    Returns:
        A record with the conditions, the rows, and for each refused or failed variant its reason.
    """
    from glowplug.entrypoints.bench.kernel.world import KernelStepShape

    times = write_cut(model_config(str(config.get("model", "embedded")), plugins), folder)
    shapes = [KernelStepShape(rows, args.context) for rows in args.batch_size]
    shapes += [KernelStepShape(1, length, length) for length in args.prefill]

    def planned(variant: Variant) -> EnginePlan:
        settings = _settings(config, variant.overrides, folder, shapes)
        return plan_of_ranks(settings, plugins, "bench kernels")

    base = planned(Variant("auto"))
    steps = MeasuredSteps(shapes, tuple(args.slots), times, _rates(base, args.bandwidth))
    to_measure = [Variant("auto")] + ([] if args.auto_only else list(variants(base, plugins)))
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for variant in to_measure:
        try:
            rows += _measure_variant(variant, planned(variant), plugins, steps, rows)
        except (PlanRefused, ConfigError) as error:
            refused[variant.label] = "; ".join(refusal.reason for refusal in error.refusals)
        # A provider that fails is listed with its reason; the comparison goes on.
        except Exception as error:
            refused[variant.label] = f"{type(error).__name__}: {error}"
    return conditions(base.device) | {
        "model": config.get("model", "embedded"),
        "dtype": base.dtype,
        "layers": times,
        "chosen": {choice.slot: choice.options for choice in base.choices},
        "rows": rows,
        "refused": refused,
    }


def _settings(
    config: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
    folder: Path,
    shapes: list[KernelStepShape],
) -> dict[str, Any]:
    """Return the configuration of one variant.

    It is the operator's configuration with the cut model, the variant's overrides, and room for the
    largest step.
    """
    longest = max(shape.context for shape in shapes)
    defaults: dict[str, dict[str, Any]] = {
        "scheduler": {
            "max_running_requests": max(shape.rows for shape in shapes),
            "chunk_size": max(64, *(shape.queries for shape in shapes)),
        },
        "memory": {"kv_tokens": max(shape.rows * (shape.context + 1024) for shape in shapes)},
        "cache": {"use": "none"},
        "graphs": {"use": "eager"},
    }
    sections = {
        name: {**defaults.get(name, {}), **config.get(name, {}), **overrides.get(name, {})}
        for name in {*defaults, *overrides}
    }
    plain = {key: value for key, value in config.items() if key not in sections}
    return {
        "context_length": longest + 16,
        **plain,
        **sections,
        "model": str(folder),
        "skip_tokenizer": True,
        "weights": {"use": "random"},
    }


def _rates(plan: EnginePlan, bandwidth: float | None) -> tuple[float, float]:
    """Return the rates that the device reaches: (bytes, operations) per second; 0 if unknown."""
    devices = plan.facts.hardware.devices
    card = devices[0].name if devices and plan.device == "cuda" else ""
    plain, fp8 = next((rates for part, rates in MATRIX_RATES.items() if part in card), (0.0, 0.0))
    quantized = plan.facts.model.quant_method == "fp8"
    known = card_bandwidth(devices) if plan.device == "cuda" else 0.0
    return (bandwidth * 1e12 if bandwidth else known), fp8 if quantized else plain


def _measure_variant(
    variant: Variant,
    plan: EnginePlan,
    plugins: PluginSet,
    steps: MeasuredSteps,
    before: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measure the calls of one variant.

    Args:
        variant: the variant.
        plan: its plan.
        plugins: the loaded plugins.
        steps: the steps to run.
        before: rows of the variants measured earlier; a call's result is compared with theirs.

    Returns:
        A row for each distinct call.
    """
    import torch

    from glowplug.entrypoints.bench.kernel.timing import seconds
    from glowplug.entrypoints.bench.kernel.world import KernelWorld

    known = {(row["step"], *row["key"]): row["out"] for row in before}
    world = KernelWorld(plan, plugins)
    rows = []
    for shape in steps.shapes:
        for call, count in _grouped(world.calls(shape), {*variant.slots} & {*steps.slots}):
            spent, captured = seconds(call.run, world.worker.device)
            provider = _provider(variant, plan, call.slot)
            rows.append(
                call_row(call, shape.name, provider, spent, steps.rates)
                | {
                    "captured": captured,
                    "step_us": spent * 1e6 * count * steps.layers(call),
                    "out": call.out,
                    "differs": difference(call.out, known.get((shape.name, *call.key))),
                }
            )
    if world.worker.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return rows


def _grouped(calls: list[Call], slots: Collection[str]) -> list[tuple[Call, int]]:
    """Return (call, number of occurrences) of each distinct call to a component in ``slots``."""
    found: dict[Any, tuple[Call, int]] = {}
    for call in calls:
        if call.slot in slots:
            first, count = found.get(call.key, (call, 0))
            found[call.key] = first, count + 1
    return list(found.values())


def _provider(variant: Variant, plan: EnginePlan, slot: str) -> str:
    if variant.label != "auto":
        return variant.label
    return f"{plan.choice(SLOT_SECTIONS[slot]).name} *"


def _save_table(record: Mapping[str, Any], plugins: PluginSet) -> str:
    """Write the table of a record by the plan's collectives, and return a line with its path."""
    path = write_exchange_table(plugins, record)
    if path is not None:
        return f"table: {path}"
    return (
        f"no table: {record['chosen']} chooses nothing by measured times, or neither sums nor "
        "exchanges were measured"
    )

"""``glowplug bench kernels --collectives``: exchanges between ranks, all providers side by side.

Starts the ranks of the layout, checks each result against a sum in float32, and times it: in CUDA
graphs of several calls, or one by one on CPUs. The providers are the components of the slot
"collectives" and, for the exchange of experts' tokens, the values of the option ``exchange`` of the
strategy that divides the experts; this module names none of them. SGLang's all-reduce may be
measured after them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from glowplug.core.errors import GlowplugError, PlanRefused, Refusal
from glowplug.core.facts.machine import this_machine
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.offers import CollectiveOffers, ParallelOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.startup.lone_rank import number_of_ranks, without_memory_limit
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.layout import SGLANG
from glowplug.entrypoints.bench.ranks import peer
from glowplug.entrypoints.bench.ranks.rank_processes import MeasuredProvider, Ranks, UnusableError
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan

KIB = 1 << 10
SIZES = tuple(4 * KIB << power for power in range(12))  #: 4 KB to 8 MB
TOKENS = (1, 8, 128, 1024)
EXCHANGE_OPTION = "exchange"  #: option of a strategy that chooses how tokens reach their experts
SOURCE = "bench kernels"  #: name of the configuration in messages


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("exchanges between ranks")
    group.add_argument(
        "--collectives",
        action="store_true",
        help="measure the exchanges between the ranks of a layout (--tp N) instead of kernels",
    )
    group.add_argument(
        "--collective-bytes",
        type=int,
        nargs="*",
        default=list(SIZES),
        metavar="BYTES",
        help="sizes of tensors; default: 4 KB to 8 MB",
    )
    group.add_argument(
        "--save-table",
        action="store_true",
        help="keep the times as the table by which plans on this card choose between exchanges of "
        "this number of ranks (docs/benchmarks/README.md#tables-of-exchanges)",
    )
    group.add_argument(
        "--exchange-tokens",
        type=int,
        nargs="*",
        default=list(TOKENS),
        metavar="TOKENS",
        help="tokens of each rank that are sent to their experts and back",
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="sglang=PYTHON",
        help="also measure SGLang's all-reduce; PYTHON: its interpreter, or a script that starts "
        "one",
    )


def measure(
    args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet, folder: Path
) -> dict[str, Any]:
    """Start the ranks and measure the exchanges of every provider.

    Args:
        args: options of the command.
        config: the operator's configuration.
        plugins: the loaded plugins.
        folder: an empty folder for the cut model.

    Returns:
        A record with the conditions, the rows, and the reason of each provider that is refused, and
            of each that failed.

    Raises:
        PlanRefused: the layout has one rank, or cannot run.
        ValueError: a size is not positive.
    """
    _check(args, config, plugins)
    python, versions = peer.given(args.peer)
    write_cut(model_config(str(config.get("model", "embedded")), plugins), folder)
    planner = Planner(args, config, plugins, folder)
    base = planner.plan(MeasuredProvider("auto"))
    if python is not None and base.device != "cuda":
        raise ValueError("--peer needs GPUs")
    found = _every_provider(planner, measured_providers(base, config, plugins, args), plugins)
    if python is not None:
        sizes = args.collective_bytes
        found.add(SGLANG, lambda: list(peer.all_reduce_rows(python, base.ranks, sizes)))
    about = {"model": config.get("model", "embedded"), "versions": versions}
    return conditions_apart() | about | _layout(base) | asdict(found)


def _check(args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet) -> None:
    """Check that there is something to measure.

    Raises:
        PlanRefused: the layout has one rank.
        ValueError: a size is not positive, or there is none.
    """
    sizes = [*args.collective_bytes, *args.exchange_tokens]
    if not sizes:
        raise ValueError("nothing to measure: give --collective-bytes or --exchange-tokens")
    if min(sizes) < 1:
        raise ValueError("--collective-bytes and --exchange-tokens must be at least 1")
    if number_of_ranks(config, plugins) == 1:
        refusal = Refusal(SOURCE, "parallel", "one rank exchanges nothing", "--tp 2, or more")
        raise PlanRefused([refusal], SOURCE)


def _layout(base: EnginePlan) -> dict[str, Any]:
    """Return the record's entries that describe a plan."""
    devices = base.facts.hardware.devices
    return {
        "hidden": base.facts.model.hidden_size,
        "dtype": base.dtype,
        "mesh": base.mesh,
        "chosen": base.choice("collectives").name,
        "gpu": devices[0].name if base.device == "cuda" and devices else base.device,
    }


@dataclass
class Measured:
    """The rows of all providers.

    Attributes:
        rows: the rows.
        refused: reason for each provider that cannot run.
        failed: reason for each provider that failed.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, measured: Callable[[], list[dict[str, Any]]]) -> None:
        """Add the rows that ``measured`` returns, or the reason why it raises."""
        try:
            self.rows += measured()
        except PlanRefused as error:
            self.refused[label] = "; ".join(refusal.reason for refusal in error.refusals)
        except UnusableError as error:
            self.refused[label] = str(error)
        except GlowplugError as error:
            self.failed[label] = str(error)


def _every_provider(
    planner: Planner, providers: Iterable[MeasuredProvider], plugins: PluginSet
) -> Measured:
    """Measure this engine's providers one after the other, in one set of rank processes."""
    found = Measured()
    with Ranks(plugins) as ranks:
        for provider in providers:
            found.add(provider.label, partial(_measured, ranks, planner, provider))
    return found


def _measured(ranks: Ranks, planner: Planner, provider: MeasuredProvider) -> list[dict[str, Any]]:
    return ranks.measure(provider, planner.plan(provider), planner.work(provider))


def measured_providers(
    base: EnginePlan, config: Mapping[str, Any], plugins: PluginSet, args: argparse.Namespace
) -> Iterator[MeasuredProvider]:
    """Yield the providers of sums and gathers, then those of the exchange of experts' tokens.

    If ``config`` names a component or an exchange, only this one is measured.
    """
    given = config.get("collectives", {})
    providers = [given["use"]] if "use" in given else list(_connecting(plugins, base.device))
    overrides = {name: {"collectives": {**given, "use": name}} for name in providers}
    if args.collective_bytes:
        for name, changed in overrides.items():
            yield MeasuredProvider(name, changed)
            yield from _variants(name, changed["collectives"], plugins)
    if not args.exchange_tokens or not base.facts.model.n_routed_experts:
        return
    for name, changed in overrides.items():
        for exchange, strategies in _layouts(base, config, plugins):
            label = f"{name} {exchange}".rstrip()
            yield MeasuredProvider(label, {**changed, "parallel": strategies}, exchanges=True)


def _variants(
    name: str, section: Mapping[str, Any], plugins: PluginSet
) -> Iterator[MeasuredProvider]:
    """Yield a provider for each value of the provider options of a component.

    Args:
        name: name of the component.
        section: its section of the configuration; options named there have this value only.
        plugins: the loaded plugins.
    """
    found = plugins.find("collectives", name)
    options = found.component.options if found is not None else None
    for option in options.provider_fields() if options is not None else ():
        values = get_args(options.model_fields[option].annotation) if options is not None else ()
        for value in values if option not in section else ():
            if value != "auto":
                changed = {"collectives": {**section, option: value}}
                yield MeasuredProvider(f"{name} {option}={value}", changed)


def _connecting(plugins: PluginSet, device: str) -> Iterator[str]:
    """Yield the names of the components that connect several ranks on ``device``."""
    for component, _, _ in plugins.components("collectives"):
        offers = component.offers
        if isinstance(offers, CollectiveOffers) and offers.ranks and device in offers.devices:
            yield component.name


def _layouts(
    base: EnginePlan, config: Mapping[str, Any], plugins: PluginSet
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (exchange, ``[[parallel]]`` sections) for each exchange of experts' tokens.

    If ``config`` does not divide the experts, every rank gets a share of them and tokens of its
    own.
    """
    shares = _strategy(plugins, "ep")
    groups = _strategy(plugins, "dp")
    found = {str(section["use"]): dict(section) for section in config["parallel"]}
    if shares.name not in found:
        # in the order of the strategies
        for name in (shares.name, groups.name):
            found[name] = found.pop(name, {"use": name, "size": base.mesh["tp"]})
    sections = list(found.values())
    own = found[shares.name]
    about = shares.options.model_fields.get(EXCHANGE_OPTION)
    if about is None or EXCHANGE_OPTION in own:
        yield str(own.get(EXCHANGE_OPTION, "")), sections
        return
    for value in get_args(about.annotation):
        yield (
            value,
            [
                section | ({EXCHANGE_OPTION: value} if section is own else {})
                for section in sections
            ],
        )


def _strategy(plugins: PluginSet, axis: str) -> Component:
    """Return the first strategy that defines a mesh axis.

    Raises:
        GlowplugError: no plugin has one.
    """
    for component, _, _ in plugins.components("parallel"):
        if isinstance(component.offers, ParallelOffers) and axis in component.offers.axes:
            return component
    raise GlowplugError(f"no parallelism strategy defines the axis {axis}")


class Planner:
    """The plans of the measured providers.

    Args:
        args: options of the command.
        config: the operator's configuration.
        plugins: the loaded plugins.
        folder: folder of the cut model.
    """

    def __init__(
        self, args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet, folder: Path
    ) -> None:
        self._sizes = list(args.collective_bytes)
        self._tokens = list(args.exchange_tokens)
        # a cut model has no draft layer, and no step is captured
        self._config = {
            key: value for key, value in config.items() if key not in ("speculative", "graphs")
        }
        given = config.get("graphs", {})
        self._graphs = {"use": given["use"]} if "use" in given else {}
        self._plugins = plugins
        self._folder = folder

    def plan(self, provider: MeasuredProvider) -> EnginePlan:
        """Return the plan of a provider: steps are captured unless its exchange cannot be.

        No weight is stored, so memory does not limit the plan.

        Raises:
            PlanRefused: the provider cannot run.
        """
        try:
            return self._made(provider, self._graphs)
        except PlanRefused:
            if self._graphs:
                raise
        return self._made(provider, {"use": "eager"})

    def _limits(self, provider: MeasuredProvider) -> dict[str, int]:
        """Return the scheduler's options with which every measured tensor fits into a step.

        Limits are those of all groups.
        """
        hidden = int(self._plugins.read_model(str(self._folder)).facts.hidden_size)
        ranks = number_of_ranks(self._config, self._plugins)
        chunk = max([64, *(size // hidden for size in self._sizes)])
        chunk = max([chunk, *(tokens * ranks for tokens in self._tokens)])
        parallel = {**self._config, **provider.overrides}.get("parallel", [])
        groups = max([1, *(one["size"] for one in parallel if one["use"] == "dp_attention")])
        return {"max_running_requests": groups, "chunk_size": groups * chunk}

    def _made(self, provider: MeasuredProvider, graphs: Mapping[str, Any]) -> EnginePlan:
        """Return the plan of a provider. ``graphs``: section of the configuration; {}: auto."""
        settings: dict[str, Any] = {
            "context_length": 256,
            **self._config,
            "scheduler": self._limits(provider),
            "memory": {"kv_tokens": 4096},
            "cache": {"use": "none"},
            **provider.overrides,
            "model": str(self._folder),
            "skip_tokenizer": True,
            "weights": {"use": "random"},
            "executor": {**self._config.get("executor", {}), "use": "multiprocess"},
        }
        settings |= {"graphs": graphs} if graphs else {}
        return make_plan(
            settings,
            plugins=self._plugins,
            source=SOURCE,
            hardware=without_memory_limit(this_machine()),
        )

    def work(self, provider: MeasuredProvider) -> dict[str, Any]:
        """Return what the ranks measure for a provider; see ``measured_rank.operations``."""
        return {
            "sizes": [] if provider.exchanges else self._sizes,
            "tokens": self._tokens if provider.exchanges else [],
        }

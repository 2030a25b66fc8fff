"""``glowplug bench kernels --collectives``: exchanges between ranks, all providers side by side.

Starts the ranks of the layout, checks each result against a sum in float32, and times it: in CUDA
graphs of several calls, or one by one on CPUs. The providers are the components of the slot
"collectives" and, for the exchange of experts' tokens, the values of the option ``exchange`` of the
strategy that divides the experts; this module names none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from glowplug.core.errors import EngineDead, GlowplugError, PlanRefused, Refusal
from glowplug.core.facts.machine import this_machine
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.offers import CollectiveOffers, GraphOffers, ParallelOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.startup.lone_rank import number_of_ranks, without_memory_limit
from glowplug.core.step.messages import Control, Reply, decode_outbound, encode
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from glowplug.entrypoints.front.open_engine import make_executor

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
    sizes = [*args.collective_bytes, *args.exchange_tokens]
    if not sizes:
        raise ValueError("nothing to measure: give --collective-bytes or --exchange-tokens")
    if min(sizes) < 1:
        raise ValueError("--collective-bytes and --exchange-tokens must be at least 1")
    if number_of_ranks(config, plugins) == 1:
        refusal = Refusal(SOURCE, "parallel", "one rank exchanges nothing", "--tp 2, or more")
        raise PlanRefused([refusal], SOURCE)
    write_cut(model_config(str(config.get("model", "embedded")), plugins), folder)
    planner = Planner(args, config, plugins, folder)
    base = planner.plan(MeasuredProvider("auto"))
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    with Ranks(plugins) as ranks:
        for provider in measured_providers(base, config, plugins, args):
            try:
                rows += ranks.measure(provider, planner.plan(provider), planner.work(provider))
            except PlanRefused as error:
                refused[provider.label] = "; ".join(refusal.reason for refusal in error.refusals)
            except UnusableError as error:
                refused[provider.label] = str(error)
            except GlowplugError as error:
                failed[provider.label] = str(error)
    devices = base.facts.hardware.devices
    return conditions_apart() | {
        "model": config.get("model", "embedded"),
        "hidden": base.facts.model.hidden_size,
        "dtype": base.dtype,
        "mesh": base.mesh,
        "chosen": base.choice("collectives").name,
        "gpu": devices[0].name if base.device == "cuda" and devices else base.device,
        "rows": rows,
        "refused": refused,
        "failed": failed,
    }


class UnusableError(GlowplugError):
    """The reason why a provider cannot exchange on this machine."""


@dataclass(frozen=True)
class MeasuredProvider:
    """One provider to measure.

    Attributes:
        label: the provider's name in the tables.
        overrides: changed sections of the configuration.
        exchanges: True: the exchange of experts' tokens is measured; False: sums and gathers are.
    """

    label: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    exchanges: bool = False


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


class Ranks:
    """The rank processes; a context manager that ends them.

    The executor of the first measured plan starts them. After a failure they are started anew.

    Args:
        plugins: the loaded plugins.
    """

    def __init__(self, plugins: PluginSet) -> None:
        self._plugins = plugins
        self._executor: Any = None
        self._messages = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def measure(
        self, provider: MeasuredProvider, plan: EnginePlan, work: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Measure a plan on all ranks and return the rows.

        Raises:
            EngineDead: a rank has failed.
            UnusableError: the plan's components cannot exchange on this machine.
            GlowplugError: a result is wrong.
        """
        try:
            reply = self._asked(plan, {**work, "captured": captures(plan, self._plugins)})
        except EngineDead:
            self._end()
            raise
        if not reply.ok:
            raise (GlowplugError if reply.data["wrong"] else UnusableError)(reply.error)
        layout = {"mesh": plan.mesh} if provider.exchanges else {}
        return [{"provider": provider.label, **row, **layout} for row in reply.data["rows"]]

    def _asked(self, plan: EnginePlan, work: Mapping[str, Any]) -> Reply:
        """Send the ranks a plan, and return rank 0's reply."""
        from glowplug.entrypoints.bench.ranks import measured_rank

        if self._executor is None:
            self._executor = make_executor(plan, self._plugins)
            self._executor.start(plan, measured_rank.build)
        self._messages += 1
        given = {**work, "plan": plan.to_json().decode()}
        self._executor.submit(encode([Control(self._messages, "measure", given)]))
        while True:
            frame = self._executor.outputs(None)  # None after a heartbeat
            for message in decode_outbound(frame) if frame else []:
                if isinstance(message, Reply) and message.id == self._messages:
                    return message

    def _end(self) -> None:
        """Stop the ranks, if they run."""
        if self._executor is not None:
            self._executor.stop()
        self._executor = None


def captures(plan: EnginePlan, plugins: PluginSet) -> bool:
    """Return whether the plan's steps are captured in graphs."""
    found = plugins.find("graphs", plan.choice("graphs").name)
    offers = found.component.offers if found is not None else None
    return isinstance(offers, GraphOffers) and bool(offers.captures)

"""The command line as configuration: flags, ``--set``, ``--config`` and ``--facts``. No torch.

Precedence: command line, then file, then defaults that plugins or the command set, then the
options' own defaults. The place of each value is kept for messages.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glowplug.core.config.files import Layer, merge, read_config, set_path
from glowplug.core.errors import ConfigError, FactsError, GlowplugError, Refusal
from glowplug.core.facts.machine import read_sheet
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.facts.model_folder import EMBEDDED
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.flags.flag import GivenFlag
from glowplug.entrypoints.cli.flags.layer import command_line_layer, drop_unused_options, value_at
from glowplug.entrypoints.cli.flags.output_parsers import without_wrong_parsers
from glowplug.entrypoints.cli.flags.parallel import arrange
from glowplug.entrypoints.cli.flags.speculative import resolve_folder, with_single_flags
from glowplug.entrypoints.cli.flags.table import ALWAYS_ON, FLAGS


def serve_defaults(
    config: Mapping[str, Any],
    hardware: HardwareFacts | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return the configuration's defaults for serving: the embedded model, one process per rank.

    The executor is "torchrun" if the configuration or the fact sheet has several hosts, or if
    torchrun started this process.

    Args:
        config: the operator's configuration.
        hardware: the fact sheet in use; None: this machine.
        environment: environment variables, which show whether torchrun started this process.

    Returns:
        Values by dotted path.
    """
    found: dict[str, Any] = {"model": EMBEDDED, "executor.use": "multiprocess"}
    given = config.get("executor")
    executor = given if isinstance(given, Mapping) else {}
    several_hosts = (
        executor.get("hosts") not in (None, 1)
        or "host_rank" in executor
        or "address" in executor
        or (hardware is not None and hardware.hosts > 1)
    )
    if several_hosts:
        found["executor.use"] = "torchrun"
    if "TORCHELASTIC_RUN_ID" in environment:
        found |= {
            "executor.use": "torchrun",
            "executor.hosts": int(environment.get("GROUP_WORLD_SIZE", "1")),
        }
    return found


@dataclass
class CommandLine:
    """A parsed command line.

    Attributes:
        layer: configuration with the place of each value, and the refusals found so far.
        source: name of the configuration in messages.
        plugins: the loaded plugins.
        hardware: facts of the sheet that ``--facts`` names; None: this machine.
        notes: decisions about flags, such as flags without effect, that the plan reports.
    """

    layer: Layer
    source: str
    plugins: PluginSet
    hardware: HardwareFacts | None = None
    notes: list[Decision] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return self.layer.data

    def plan(self, contributed: Mapping[str, Any] | None = None) -> EnginePlan:
        """Return the plan that this command line describes.

        Args:
            contributed: defaults of the command by dotted path; None: those of serving.

        Raises:
            ConfigError: the configuration is malformed.
            PlanRefused: the configuration cannot run; with every reason.
        """
        if contributed is None:
            contributed = serve_defaults(self.config, self.hardware)
        layer, wrong = without_wrong_parsers(self.layer, self.plugins)
        return make_plan(
            layer.data,
            source=self.source,
            origins=layer.origins,
            plugins=self.plugins,
            hardware=self.hardware,
            contributed=contributed,
            prior=[*layer.refusals, *wrong],
            notes=self.notes,
        )


def read_command_line(args: argparse.Namespace, plugins: PluginSet | None = None) -> CommandLine:
    """Load the plugins, read the configuration file, and apply flags and ``--set`` on top.

    Args:
        args: options parsed by a parser with ``add_engine_options``.
        plugins: plugins to use instead of loading them.

    Raises:
        PluginLoadError: a plugin cannot be loaded.
        ConfigError: the file or the fact sheet cannot be read.
    """
    plugins = plugins or load_plugins(extra=args.extra_plugins, block=args.blocked_plugins)
    given = list(with_single_flags([*_model_word(args), *getattr(args, "engine_flags", [])], FLAGS))
    layer, notes = command_line_layer(given, args.overrides)
    notes += _always_on_notes(args)
    if args.config:
        layer = merge(layer, read_config(Path(args.config), plugins))
    notes += [Decision(path, value, "operator", why) for path, value, why in layer.replaced]
    notes += [*arrange(layer, given), *drop_unused_options(layer, given)]
    _resolve_attention(layer, plugins)
    resolve_folder(layer, given, plugins)
    source = Path(args.config).name if args.config else "the command line"
    return CommandLine(layer, source, plugins, _sheet(args.facts, layer), notes)


def _model_word(args: argparse.Namespace) -> list[GivenFlag]:
    """Return the model that is given without a flag, as if it were given with ``--model``."""
    word = getattr(args, "model_word", None)
    flag = next(flag for flag in FLAGS if flag.path == "model")
    return [] if word is None else [GivenFlag(flag, flag.names[0], word)]


def _always_on_notes(args: argparse.Namespace) -> list[Decision]:
    """Return a note for each given switch whose feature this engine has always turned on."""
    names = dict.fromkeys(getattr(args, "always_on", None) or ())
    return [Decision(name, "no effect", "operator", ALWAYS_ON[name]) for name in names]


def _sheet(name: str | None, layer: Layer) -> HardwareFacts | None:
    """Return the fact sheet that ``--facts`` names; None without the option.

    Raises:
        ConfigError: the sheet cannot be read; the error also has the refusals found in ``layer``.
    """
    if not name:
        return None
    try:
        return read_sheet(name)
    except FactsError as error:
        refusal = Refusal("facts", "--facts", str(error), error.fix)
        raise ConfigError([*layer.refusals, refusal]) from None


def _resolve_attention(layer: Layer, plugins: PluginSet) -> None:
    """Replace a library's name in ``--attention-backend`` by that of its backend for this model.

    Other engines use one name, such as "fa3", for both latent and multi-head attention; here the
    two backends of a library have different names. If the model cannot be read, which the plan
    refuses, the library's first backend stands for both.
    """
    path = "attention.use"
    if not layer.origins.get(path, "").startswith("--attention-backend"):
        return
    model = str(layer.data.get("model", EMBEDDED))
    name = attention_backend(value_at(layer.data, path), model, plugins, layer.data.get("revision"))
    set_path(layer.data, path, name)


def attention_backend(
    name: str, model: str, plugins: PluginSet, revision: str | None = None
) -> str:
    """Return the name of the backend that ``name``, such as "fa3", stands for with a model.

    A name that stands for no backend is returned unchanged, and the plan refuses it. For a model
    that cannot be read it stands for the library's first backend.
    """
    if plugins.find("attention", name):
        return name
    of_library = {
        f"{name}_{kind}": kind
        for found in plugins.components("attention")
        for kind in getattr(found.component.offers, "kinds", ())
        if found.component.name == f"{name}_{kind}"
    }
    try:
        kind = plugins.read_model(model, revision).facts.kind
    except GlowplugError:
        kind = next(iter(of_library.values()), "")
    full = f"{name}_{kind}"
    return full if full in of_library else name

"""The command line as configuration: flags, ``--set``, ``--config`` and ``--facts``. No torch.

Precedence: command line, then file, then contributed default, then default. The place of each value
is kept for messages.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from glowplug.core.config.files import Layer, merge, read_config, set_path
from glowplug.core.errors import ConfigError, FactsError, GlowplugError, Refusal
from glowplug.core.facts.machine import read_sheet, sheet_names
from glowplug.core.facts.model_facts import HardwareFacts
from glowplug.core.facts.model_folder import EMBEDDED
from glowplug.core.plan.plan import Decision, EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.flags.engine_table import ALWAYS_ON, FLAGS, NO_EFFECT, Flag
from glowplug.entrypoints.cli.flags.output_parsers import without_wrong_parsers
from glowplug.entrypoints.cli.flags.parallel import SECTION, SIZE_FIELDS, arrange, larger_than_one

_NUMBER = re.compile(r"-\d+(?:\.\d+)?")
VALUE_CHARS_MAX = 200  #: longest part of a flag's value that messages show
_ITEM = re.compile(r"(\w+)\[([\w*]+)\]\.(\w+)")


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, in which underscores in flags count as hyphens.

    The error for an unknown flag suggests the closest known one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([hyphened(word) for word in given], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self._unexpected(unknown)))
        return found

    def _unexpected(self, words: Sequence[str]) -> Iterator[str]:
        """Yield an error for each word that no option takes.

        Words after an unknown flag count as its values.
        """
        valued = False
        for word in words:
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                yield self._unknown(word.partition("=")[0])
                valued = "=" not in word
            elif not valued:
                yield f"unexpected argument {word!r}"

    def _unknown(self, name: str) -> str:
        """Return the error for an unknown flag."""
        from glowplug.entrypoints.cli.flags.foreign import unsupported

        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        reason = unsupported(name, known)
        if reason:
            return reason
        close = difflib.get_close_matches(name.lstrip("-"), [flag[2:] for flag in known], 1, 0.6)
        return f"unknown flag {name}" + (f", did you mean --{close[0]}?" if close else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def hyphened(word: str) -> str:
    """Replace underscores in a flag's name: ``--disable_mla`` -> ``--disable-mla``.

    Other words are returned unchanged.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


class _Given(argparse.Action):
    """An action that collects (flag, spelling, value) in command-line order."""

    def __init__(self, flag: Flag, **kwargs: Any) -> None:
        self.flag = flag
        super().__init__(**kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = list(getattr(namespace, "engine_flags", None) or [])
        value = self.flag.value if self.flag.convert is None else values
        namespace.engine_flags = [*given, (self.flag, option_string or self.flag.names[0], value)]


class _Once(argparse.Action):
    """An action for options that may be repeated only with the same value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) not in (None, values):
            raise argparse.ArgumentError(self, "given twice, differently")
        setattr(namespace, self.dest, values)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add all engine flags and those of files, sheets and plugins."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", action=_Once, metavar="FILE", help="configuration in TOML, YAML or JSON"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        dest="overrides",
        help="set any configuration field",
    )
    group.add_argument(
        "--facts",
        action=_Once,
        metavar="SHEET",
        help=f"plan for another machine, described by a file or one of {', '.join(sheet_names())}",
    )
    group.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        dest="extra_plugins",
        help="load an additional plugin module",
    )
    group.add_argument(
        "--block-plugin",
        action="append",
        default=[],
        metavar="NAME",
        dest="blocked_plugins",
        help="do not load this plugin",
    )
    for flag in FLAGS:
        nargs: Any = 0 if flag.convert is None else "+" if flag.many else None
        metavar = None if flag.convert is None else flag.path.rpartition(".")[2].upper()
        group.add_argument(
            *flag.names,
            action=_Given,
            flag=flag,
            nargs=nargs,
            type=flag.convert or str,
            help=flag.help,
            dest="engine_flags",
            default=argparse.SUPPRESS,
            metavar=metavar,
        )
    for name, why in ALWAYS_ON.items():
        group.add_argument(
            name, action="append_const", const=name, dest="always_so", help=f"no effect: {why}"
        )


def serve_defaults(
    config: Mapping[str, Any],
    hardware: HardwareFacts | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return the defaults of serving: the embedded model, one process per rank.

    With several hosts (configured, on the fact sheet, or given by torchrun, which started this
    process) the executor is "torchrun".

    Args:
        config: the operator's configuration.
        hardware: the fact sheet in use; None: this machine.
        environment: environment variables, in which torchrun is recognised.

    Returns:
        Values by dotted path.
    """
    found: dict[str, Any] = {"model": EMBEDDED, "executor.use": "multiprocess"}
    given = config.get("executor")
    asked = given if isinstance(given, Mapping) else {}
    spans = asked.get("hosts") not in (None, 1) or not {"host_rank", "address"}.isdisjoint(asked)
    if spans or (hardware is not None and hardware.hosts > 1):
        found["executor.use"] = "torchrun"
    if "TORCHELASTIC_RUN_ID" in environment:
        found |= {
            "executor.use": "torchrun",
            "executor.hosts": int(environment.get("GROUP_WORLD_SIZE", "1")),
        }
    return found


@dataclass
class Given:
    """A parsed command line.

    Attributes:
        layer: configuration with the place of each value, and the refusals found so far.
        source: name of the configuration in messages.
        plugins: the loaded plugins.
        hardware: facts of the sheet that ``--facts`` names; None: this machine.
        notes: decisions that the plan reports.
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
        """Return the plan.

        Args:
            contributed: further defaults by dotted path; None: those of serving.

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


def read_command_line(args: argparse.Namespace, plugins: PluginSet | None = None) -> Given:
    """Load the plugins, read the file and apply flags and ``--set`` over it.

    Args:
        args: options parsed by a parser with ``add_engine_options``.
        plugins: plugins to use instead of loading them.

    Raises:
        PluginLoadError: a plugin cannot be loaded.
        ConfigError: the file or the fact sheet cannot be read.
    """
    plugins = plugins or load_plugins(extra=args.extra_plugins, block=args.blocked_plugins)
    layer, notes = command_line_layer(getattr(args, "engine_flags", []), args.overrides)
    notes += [
        Decision(name, "no effect", "operator", ALWAYS_ON[name])
        for name in dict.fromkeys(getattr(args, "always_so", None) or ())
    ]
    if args.config:
        layer = merge(layer, read_config(Path(args.config), plugins))
    notes += [Decision(path, value, "operator", why) for path, value, why in layer.replaced]
    notes += [
        *arrange(layer, getattr(args, "engine_flags", [])),
        *_drop_unused_options(layer, getattr(args, "engine_flags", [])),
    ]
    _resolve_attention(layer, plugins)
    hardware = None
    if args.facts:
        try:
            hardware = read_sheet(args.facts)
        except FactsError as error:
            raise ConfigError(
                [*layer.refusals, Refusal("facts", "--facts", str(error), error.fix)]
            ) from None
    source = Path(args.config).name if args.config else "the command line"
    return Given(layer, source, plugins, hardware, notes)


def _resolve_attention(layer: Layer, plugins: PluginSet) -> None:
    """Replace a library's name in ``--attention-backend`` by the backend for this model.

    Other engines use one name, such as "fa3", for latent and multi-head attention.
    """
    path = "attention.use"
    if not layer.origins.get(path, "").startswith("--attention-backend"):
        return
    asked = _get(layer.data, path)
    try:
        kind = plugins.read_model(str(layer.data.get("model", EMBEDDED))).facts.kind
    except GlowplugError:
        return  # the plan reports it
    if not plugins.find("attention", asked) and plugins.find("attention", f"{asked}_{kind}"):
        set_path(layer.data, path, f"{asked}_{kind}")


def command_line_layer(
    given: Sequence[tuple[Flag, str, Any]], overrides: Sequence[str]
) -> tuple[Layer, list[Decision]]:
    """Return one layer of all flags in order, then ``--set``.

    Args:
        given: (flag, spelling, value) in command-line order.
        overrides: values of ``--set``.

    Returns:
        The layer, and a note for each flag that has no effect.
    """
    layer = Layer()
    spelled = {flag.names[0] for flag, _, _ in given}
    notes = []
    first = _first_of_each(given, layer)
    for flag, spelling, value in first:
        reason = _no_effect_reason(flag, spelled)
        if reason:
            notes.append(Decision(spelling, "no effect", "operator", reason))
            continue
        _assign(
            layer,
            {**flag.also, flag.path: _config_value(flag, value)},
            _as_given(flag, spelling, value),
        )
    for override in overrides:
        _apply_override(layer, override)
    for number, shown in larger_than_one(layer, first):
        path = f"{SECTION}.{number}.size"
        layer.refusals.append(_contradiction(path, shown, layer.origins.get(path, path)))
    return layer, notes


def _first_of_each(
    given: Sequence[tuple[Flag, str, Any]], layer: Layer
) -> list[tuple[Flag, str, Any]]:
    """Return the first occurrence of each flag.

    A flag that is repeated with another value adds a refusal to ``layer``.
    """
    first: dict[str, tuple[Flag, str, Any]] = {}
    for flag, spelling, value in given:
        _, before, held = first.setdefault(flag.names[0], (flag, spelling, value))
        if _config_value(flag, held) != _config_value(flag, value):
            layer.refusals.append(
                _contradiction(
                    flag.path, _as_given(flag, before, held), _as_given(flag, spelling, value)
                )
            )
    return list(first.values())


def _config_value(flag: Flag, value: Any) -> Any:
    """Return a flag's value as the configuration spells it."""
    return flag.values.get(value, value) if isinstance(value, str) else value


def _as_given(flag: Flag, spelling: str, value: Any) -> str:
    """Return a flag and its value as given on the command line, without the value of a key."""
    if flag.convert is None or flag.path.endswith("api_key"):
        return spelling
    return f"{spelling} {_shown(value)}"


def _no_effect_reason(flag: Flag, spelled: set[str]) -> str:
    """Return why another given flag makes this one ineffective; "" if none does."""
    other, when_given, why = NO_EFFECT.get(flag.names[0], ("", False, ""))
    return f"{why} ({other})" if when_given and other in spelled else ""


def _drop_unused_options(layer: Layer, given: Sequence[tuple[Flag, str, Any]]) -> list[Decision]:
    """Remove options that flags set for a component that ``layer`` does not choose.

    Returns:
        A note for each removed option.
    """
    notes = []
    for flag, spelling, _ in given:
        other, when_given, why = NO_EFFECT.get(flag.names[0], ("", True, ""))
        section, _, key = flag.path.partition(".")
        held = layer.data.get(section)
        if (
            not when_given
            and isinstance(held, dict)
            and key in held
            and held.get("use") in (None, "auto")
        ):
            del held[key], layer.origins[flag.path]
            notes.append(Decision(spelling, "no effect", "operator", f"{why} (no {other})"))
    return notes


def _shown(value: Any) -> str:
    """Return a flag's value as messages show it: one line of at most VALUE_CHARS_MAX characters."""
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(words.split())
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "..."


def _assign(layer: Layer, fields: Mapping[str, Any], shown: str) -> None:
    """Set the fields of one flag in ``layer``.

    If one of the fields already has another value, nothing is set and a refusal names both flags.

    Args:
        layer: the layer to change.
        fields: values by path.
        shown: the flag as messages show it.
    """
    resolved = {
        _resolve_item(layer, path, shown): value
        for path, value in fields.items()
        if path not in SIZE_FIELDS or value != 1
    }
    for path, value in resolved.items():
        before = layer.origins.get(path)
        if before is not None and not _same(path, _get(layer.data, path), value):
            layer.refusals.append(_contradiction(path, before, shown))
            return
    for path, value in resolved.items():
        if path in layer.origins and _get(layer.data, path) == f"{value}_mla":
            continue
        set_path(layer.data, path, value)
        layer.origins[path] = shown


def _same(path: str, held: Any, value: Any) -> bool:
    """Return whether two values of a field mean the same.

    A library's name in other engines ("fa3") equals this engine's name of its latent attention
    ("fa3_mla").
    """
    return bool(
        held == value
        or path == "attention.use"
        and (held == f"{value}_mla" or value == f"{held}_mla")
    )


def _resolve_item(layer: Layer, path: str, shown: str) -> str:
    """Return ``parallel[tensor].size`` as ``parallel.0.size``: the list item with that ``use``.

    A missing item is added.
    """
    match = _ITEM.fullmatch(path)
    if match is None:
        return path
    section, use, key = match.groups()
    items = layer.data.setdefault(section, [])
    at = next((i for i, item in enumerate(items) if item.get("use") == use), len(items))
    if at == len(items):
        items.append({} if use == "*" else {"use": use})
        if use != "*":
            layer.origins[f"{section}.{at}.use"] = shown
    return f"{section}.{at}.{key}"


def _get(data: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    for part in path.split("."):
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _apply_override(layer: Layer, override: str) -> None:
    """Apply ``--set A.B=VALUE``.

    Each value in a section or a list of sections counts as set on its own. A mistake adds a refusal
    to ``layer``.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    try:
        if not equals:
            raise ValueError("expected A.B=VALUE")
        for leaf, value in _leaves(path, literal(text.strip())):
            before = _origin(layer, leaf)
            if before and _get(layer.data, leaf) != value:
                layer.refusals.append(_contradiction(leaf, before, f"--set {path}"))
                continue
            set_path(layer.data, leaf, value)
            layer.origins[leaf] = f"--set {path}"
    except ValueError as error:
        layer.refusals.append(
            Refusal("config", f"--set {path}", str(error), "--set section.key=value")
        )


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of all leaves in ``value``: neither sections nor lists of sections."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}.{number}", item)
    else:
        yield path, value


def _origin(layer: Layer, path: str) -> str:
    """Return the place that set ``path``, a value inside it or a section around it; "" if none."""
    for written, origin in layer.origins.items():
        if f"{written}.".startswith(f"{path}.") or path.startswith(f"{written}."):
            return origin
    return ""


def _contradiction(path: str, before: str, now: str) -> Refusal:
    """Return the refusal of a field that is given two values."""
    reason = (
        f"{before} and {now} contradict each other"
        if before != now
        else f"{now} is given twice, differently"
    )
    return Refusal("config", path, reason, "write one of them")


def literal(text: str) -> Any:
    """Parse a JSON value (``3``, ``true``, ``[1, 2]``, ``"3"``); return other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text

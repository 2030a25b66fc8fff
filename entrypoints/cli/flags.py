"""The command line as configuration: flags, ``--set``, ``--config``, ``--facts``; and from there to
a plan. No torch.

Precedence: command line over file over contributed default over default; the place of each value is
kept for messages.
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
from glowplug.entrypoints.cli.flag_table import ALWAYS, FLAGS, MOOT, Flag
from glowplug.entrypoints.cli.parallel_flags import ONE_RANK, SECTION, arrange, larger_than_one
from glowplug.entrypoints.cli.parser_flags import without_wrong_parsers

_NUMBER = re.compile(r"-\d+(?:\.\d+)?")
SHOWN = 200  #: characters of a flag's value in messages
_ITEM = re.compile(r"(\w+)\[([\w*]+)\]\.(\w+)")


class Parser(argparse.ArgumentParser):
    """argparse with hyphens and underscores alike, no abbreviations, and "did you mean" for an
    unknown flag.
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
        """Yield what is wrong with each of the words that no option takes; those behind a flag
        count as its values.
        """
        valued = False
        for word in words:
            if word.startswith("-") and not _NUMBER.fullmatch(word):
                yield self._unknown(word.partition("=")[0])
                valued = "=" not in word
            elif not valued:
                yield f"unexpected argument {word!r}"

    def _unknown(self, name: str) -> str:
        from glowplug.entrypoints.cli.foreign_flags import unsupported

        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        reason = unsupported(name, known)
        if reason:
            return reason
        close = difflib.get_close_matches(name.lstrip("-"), [flag[2:] for flag in known], 1, 0.6)
        return f"unknown flag {name}" + (f", did you mean --{close[0]}?" if close else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def hyphened(word: str) -> str:
    """``--disable_cuda_graph=x`` as ``--disable-cuda-graph=x``; everything else as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


class _Given(argparse.Action):
    """Collects (flag, spelling, value) in command-line order."""

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
    """A value that no second one replaces: another value is an error."""

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
    """Every engine flag, ``--set``, ``--config``, ``--facts``, ``--plugin``, ``--block-plugin``."""
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
        help=f"plan for another machine: a file, or {', '.join(sheet_names())}",
    )
    group.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        dest="extra_plugins",
        help="load one more plugin module",
    )
    group.add_argument(
        "--block-plugin",
        action="append",
        default=[],
        metavar="NAME",
        dest="blocked_plugins",
        help="leave a plugin out",
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
    for name, why in ALWAYS.items():
        group.add_argument(
            name, action="append_const", const=name, dest="always_so", help=f"accepted: {why}"
        )


def serve_defaults(
    config: Mapping[str, Any],
    hardware: HardwareFacts | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """What serving does unless the operator says otherwise: the embedded model, a process a rank.

    Several hosts (asked for, on the fact sheet, or as torchrun started this process) make the
    executor "torchrun".
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
    """What a command line says: configuration with the place of each value, faults found so far,
    and notes.

    ``source``: what to call it in messages.
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
        """The plan, with ``contributed`` defaults by dotted path (None: those of serving).

        ConfigError, PlanRefused with every reason.
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
    """Plugins loaded, file read, flags and ``--set`` laid over it. PluginLoadError, ConfigError."""
    plugins = plugins or load_plugins(extra=args.extra_plugins, block=args.blocked_plugins)
    layer, notes = command_line_layer(getattr(args, "engine_flags", []), args.overrides)
    notes += [
        Decision(name, "no effect", "operator", ALWAYS[name])
        for name in dict.fromkeys(getattr(args, "always_so", None) or ())
    ]
    if args.config:
        layer = merge(layer, read_config(Path(args.config), plugins))
    notes += [Decision(path, value, "operator", why) for path, value, why in layer.replaced]
    notes += [
        *arrange(layer, getattr(args, "engine_flags", [])),
        *_alone(layer, getattr(args, "engine_flags", [])),
    ]
    _attention_of_kind(layer, plugins)
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


def _attention_of_kind(layer: Layer, plugins: PluginSet) -> None:
    """``--attention-backend fa3``, other engines' word for both kinds of attention: the backend for
    this model's.
    """
    path = "attention.use"
    if not layer.origins.get(path, "").startswith("--attention-backend"):
        return
    asked = _get(layer.data, path)
    try:
        kind = plugins.read_model(str(layer.data.get("model", EMBEDDED))).facts.kind
    except GlowplugError:
        return  # which the plan says
    if not plugins.find("attention", asked) and plugins.find("attention", f"{asked}_{kind}"):
        set_path(layer.data, path, f"{asked}_{kind}")


def command_line_layer(
    given: Sequence[tuple[Flag, str, Any]], overrides: Sequence[str]
) -> tuple[Layer, list[Decision]]:
    """Flags in order, then ``--set``, as one layer; flags that have no effect become notes."""
    layer = Layer()
    spelled = {flag.names[0] for flag, _, _ in given}
    notes = []
    once = _once_each(given, layer)
    for flag, spelling, value in once:
        moot = _moot(flag, spelled)
        if moot:
            notes.append(Decision(spelling, "no effect", "operator", moot))
            continue
        _assign(
            layer, {**flag.also, flag.path: _meant(flag, value)}, _written(flag, spelling, value)
        )
    for override in overrides:
        _override(layer, override)
    for number, shown in larger_than_one(layer, once):
        path = f"{SECTION}.{number}.size"
        layer.refusals.append(_contradiction(path, shown, layer.origins.get(path, path)))
    return layer, notes


def _once_each(given: Sequence[tuple[Flag, str, Any]], layer: Layer) -> list[tuple[Flag, str, Any]]:
    """Each flag the first time it is given; one given again with another value is a refusal in
    ``layer``.
    """
    first: dict[str, tuple[Flag, str, Any]] = {}
    for flag, spelling, value in given:
        _, before, held = first.setdefault(flag.names[0], (flag, spelling, value))
        if _meant(flag, held) != _meant(flag, value):
            layer.refusals.append(
                _contradiction(
                    flag.path, _written(flag, before, held), _written(flag, spelling, value)
                )
            )
    return list(first.values())


def _meant(flag: Flag, value: Any) -> Any:
    """A flag's value in this engine's words."""
    return flag.values.get(value, value) if isinstance(value, str) else value


def _written(flag: Flag, spelling: str, value: Any) -> str:
    """A flag and its value as they stand on the command line; keys are left out."""
    if flag.convert is None or flag.path.endswith("api_key"):
        return spelling
    return f"{spelling} {_shown(value)}"


def _moot(flag: Flag, spelled: set[str]) -> str:
    other, when_given, why = MOOT.get(flag.names[0], ("", False, ""))
    return f"{why} ({other})" if when_given and other in spelled else ""


def _alone(layer: Layer, given: Sequence[tuple[Flag, str, Any]]) -> list[Decision]:
    """Leave out what flags say of a component that nothing in ``layer`` names; a note for each."""
    notes = []
    for flag, spelling, _ in given:
        other, when_given, why = MOOT.get(flag.names[0], ("", True, ""))
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
    """Return a flag's value as messages repeat it: one line of at most SHOWN characters."""
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(words.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _assign(layer: Layer, fields: Mapping[str, Any], shown: str) -> None:
    """Set what a flag does, or nothing where one of these fields has another value: a refusal
    naming both flags.
    """
    resolved = {
        _resolve_item(layer, path, shown): value
        for path, value in fields.items()
        if path not in ONE_RANK or value != 1
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
    """Do two values mean one? Those of attention do where one is another engine's word for a
    library and the other this engine's name of its latent attention, which flags of such models
    say."""
    return bool(
        held == value
        or path == "attention.use"
        and (held == f"{value}_mla" or value == f"{held}_mla")
    )


def _resolve_item(layer: Layer, path: str, shown: str) -> str:
    """``parallel[tensor].size`` as ``parallel.0.size``: the list item with that ``use``, added when
    it is missing.
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
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _override(layer: Layer, override: str) -> None:
    """Set what ``--set A.B=VALUE`` says; each value of a section or of a list of sections counts as
    set alone.
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
    """(path, value) of everything in ``value`` that is neither a section nor a list of sections."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}.{number}", item)
    else:
        yield path, value


def _origin(layer: Layer, path: str) -> str:
    """Where the value at ``path``, one in it, or one that it is in was written; "" where it was
    not.
    """
    for written, origin in layer.origins.items():
        if f"{written}.".startswith(f"{path}.") or path.startswith(f"{written}."):
            return origin
    return ""


def _contradiction(path: str, before: str, now: str) -> Refusal:
    what = (
        f"{before} and {now} contradict each other"
        if before != now
        else f"{now} is given twice, differently"
    )
    return Refusal("config", path, what, "write one of them")


def literal(text: str) -> Any:
    """A JSON value (``3``, ``true``, ``[1, 2]``, ``"3"``), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text

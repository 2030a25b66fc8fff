"""Engine options of a command: all flags, and the options for files, sheets and plugins."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from glowplug.core.errors import PluginLoadError
from glowplug.core.facts.machine import sheet_names
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.cli.flags.flag import Flag, GivenFlag
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.flags.table import ALWAYS_ON, BLOCKING, FLAGS


class _Collect(argparse.Action):
    """An argparse action that appends a :class:`GivenFlag` to the parsed ``engine_flags``.

    ``engine_flags`` is a list in command-line order.
    """

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
        given = getattr(namespace, "engine_flags", None) or ()
        value = self.flag.value if self.flag.convert is None else values
        added = GivenFlag(self.flag, option_string or self.flag.names[0], value)
        namespace.engine_flags = [*given, added]


class _UniqueValue(argparse.Action):
    """An argparse action for options that may be repeated only with the same value."""

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


def add_model_word(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL, which means the same as ``--model MODEL``."""
    parser.add_argument(
        "model_word", nargs="?", metavar="MODEL", help="the model, in place of --model MODEL"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add all engine flags, and the options for configuration file, fact sheet and plugins."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--config", action=_UniqueValue, metavar="FILE", help="configuration in TOML, YAML or JSON"
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
        action=_UniqueValue,
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
        _add_flag(group, flag)
    _add_switches(group)
    if isinstance(parser, Parser):
        parser.late_flags = partial(_add_plugin_flags, parser, group)


def _add_plugin_flags(
    parser: Parser, group: argparse._ArgumentGroup, found: argparse.Namespace
) -> None:
    """Add the flags that plugins declare; only called for a command line with unknown flags.

    Raises:
        PluginLoadError: a plugin cannot be loaded, or its flag is taken.
    """
    plugins = load_plugins(extra=found.extra_plugins, block=found.blocked_plugins)
    for name, flags in plugins.call_each("command_flags"):
        for one in flags:
            flag = Flag((one.name,), one.path, one.summary, one.convert)
            if parser.has_flag(one.name):
                raise PluginLoadError(
                    f"plugin {name!r}: the flag {one.name} of its command_flags is taken; fix: "
                    "another name"
                )
            _add_flag(group, flag)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    """Add one engine flag."""
    nargs: Any = 0 if flag.convert is None else "+" if flag.many else None
    metavar = None if flag.convert is None else flag.path.rpartition(".")[2].upper()
    group.add_argument(
        *flag.names,
        action=_Collect,
        flag=flag,
        nargs=nargs,
        type=flag.convert or str,
        help=flag.help,
        dest="engine_flags",
        default=argparse.SUPPRESS,
        metavar=metavar,
    )


def _add_switches(group: argparse._ArgumentGroup) -> None:
    """Add other engines' switches that block a plugin or have no effect."""
    for name, (plugin, effect) in BLOCKING.items():
        group.add_argument(
            name, action="append_const", const=plugin, dest="blocked_plugins", help=effect
        )
    for name, why in ALWAYS_ON.items():
        group.add_argument(
            name, action="append_const", const=name, dest="always_on", help=f"no effect: {why}"
        )

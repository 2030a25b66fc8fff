"""Registry of one session's plugins: built-ins, entry points and ``--plugin`` modules.

Built-in plugins are loaded as third-party ones are, which are found as entry points of the group
``glowplug``. Built-ins register first, so they come first in every list of candidates.
There is no global registry. Plan zone: no torch.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pluggy

from glowplug.core.errors import FactsError, GlowplugError, PluginLoadError
from glowplug.core.facts.machine import (
    entry_points,
    installed,
    module_owners,
    search_path,
    software,
)
from glowplug.core.facts.model_facts import ModelFacts, SoftwareFacts
from glowplug.core.facts.model_folder import ArchitectureRules, locate_model
from glowplug.core.plugin import hookspecs
from glowplug.core.plugin.component import CONTRACT, Component
from glowplug.core.plugin.loading import (
    BUILT_IN,
    PluginSource,
    Registration,
    describe,
    failed,
    load,
    result_fault,
    watched,
)
from glowplug.core.plugin.model_reading import ModelReading, architecture_rules, complete
from glowplug.core.plugin.offers import Offers
from glowplug.core.plugin.slots import SLOTS

GROUP = "glowplug"  #: entry-point group of third-party plugins
LOAD_TIMEOUT = 30.0  #: seconds one plugin may take to load

#: module and attribute of the names of the built-in plugins, in order of preference
BUILT_IN_PLUGINS = "glowplug.plugins.built_in:DEFAULT_PLUGINS"

#: types of attributes that can be marked as hook implementations
_ROUTINES = (FunctionType, MethodType, staticmethod, classmethod)


class _Manager(pluggy.PluginManager):
    """pluggy's plugin manager, which inspects only the marked functions of a module.

    Inspecting all attributes of a module takes half of a plugin's load time.
    """

    _MARK = f"{hookspecs.PROJECT}_impl"  #: attribute that ``hookimpl`` sets

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if isinstance(plugin, ModuleType):
            held = vars(plugin).get(name)
            if not isinstance(held, _ROUTINES):
                return None
            return getattr(held, self._MARK, None)
        return super().parse_hookimpl_opts(plugin, name)


class PluginSet:
    """Loaded plugins and the components they registered; :func:`load_plugins` makes it.

    Attributes:
        hook: pluggy's callers of the life-cycle hooks.
        sources: loaded plugins in the order of registration.
        blocked: names of plugins that the operator left out.
    """

    def __init__(
        self,
        sources: Iterable[PluginSource],
        blocked: Iterable[str] = (),
        timeout: float = LOAD_TIMEOUT,
    ) -> None:
        self._manager = _Manager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.hook = self._manager.hook
        self.blocked = tuple(blocked)
        self.sources: list[PluginSource] = []
        self._slots: dict[str, list[Registration]] = {slot.name: [] for slot in SLOTS}
        self._owner: dict[tuple[str, str], PluginSource] = {}
        self._found: dict[tuple[str, str], Registration] = {}
        self._models: dict[tuple[str, int, int], ModelReading] = {}
        watched(timeout, sources, self._add)

    def _add(self, source: PluginSource) -> None:
        """Load a plugin and add its components to their slots."""
        found = load(self._manager, source)
        self.sources.append(source)
        for slot, components in found.items():
            for component in components:
                self._claim(slot, component, source)

    def _claim(self, slot: str, component: Component, source: PluginSource) -> None:
        """Add a component to its slot.

        Raises:
            PluginLoadError: another plugin registered a component of this name in the slot.
        """
        taken = self._owner.get((slot, component.name))
        if taken is not None:
            raise PluginLoadError(
                f"two plugins register {slot} {component.name!r}: "
                f"{taken.label} and {source.label}; "
                f"phase: load plugins | fix: block one of them (--block-plugin {source.name})"
            )
        self._owner[slot, component.name] = source
        found = Registration(component, source.distribution, source.version)
        self._slots[slot].append(found)
        self._found[slot, component.name] = found

    def components(self, slot: str) -> list[Registration]:
        """Return the components registered in ``slot``, in order of preference."""
        return self._slots[slot]

    def find(self, slot: str, name: str) -> Registration | None:
        """Return the component called ``name`` in ``slot``, or None."""
        return self._found.get((slot, name))

    def offers(self, slot: str, name: str) -> Offers | None:
        """Return the component's offers, or None."""
        found = self.find(slot, name)
        return found.component.offers if found is not None else None

    def source_of(self, slot: str, name: str) -> PluginSource:
        """Return the plugin that registered the component ``name`` in ``slot``.

        Raises:
            KeyError: ``slot`` has no component of this name.
        """
        return self._owner[slot, name]

    def hooks_of(self, name: str) -> list[str]:
        """Return the names of the hooks that the plugin ``name`` implements."""
        plugin = self._manager.get_plugin(name)
        callers = self._manager.get_hookcallers(plugin) if plugin is not None else None
        return [caller.name for caller in callers or []]

    def call_each(
        self, hook: str, after: Callable[[PluginSource], None] | None = None, **arguments: Any
    ) -> list[tuple[str, Any]]:
        """Call a hook of all plugins in registration order; return (plugin name, result) of each.

        ``after`` is called with each plugin once its hook has returned.

        Raises:
            PluginLoadError: a plugin's hook raised an exception; the message names the plugin.
        """
        caller: pluggy.HookCaller = getattr(self.hook, hook)
        results = []
        named = {one.name: one for one in self.sources}
        for impl in caller.get_hookimpls():
            source = named[impl.plugin_name]
            try:
                result = impl.function(*(arguments[name] for name in impl.argnames))
            except Exception as error:
                raise failed(source, f"{hook} failed: {describe(error)}", hook) from error
            fault = result_fault(hook, result)
            if fault:
                raise failed(source, f"{hook} returned {fault}", hook)
            if after is not None:
                after(source)
            results.append((source.name, result))
        return results

    def read_model(self, name: str, revision: str | None = None) -> ModelReading:
        """Return the facts of the model ``name``, cached until its folder or config.json changes.

        Args:
            name: model as in the configuration.
            revision: branch, tag or commit of a downloaded hub id; None: the default branch.

        Raises:
            FactsError: no such model, or no plugin can read it.
            WeightError: the checkpoint is incomplete or damaged.
        """
        located = locate_model(name, revision)
        stated = os.path.join(located, "config.json")
        key = (
            located,
            os.stat(located).st_mtime_ns,
            os.stat(stated).st_mtime_ns if os.path.exists(stated) else 0,
        )
        if key not in self._models:
            path = Path(located)
            facts = self._facts(path)
            if facts is None:
                raise FactsError(
                    f"no plugin reads a model from {path}",
                    "a folder with config.json and safetensors files, or a plugin for this format",
                )
            self._models[key] = self.complete(facts)
        return self._models[key]

    def complete(self, facts: ModelFacts) -> ModelReading:
        """Return ``facts`` with its family's layer sizes and split dimensions, and element counts.

        Raises:
            FactsError: the family declares no inventory, and the model has no tensor headers.
        """
        return complete(facts, self._slots["model"], self._slots["quantization"])

    @cached_property
    def rules(self) -> ArchitectureRules:
        """Declarations of the model families that are needed to read config.json."""
        return architecture_rules(self._slots["model"])

    def _facts(self, path: Path) -> ModelFacts | None:
        """Return the facts that the first plugin reads from ``path``; None if no plugin does."""
        try:
            found: ModelFacts | None = self.hook.read_model_facts(path=path, rules=self.rules)
        except GlowplugError:
            raise
        # NOTE: if a reader fails on a damaged file, the file is refused with the place in the code
        except Exception as error:
            raise FactsError(
                f"{path} could not be read: {describe(error)}", "download the model again"
            ) from error
        return found

    @cached_property
    def packages(self) -> frozenset[str]:
        """Names of the packages that components require or can use or hooks check, and torch."""
        checked = self._checked_packages(lambda source: True)
        return frozenset({"torch", *self._packages(lambda found: True), *checked})

    @cached_property
    def third_party_packages(self) -> frozenset[str]:
        """Names in ``packages`` that no built-in plugin requires, uses or checks."""
        return self.packages - {
            "torch",
            *self._packages(lambda found: found.distribution == BUILT_IN),
            *self._checked_packages(lambda source: source.distribution == BUILT_IN),
        }

    def _packages(self, wanted: Callable[[Registration], bool]) -> Iterator[str]:
        """Yield the packages that the ``wanted`` components require or can use."""
        for found in filter(wanted, itertools.chain.from_iterable(self._slots.values())):
            yield from (package.name for package in found.component.requires)
            yield from itertools.chain.from_iterable(found.component.uses.values())

    def _checked_packages(self, wanted: Callable[[PluginSource], bool]) -> Iterator[str]:
        """Yield the packages that the hooks of the ``wanted`` plugins check."""
        names = {source.name for source in self.sources if wanted(source)}
        for name, packages in self.call_each("checked_packages"):
            yield from packages if name in names else ()

    @cached_property
    def software(self) -> SoftwareFacts:
        """Versions of Python and the installed ``packages``, and a C++ compiler's path."""
        return software(self.packages)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the plugins, as recorded in ``EnginePlan.plugins``."""
        return tuple(source.name for source in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of plugins, versions and component names; ranks with another hash do not start."""
        parts = [f"contract {CONTRACT}"]
        parts += [f"{source.name} {source.target} {source.origin}" for source in self.sources]
        parts += [
            f"{slot}.{found.component.name}"
            for slot, all_found in self._slots.items()
            for found in all_found
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_plugins(
    extra: Sequence[str] = (),
    block: Sequence[str] = (),
    *,
    defaults: Sequence[str] | None = None,
    entry_points: bool = True,
    timeout: float = LOAD_TIMEOUT,
) -> PluginSet:
    """Load the built-in plugins, then entry points, then ``extra`` modules.

    Args:
        extra: dotted names of further modules (``--plugin``).
        block: names of plugins to leave out (``--block-plugin``).
        defaults: dotted names of plugins to load first; None for the built-in ones.
        entry_points: load the entry points of the group ``glowplug``.
        timeout: seconds that one plugin may take to load.

    Raises:
        PluginLoadError: a plugin cannot be loaded, takes too long, implements an unknown hook or
            registers a component under a taken name (the message names plugin, distribution and
            version); or a name in ``block`` is not the name of a plugin.
    """
    names = built_in_plugins() if defaults is None else defaults
    sources = [PluginSource(name, name) for name in names]
    sources += entry_point_sources() if entry_points else []
    sources += [PluginSource(name, name, *distribution_of(name)) for name in extra]
    found = {source.name for source in sources}
    for name in block:
        if name not in found:
            raise PluginLoadError(
                f"cannot block {name!r}: no such plugin; found: {', '.join(sorted(found))}"
            )
    kept = [source for source in sources if source.name not in set(block)]
    return PluginSet(kept, block, timeout)


def built_in_plugins() -> tuple[str, ...]:
    """Return the dotted names of the built-in plugins, in order of preference."""
    module, _, attribute = BUILT_IN_PLUGINS.partition(":")
    names: tuple[str, ...] = getattr(importlib.import_module(module), attribute)
    return names


def entry_point_sources() -> list[PluginSource]:
    """Return the plugins that installed distributions offer as entry points, sorted by name.

    Raises:
        PluginLoadError: two entry points have the same name; pluggy would skip the second silently.
    """
    sources: dict[str, PluginSource] = {}
    for source in found_entry_points():
        if source.name in sources:
            raise PluginLoadError(
                f"two distributions have an entry point named {source.name!r}: "
                f"{sources[source.name].origin} and {source.origin}; uninstall one of them"
            )
        sources[source.name] = source
    return list(sources.values())


def found_entry_points() -> tuple[PluginSource, ...]:
    """Return the entry points of the group ``glowplug``, also those that share a name, by name."""
    return tuple(
        PluginSource(
            point.name,
            point.value,
            point.dist.name if point.dist else "unknown distribution",
            point.dist.version if point.dist else "",
        )
        for point in entry_points(GROUP, search_path())
    )


def distribution_of(module: str) -> tuple[str, str]:
    """Return distribution and version of a module given by ``--plugin``, as far as known."""
    top = module.partition(":")[0].partition(".")[0]
    if top == "glowplug":
        return BUILT_IN, ""
    owners = module_owners(top)
    if not owners:
        return f"module {module}", ""
    return owners[0], installed(owners[0])

"""Loading of one plugin: it is imported and registered, and its components are checked.

Loading has a time limit. A failure undoes the registration and raises :class:`PluginLoadError`,
which names the plugin, its distribution and version. Plan zone: no torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from glowplug.core.errors import PluginLoadError
from glowplug.core.plugin.component import CONTRACT, Component, Options, Tuner
from glowplug.core.plugin.declared.component import component_fault
from glowplug.core.plugin.slots import BY_NAME, SLOTS, Slot

BUILT_IN = "built in"
#: contract of components of installed distributions that state none
UNSTATED_CONTRACT = 1


@dataclass(frozen=True)
class PluginSource:
    """The origin of a plugin that may not be imported yet.

    Attributes:
        name: name of the entry point, or dotted module name of built-ins and ``--plugin``.
        target: import path, ``"package.module"`` or ``"package.module:attribute"``.
        distribution: name of the distribution that contains it.
        version: version of the distribution; "" for built-ins.
        loaded: the plugin object itself if there is nothing to import (tests).
    """

    name: str
    target: str
    distribution: str = BUILT_IN
    version: str = ""
    loaded: object | None = None

    @property
    def label(self) -> str:
        """Name and origin for messages, such as ``'tables' (glowplug-tables 1.0)``."""
        return f"{self.name!r} ({self.origin})"

    @property
    def origin(self) -> str:
        """Distribution and version for messages."""
        return f"{self.distribution} {self.version}".rstrip()


class Registration(NamedTuple):
    """A component with the distribution and version of the plugin that registered it."""

    component: Component
    distribution: str
    version: str


def watched(
    seconds: float, sources: Iterable[PluginSource], add: Callable[[PluginSource], None]
) -> None:
    """Call ``add(source)`` for each source in turn, in a thread, with a time limit for each call.

    NOTE: a hanging import cannot be interrupted. Its daemon thread is left running, and the caller
    is expected to end the process.

    Args:
        seconds: time limit of one call.

    Raises:
        PluginLoadError: a call exceeded the limit; the message shows its stack.
        BaseException: any exception that ``add`` raised.
    """
    failure: list[BaseException] = []
    current: list[tuple[float, PluginSource]] = []

    def run() -> None:
        try:
            for source in sources:
                current[:] = [(time.monotonic(), source)]
                if failure:  # a source exceeded the limit, and the caller has gone on
                    return
                add(source)
        # NOTE: includes SystemExit: a plugin that exits on import must not end the process silently
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="load plugins", daemon=True)
    thread.start()
    while thread.is_alive():
        begun, source = current[0] if current else (time.monotonic(), None)
        thread.join(max(0.0, begun + seconds - time.monotonic()))
        late = time.monotonic() >= begun + seconds and current[:1] == [(begun, source)]
        if source is not None and late and thread.is_alive():
            failure.append(_hanging(thread, source, seconds))
            break
    if failure:
        raise failure[0]


#: hook -> type of its result, and name of the type of the result's elements ("": not checked)
_RESULTS: dict[str, tuple[str, str]] = {
    "contribute_defaults": ("dict", ""),
    "check_plan": ("list", "Refusal"),
    "plan_remarks": ("list", "Decision"),
    "step_observers": ("list", ""),
    "tuners": ("list", "Tuner"),
}


def result_fault(hook: str, result: Any) -> str:
    """Return how the result of a hook has another type than its specification; "" if not."""
    if result is None or hook not in _RESULTS:
        return ""
    wanted, element = _RESULTS[hook]
    if not isinstance(result, dict if wanted == "dict" else (list, tuple)):
        return f"{type(result).__name__}, expected a {wanted}"
    for one in result if element else ():
        names = [kind.__name__ for kind in type(one).__mro__]
        if element not in names:
            return f"a list with {one!r:.60}, expected a list of {element}"
    return ""


def failed(source: PluginSource, reason: str, phase: str = "load plugins") -> PluginLoadError:
    """Return the error for a faulty plugin, with what the operator can do."""
    return PluginLoadError(
        f"plugin {source.label}: {reason}\n    phase: {phase} | fix: {plugin_fix(source)}"
    )


def plugin_fix(source: PluginSource) -> str:
    """Return what the operator can do about a faulty plugin."""
    fix = "report it" if source.distribution == BUILT_IN else f"correct or update {source.origin}"
    return f"{fix}, or start without it (--block-plugin {source.name})"


def component_failure(
    slot: str, name: str, distribution: str, version: str, phase: str, reason: str
) -> str:
    """Return the message for a component that broke its contract or raised an exception.

    Args:
        slot: name of its slot.
        name: name of the component.
        distribution: distribution that registered it.
        version: version of the distribution; "" for built-ins.
        phase: what the engine was doing.
        reason: the fault.
    """
    origin = f"{distribution} {version}".rstrip()
    said = f"{slot} {name!r} ({origin}) failed in phase {phase}: {reason}"
    return f"{said}\n    fix: {component_fix(slot, distribution, version)}"


def component_fix(slot: str, distribution: str, version: str) -> str:
    """Return what the operator can do about a faulty component; see ``component_failure``."""
    section = BY_NAME[slot].section
    other = f"choose another component ({section}.use)" if section else "choose another model"
    origin = f"{distribution} {version}".rstrip()
    fix = "report it" if distribution == BUILT_IN else f"correct or update {origin}"
    return f"{fix}, or {other}"


def failure_in(
    sources: Iterable[PluginSource], error: Exception, phase: str
) -> PluginLoadError | None:
    """Return the error for an exception that a third party's code raised outside its hooks.

    Such code are the functions in offers and the methods of options.

    Args:
        sources: the loaded plugins.
        error: the exception.
        phase: what the engine was doing.

    Returns:
        The error, which names the plugin; None if no third party's code raised ``error``.
    """
    owners: dict[str, str] = {}
    for frame, _ in list(traceback.walk_tb(error.__traceback__))[1:]:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        one = frame.f_locals.get("self")
        owners.setdefault(package, "")
        if isinstance(one, Options):
            owners[package] = f"the options of {one.use!r} "
    for source in sources:
        package = source.target.partition(":")[0].partition(".")[0]
        if source.distribution != BUILT_IN and package in owners:
            return failed(source, f"{owners[package]}raised {describe(error)}", phase)
    return None


def _hanging(thread: threading.Thread, source: PluginSource, seconds: float) -> PluginLoadError:
    """Return the error for a source whose loading exceeded the limit, with the thread's stack."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
    return failed(source, f"did not finish loading within {seconds:g} s; it hangs at\n{stack}")


def load(manager: pluggy.PluginManager, source: PluginSource) -> dict[str, list[Component]]:
    """Import and register one plugin, and return its components by slot name.

    Raises:
        PluginLoadError: the plugin could not be loaded; it is not left registered.
    """
    try:
        return _registered(manager, source)
    except PluginLoadError:
        _undo(manager, source)
        raise
    except BaseException as error:
        _undo(manager, source)
        if isinstance(error, KeyboardInterrupt):
            raise
        reason = f"could not be loaded: {describe(error)}{_absent(source, error)}"
        raise failed(source, reason) from error


def _registered(manager: pluggy.PluginManager, source: PluginSource) -> dict[str, list[Component]]:
    """Import and register one plugin, without cleanup after a failure; return its components."""
    plugin = _import(source)
    if manager.get_name(plugin) is not None:
        return {}  # the same module under a second name
    manager.register(plugin, name=source.name)
    callers = {caller.name: caller for caller in manager.get_hookcallers(plugin) or []}
    _refuse_unknown_hooks(manager, callers, source)
    return _components(callers, plugin, source)


def _absent(source: PluginSource, error: BaseException) -> str:
    """Return a hint for a plugin whose own module is not found; "" for every other failure."""
    module = source.target.partition(":")[0]
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module}.".startswith(f"{missing}."):
        return ""
    return "; install the distribution that has it, or add its folder to PYTHONPATH"


def _import(source: PluginSource) -> object:
    """Return the plugin object: a module, an attribute of it, or an instance of a class."""
    if source.loaded is not None:
        return source.loaded
    module, _, attribute = source.target.partition(":")
    found: object = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    if isinstance(found, type):
        found = found()
    return found


def _undo(manager: pluggy.PluginManager, source: PluginSource) -> None:
    """Unregister a plugin if it is registered.

    NOTE: pluggy keeps a plugin in its tables after its registration failed.
    """
    plugin = manager.get_plugin(source.name)
    if plugin is not None:
        manager.unregister(plugin)


def describe(error: BaseException) -> str:
    """Return an exception as ``Type: message (file:line)``, of the innermost frame with a file."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _refuse_unknown_hooks(
    manager: pluggy.PluginManager, callers: Mapping[str, pluggy.HookCaller], source: PluginSource
) -> None:
    """Raise PluginLoadError if a plugin implements a hook that does not exist.

    ``callers``: callers of the plugin's hooks, by name.
    """
    for name, caller in callers.items():
        if not caller.has_spec():
            known = [one for one in vars(manager.hook) if not one.startswith("_") and one != name]
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise failed(source, f"implements {name!r}, which is not a hook{hint}")


def _components(
    callers: Mapping[str, pluggy.HookCaller], plugin: object, source: PluginSource
) -> dict[str, list[Component]]:
    """Call the plugin's registration hooks and return the checked components by slot name.

    ``callers``: callers of the plugin's hooks, by name.
    """
    found: dict[str, list[Component]] = {}
    for slot in SLOTS:
        caller = callers.get(slot.hook)
        for impl in caller.get_hookimpls() if caller is not None else ():
            if impl.plugin is plugin:
                made = impl.function()
                if not isinstance(made, list):
                    raise failed(
                        source,
                        f"{slot.hook} returned {type(made).__name__}, expected a list of Component",
                    )
                for component in made:
                    _check_component(component, slot, source)
                found.setdefault(slot.name, []).extend(_versioned(one, source) for one in made)
    return found


def _versioned(component: Component, source: PluginSource) -> Component:
    """Return the component with its contract, also if it states none."""
    if component.contract is not None:
        return component
    return replace(component, contract=UNSTATED_CONTRACT if source.version else CONTRACT)


def _check_component(component: Any, slot: Slot, source: PluginSource) -> None:
    """Raise PluginLoadError if a component is not built as the resolver expects."""
    fault = component_fault(component, slot)
    if fault is not None:
        raise failed(source, f"{slot.hook}: {fault}")


def import_factory(component: Component | Tuner, origin: str) -> Callable[..., Any]:
    """Import the runtime class of a component or a tuner.

    Args:
        origin: distribution and version for messages.

    Raises:
        PluginLoadError: the class cannot be imported or is not callable.
    """
    label = f"{component.name!r} ({origin})"
    found = imported(component.factory, label)
    if not callable(found):
        raise PluginLoadError(f"{component.factory} of {label} is not callable")
    factory: Callable[..., Any] = found
    return factory


def imported(path: str, label: str) -> Any:
    """Return the object at ``"package.module:Name"``.

    Args:
        label: owner of the object, for messages.

    Raises:
        PluginLoadError: it cannot be imported.
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        assert isinstance(found, ModuleType)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise PluginLoadError(
            f"{path} of {label} could not be imported: {describe(error)}"
        ) from error
    return found

"""``glowplug tune attention``: launch configurations and backends of decode attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.machine import installed
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.component import Component
from glowplug.core.plugin.loading import import_factory
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.protocols import AttentionBackend, Worker
from glowplug.core.protocols.tuning import LayerShapes, Log, TuneTable
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.timing import microseconds
from glowplug.plugins.attention.shared.attention_tables import (
    AttentionProblem,
    chooses_among_others,
    problem_of,
    release,
)
from glowplug.plugins.attention.tuning.decode_call import DecodeCalls, DecodeStep
from glowplug.plugins.attention.tuning.search import search
from glowplug.plugins.attention.tuning.tilings import axes_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  #: default row counts
CONTEXTS = (1024, 4096, 16384)  #: keys of a row
OWN_TIME_SHARE = 0.8  #: share of the time of a row count that the search may take
TOLERANCE = 0.02  #: largest relative difference of a configuration's result from the rule's

Timer = Callable[[Sequence[Callable[[], object]]], float]


class AttentionTuner:
    """``TableTuner`` (``core/protocols/tuning.py``) of decode attention.

    A table has one length of rows. At each number of rows every backend of the model's kind that
    can run here is timed. Of backends whose launch configuration can be set (they have the
    attributes ``tile`` and ``used``, see ``TritonMla``) the fastest configuration is searched.

    Args:
        plan: the plan, whose layout, page size and dtypes are those of the tables.
        worker: the device; None: the current one of the plan's kind.
        timer: function from calls to the microseconds of one call.
        plugins: the plugins; None: those of the plan.
    """

    def __init__(
        self,
        plan: EnginePlan,
        worker: Worker | None = None,
        timer: Timer = microseconds,
        plugins: PluginSet | None = None,
    ) -> None:
        self._plan = plan
        self._worker = worker or Worker(device=plan.device, dtype=getattr(torch, plan.dtype))
        self._timer = timer
        self._plugins = plugins or _plugins_of(plan)

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        plan = self._plan
        model = plan.facts.model
        found = []
        for width in sorted({1, plan.sizes.width}):
            problem = problem_of(model, plan.mesh, plan.dtype, plan.kv_dtype, width)
            for context in CONTEXTS:
                if context > model.max_positions:
                    continue
                path = tuned_tables.path_to_write(problem.table_name(context))
                try:
                    done = tuple(tuned_tables.begun(path))
                except tuned_tables.NoTable as error:
                    raise ValueError(f"{error}: move it away") from None
                found.append(
                    TuneTable(problem.label(context), path, rows or ROWS, done, (problem, context))
                )
        return found

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        problem, context = table.problem
        known = tuned_tables.begun(table.path)
        deadline = time.monotonic() + seconds
        backends = self._backends(problem, log)
        for number, rows in enumerate(table.missing):
            left = deadline - time.monotonic()
            if left <= 0:
                log(f"out of time before measuring {rows} rows")
                return
            share = left / (len(table.missing) - number)
            found = self._measured(backends, DecodeStep(problem, rows, context), share, log)
            if found["us"]:
                known[rows] = found
                tuned_tables.keep(table.path, known)

    def _backends(self, problem: AttentionProblem, log: Log) -> list[Component]:
        """Return the backends to measure; log why the others of the model's kind are not."""
        found = []
        for registration in self._plugins.components("attention"):
            component = registration.component
            offers: Any = component.offers
            if problem.kind not in offers.kinds or chooses_among_others(offers):
                continue
            reason = self._unfit(component, problem)
            if reason:
                log(f"{component.name} is not measured: {reason}")
            else:
                found.append(component)
        return found

    def _unfit(self, component: Component, problem: AttentionProblem) -> str:
        """Return why a backend cannot run the step on this device; "" if it can."""
        offers: Any = component.offers
        plan = self._plan
        cards = {device.compute for device in plan.facts.hardware.devices}
        page = plan.sizes.page_size
        missing = missing_packages(component, plan.facts.software.packages)
        if plan.device not in offers.devices:
            return f"it runs on {', '.join(sorted(offers.devices))}"
        if missing:
            return f"it needs {missing[0][0]} ({missing[0][1]})"
        if plan.device == "cuda" and offers.compute and not cards <= offers.compute:
            return "it does not run on this GPU"
        if plan.dtype not in offers.dtypes or plan.kv_dtype not in offers.kv_dtypes:
            return f"it does not read {plan.kv_dtype} in {plan.dtype}"
        if offers.page_sizes and page not in offers.page_sizes:
            return f"it does not read pages of {page} tokens"
        if offers.max_width and problem.width > offers.max_width:
            return f"it does not compute {problem.width} tokens per row"
        return ""

    def _measured(
        self,
        backends: list[Component],
        step: DecodeStep,
        seconds: float,
        log: Log,
    ) -> dict[str, Any]:
        """Return the measurements of all backends for one step.

        Backends that fail are logged and left out. ``seconds``: time limit of the search.
        """
        found: dict[str, Any] = {"us": {}, "versions": {}}
        end = time.monotonic() + seconds * OWN_TIME_SHARE
        for component in backends:
            try:
                spent, tiling = self._time(component, step, end)
            except (GlowplugError, RuntimeError, AssertionError, TypeError) as error:
                _raise_device_error(error)
                log(f"{component.name} failed at {step.rows} rows: {error}")
                continue
            found["us"][component.name] = spent
            if tiling is not None:
                found["tiling"] = asdict(tiling)
            found["versions"] |= _versions(component)
        shown = ", ".join(f"{name} {spent:.1f} us" for name, spent in found["us"].items())
        log(f"{step.rows} rows: {shown or 'nothing runs'}; tiling {found.get('tiling')}")
        return found

    def _time(self, component: Component, step: DecodeStep, end: float) -> tuple[float, Any]:
        """Return the microseconds of a backend, and its fastest launch configuration or None.

        ``end``: time of the clock at which a search ends.
        """
        calls = DecodeCalls(partial(self._build, component), self._plan, step, self._worker)
        if not hasattr(calls.backend, "tile"):
            return self._timer(calls.calls()), None
        tiling, spent = self._searched(calls, step.context, end)
        if not math.isfinite(spent):
            raise RuntimeError("the configuration of the rule does not run")
        return spent, tiling

    def _build(self, component: Component, plan: EnginePlan) -> AttentionBackend:
        """Return the runtime object of a backend for ``plan``, with its default options."""
        options = component.options.model_validate({"use": component.name})
        made: AttentionBackend = import_factory(component, component.name)(
            options, plan, self._worker
        )
        return made

    def _searched(self, step: DecodeCalls, context: int, end: float) -> tuple[Any, float]:
        """Return the fastest launch configuration of a backend and its microseconds.

        Configurations that do not run, or whose result differs from that of the rule, are passed
        over. ``end``: time of the clock at which the search ends.
        """
        backend: Any = step.backend
        wanted = step.result()
        start = backend.used

        def timed(tiling: Any) -> float | None:
            backend.tile = tiling
            try:
                if tiling != start and not _agrees(step.result(), wanted):
                    return None
                if backend.used != tiling:
                    return None
                return self._timer(step.calls())
            except Exception as error:  # NOTE: compilers have errors of many classes
                _raise_device_error(error)
                return None

        best, spent = search(start, axes_of(start, context), timed, lambda: time.monotonic() > end)
        return best, spent


def _versions(component: Component) -> dict[str, str]:
    """Return the installed versions of the packages that a backend needs."""
    names = [package.name for package in component.requires]
    return {name: release(installed(name) or "") for name in names}


def _plugins_of(plan: EnginePlan) -> PluginSet:
    """Return the plugins that the plan was made with."""
    found = load_plugins()
    known = {source.name for source in found.sources}
    missing = [name for name in plan.plugins if name not in known]
    return load_plugins(missing) if missing else found


def _agrees(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether ``found`` differs from ``wanted`` by rounding only."""
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm())


def _raise_device_error(error: Exception) -> None:
    """Raise ``error`` again if it is a CUDA error, after which the device cannot be used."""
    if "CUDA error" in str(error):
        raise error

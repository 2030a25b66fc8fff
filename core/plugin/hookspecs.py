"""All hooks that a plugin can implement, by life-cycle phase.

Registration hooks return a list of ``Component``; each slot (``slots.py``) has one. The other hooks
run while the configuration is read, while the engine is planned, and when ranks start and stop.
No hook runs while tokens are served: a test counts hook calls during serving and expects zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import argparse

    from glowplug.core.engine.observe import StepObserver
    from glowplug.core.errors import Refusal
    from glowplug.core.facts.model_facts import Facts, ModelFacts
    from glowplug.core.facts.model_folder import ArchitectureRules
    from glowplug.core.plan.plan import Decision, EnginePlan
    from glowplug.core.plugin.component import CheckContext, CommandFlag, Component, Tuner
    from glowplug.core.protocols import EngineHandle, RequestObserver, Worker
    from glowplug.core.text.tokenizer import Tokenizer

PROJECT = "glowplug"
hookspec = pluggy.HookspecMarker(PROJECT)
#: decorator of a plugin's functions that implement hooks
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---- registration --------------------------------------------------------------------------------


@hookspec
def register_models() -> list[Component]:  # type: ignore[empty-body]
    """Return model families, which build models of some architectures (``ModelFamily``)."""


@hookspec
def register_weight_sources() -> list[Component]:  # type: ignore[empty-body]
    """Return weight sources: readers of checkpoints (``WeightSource``)."""


@hookspec
def register_attention_backends() -> list[Component]:  # type: ignore[empty-body]
    """Return attention backends (``AttentionBackend``)."""


@hookspec
def register_quantization_schemes() -> list[Component]:  # type: ignore[empty-body]
    """Return quantization schemes (``QuantizationScheme``)."""


@hookspec
def register_parallel_strategies() -> list[Component]:  # type: ignore[empty-body]
    """Return parallelism strategies (``ParallelStrategy``)."""


@hookspec
def register_collectives() -> list[Component]:  # type: ignore[empty-body]
    """Return collective backends (``Collectives``)."""


@hookspec
def register_speculative_algorithms() -> list[Component]:  # type: ignore[empty-body]
    """Return speculative algorithms (``SpeculativeAlgorithm``)."""


@hookspec
def register_schedulers() -> list[Component]:  # type: ignore[empty-body]
    """Return schedulers (``Scheduler``)."""


@hookspec
def register_scheduling_policies() -> list[Component]:  # type: ignore[empty-body]
    """Return scheduling policies: orders of the waiting queue (``SchedulingPolicy``)."""


@hookspec
def register_graph_runners() -> list[Component]:  # type: ignore[empty-body]
    """Return graph runners: capture and replay of steps (``GraphRunner``)."""


@hookspec
def register_prefix_caches() -> list[Component]:  # type: ignore[empty-body]
    """Return prefix caches (``PrefixCache``)."""


@hookspec
def register_samplers() -> list[Component]:  # type: ignore[empty-body]
    """Return samplers (``Sampler``)."""


@hookspec
def register_grammars() -> list[Component]:  # type: ignore[empty-body]
    """Return libraries for structured output (``GrammarBackend``)."""


@hookspec
def register_output_parsers() -> list[Component]:  # type: ignore[empty-body]
    """Return parsers of generated text (``OutputParserFactory``).

    Pieces of kind "tool_call" become tool calls in the server's answers.
    """


@hookspec
def register_executors() -> list[Component]:  # type: ignore[empty-body]
    """Return executors: ways to start and connect ranks (``Executor``)."""


@hookspec
def register_ops() -> list[Component]:  # type: ignore[empty-body]
    """Return tables of small kernels, such as norms and routing (``Ops``)."""


# ---- configuration and facts ---------------------------------------------------------------------


@hookspec(firstresult=True)
def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Read a configuration file.

    Returns:
        The values as a nested dict and the line number of each dotted path; None when the file has
        another format than this plugin reads.
    """


@hookspec(firstresult=True)
def read_model_facts(path: Path, rules: ArchitectureRules) -> ModelFacts | None:
    """Return the facts of the model at ``path``, a folder or a file; read headers only.

    Return None when the model has another format than this plugin reads. ``rules`` holds what model
    families declare about the config.json of their architectures, for ``model_folder.model_facts``.
    """


@hookspec(firstresult=True)
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """Return a tokenizer (protocol in ``core/text/tokenizer.py``) for the model at ``path``.

    Return None when the model has another format than this plugin reads.
    """


# ---- planning ------------------------------------------------------------------------------------


@hookspec
def contribute_defaults(facts: Facts) -> dict[str, Any]:  # type: ignore[empty-body]
    """Return defaults for these facts by dotted config path, such as ``{"attention.use": "fa3"}``.

    They replace the built-in defaults. Values that the operator gave always take precedence.
    """


@hookspec
def check_plan(context: CheckContext) -> list[Refusal]:  # type: ignore[empty-body]
    """Return refusals of combinations that no component's own check covers.

    The hook must be a pure function of ``context``.
    """


@hookspec
def checked_packages() -> list[str]:  # type: ignore[empty-body]
    """Return names of distributions that the plugin's ``check_plan`` looks up.

    Those that are installed are in ``context.facts.software.packages``. Packages that components
    require or use are there already.
    """


@hookspec
def plan_remarks(context: CheckContext) -> list[Decision]:  # type: ignore[empty-body]
    """Return remarks for the plan's table, such as a tuned table that is not used.

    The hook must be a pure function of ``context``. A ``notable`` remark is shown before each
    start, other remarks only in the full plan.
    """


@hookspec
def plan_ready(plan: EnginePlan) -> None:
    """Report on a frozen plan that is about to start; the plan can no longer be changed.

    The hook runs in the process that made the plan.
    """


# ---- workers -------------------------------------------------------------------------------------


@hookspec
def worker_started(worker: Worker, plan: EnginePlan) -> None:
    """Act on the start of a rank: its engine is built, and it is about to report Ready."""


@hookspec
def worker_stopping(worker: Worker) -> None:
    """Act on the end of a rank, which serves no more requests.

    The rank's graphs and collectives still exist. The hook is not called when a rank is killed.
    """


@hookspec
def step_observers(  # type: ignore[empty-body]
    worker: Worker, plan: EnginePlan
) -> list[StepObserver]:
    """Return observers (``core/engine/observe.py``) to be called after each step of this rank.

    The engine calls them directly, not through hooks.
    """


# ---- surfaces ------------------------------------------------------------------------------------


@hookspec
def extend_app(app: Any, plan: EnginePlan, engine: EngineHandle) -> None:
    """Add routes to ``app``, the server's FastAPI application.

    ``engine`` (``core/protocols/serving.py``) runs requests, and has the server's start and stop,
    mounts and admin routes. Every route needs a key unless ``server.open_routes`` lists it. A route
    with the method and path of another one stops the start.
    """


@hookspec
def request_observers(plan: EnginePlan) -> list[RequestObserver]:  # type: ignore[empty-body]
    """Return observers (``core/protocols/serving.py``) to be called after each HTTP request.

    The server calls them directly, not through hooks. The hook runs once, before loading.
    """


@hookspec
def extend_cli(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add sub-commands of ``glowplug`` to ``commands`` (argparse sub-parsers)."""


@hookspec
def command_flags() -> list[CommandFlag]:  # type: ignore[empty-body]
    """Return flags of ``serve``, ``check`` and other commands that plan an engine.

    Each sets a field of the configuration, such as one of a component's options.
    """


@hookspec
def tuners() -> list[Tuner]:  # type: ignore[empty-body]
    """Return tuners, which measure kernels for a model and store tables (``glowplug tune NAME``).

    Their protocol is in ``core/protocols/tuning.py``.
    """

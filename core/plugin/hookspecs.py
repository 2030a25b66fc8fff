"""Every hook, by life-cycle phase. Hooks assemble; they never run while a token is served.

Registration hooks return a list of ``Component``; one hook a slot (``slots.py``). Life-cycle hooks
run at config reading, planning, and worker start and stop. A test counts hook calls while tokens
are served and asserts zero.
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
    from glowplug.core.plan.plan import Decision, EnginePlan
    from glowplug.core.plugin.component import CheckContext, Component, Tuner
    from glowplug.core.protocols import Worker
    from glowplug.core.text.tokenizer import Tokenizer

PROJECT = "glowplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---- registration --------------------------------------------------------------------------------


@hookspec
def register_models() -> list[Component]:  # type: ignore[empty-body]
    """Model families: which ``architectures`` can be built, and by what (``ModelFamily``)."""


@hookspec
def register_weight_sources() -> list[Component]:  # type: ignore[empty-body]
    """Where weights come from (``WeightSource``)."""


@hookspec
def register_attention_backends() -> list[Component]:  # type: ignore[empty-body]
    """Attention backends (``AttentionBackend``)."""


@hookspec
def register_quantization_schemes() -> list[Component]:  # type: ignore[empty-body]
    """Quantization schemes (``QuantizationScheme``)."""


@hookspec
def register_parallel_strategies() -> list[Component]:  # type: ignore[empty-body]
    """Parallelism strategies (``ParallelStrategy``)."""


@hookspec
def register_collectives() -> list[Component]:  # type: ignore[empty-body]
    """Collective backends (``Collectives``)."""


@hookspec
def register_speculative_algorithms() -> list[Component]:  # type: ignore[empty-body]
    """Speculative algorithms (``SpeculativeAlgorithm``)."""


@hookspec
def register_schedulers() -> list[Component]:  # type: ignore[empty-body]
    """Schedulers (``Scheduler``)."""


@hookspec
def register_scheduling_policies() -> list[Component]:  # type: ignore[empty-body]
    """Scheduling policies (``SchedulingPolicy``)."""


@hookspec
def register_graph_runners() -> list[Component]:  # type: ignore[empty-body]
    """Graph runners (``GraphRunner``)."""


@hookspec
def register_prefix_caches() -> list[Component]:  # type: ignore[empty-body]
    """Prefix caches (``PrefixCache``)."""


@hookspec
def register_samplers() -> list[Component]:  # type: ignore[empty-body]
    """Samplers (``Sampler``)."""


@hookspec
def register_output_parsers() -> list[Component]:  # type: ignore[empty-body]
    """Parsers of generated text (``OutputParserFactory``). Those that make tool calls are refused
    as long as no answer carries them."""


@hookspec
def register_executors() -> list[Component]:  # type: ignore[empty-body]
    """Executors (``Executor``)."""


@hookspec
def register_ops() -> list[Component]:  # type: ignore[empty-body]
    """Tables of small kernels (``Ops``)."""


# ---- configuration and facts ---------------------------------------------------------------------


@hookspec(firstresult=True)
def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, int]] | None:
    """Read a config file: (nested dict, line number by dotted path). None: not this plugin's
    format.
    """


@hookspec(firstresult=True)
def read_model_facts(path: Path) -> ModelFacts | None:
    """Facts of the model at ``path`` (a folder or a file). None: not this plugin's format. Reads
    headers only.
    """


@hookspec(firstresult=True)
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """A tokenizer (``core/text/tokenizer.py``'s protocol) for the model at ``path``. None: not this
    plugin's format.
    """


# ---- planning ------------------------------------------------------------------------------------


@hookspec
def contribute_defaults(facts: Facts) -> dict[str, Any]:  # type: ignore[empty-body]
    """Values by dotted config path that replace built-in defaults for these facts; the operator's
    always win.
    """


@hookspec
def check_plan(context: CheckContext) -> list[Refusal]:  # type: ignore[empty-body]
    """Refuse a whole plan for a reason no single component owns. Pure."""


@hookspec
def plan_remarks(context: CheckContext) -> list[Decision]:  # type: ignore[empty-body]
    """What a plan's reader should know that no pass has decided, such as a table that is not used.
    Pure.

    A ``notable`` remark is shown before each start, others in the whole plan.
    """


@hookspec
def plan_ready(plan: EnginePlan) -> None:
    """The plan is frozen and about to start, in the process that plans. For reporting; it can no
    longer be changed.
    """


# ---- workers -------------------------------------------------------------------------------------


@hookspec
def worker_started(worker: Worker, plan: EnginePlan) -> None:
    """A rank has built its engine and is about to report Ready."""


@hookspec
def worker_stopping(worker: Worker) -> None:
    """A rank is about to end and serves no more; its graphs and collectives still stand. Not called
    on a kill.
    """


@hookspec
def step_observers(worker: Worker, plan: EnginePlan) -> list[StepObserver]:  # type: ignore[empty-body]
    """Observers (``core/engine/observe.py``) to be called directly, not through hooks, after each
    step.
    """


# ---- surfaces ------------------------------------------------------------------------------------


@hookspec
def extend_app(app: Any, plan: EnginePlan) -> None:
    """Add routes to ``app``, the server's FastAPI. Every route is authenticated unless listed open
    in the config.
    """


@hookspec
def extend_cli(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add sub-commands to ``glowplug`` (argparse sub-parsers)."""


@hookspec
def tuners() -> list[Tuner]:  # type: ignore[empty-body]
    """Tuners that ``glowplug tune NAME`` runs: measure kernels for a model and keep tables.

    See ``core/protocols/tuning.py``.
    """

"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import typing
from pathlib import Path

from glowplug.core import protocols
from glowplug.core.config import operation_options
from glowplug.core.plugin import hookspecs, offers, options
from glowplug.core.plugin.component import Options
from glowplug.core.plugin.slots import BY_NAME, SLOTS
from tests.support.source_tree import ROOT, dotted, name_of, sources, tree

#: import names of packages whose distributions have another name
IMPORT_NAMES = {
    "sglang-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
    "sgl-deep-gemm": "deep_gemm",
}
#: files that may read or set environment variables -> reason
ENVIRONMENT_ACCESS = {
    # CUDA_VISIBLE_DEVICES: distributes the GPUs among the processes it starts
    "entrypoints/cli/tune_workers.py",
    "core/engine/profiling.py",  # GLOWPLUG_PROFILE_DIR and its SGLang name, debug switches
    "core/config/files.py",  # "${NAME}" in the operator's own file
    # GLOWPLUG_CONFIG_DIR and XDG_DATA_HOME: folder of the user's tuned tables
    "kernels/launch/tuned_tables.py",
    # GLOWPLUG_API_KEY and OPENAI_API_KEY: the key of a client, which no command line need show
    "entrypoints/chat/__init__.py",
    "core/facts/machine.py",  # CUDA_VISIBLE_DEVICES: which devices the driver gives this process
    # HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME: where the hub's own tools keep downloaded models
    "core/facts/hub_cache.py",
    # reports the variables that change how the engine runs, for a bug report
    "entrypoints/cli/commands/collect_env.py",
    # training: informs the tokenizer's library that worker processes follow
    "models/embedded/training/batches.py",
    "plugins/collectives/rendezvous.py",  # torchrun's meeting place for ranks
    "plugins/executors/ranks/host.py",  # the same: the rank of this process
    # started by torchrun or not, and on how many hosts
    "entrypoints/cli/flags/command_line.py",
    # spin time of torch's waiting threads, for a library that reads it only there
    "plugins/executors/ranks/process.py",
    # folder of inductor's programs, which inductor reads only there
    "plugins/ops/torch_compile_runtime.py",
    # PYTORCH_ALLOC_CONF: allocator settings given by the operator
    "core/startup/torch_allocator.py",
    "entrypoints/bench/others/turns.py",  # passes its own environment to a child process
    # runs in vLLM's interpreter: a switch that vLLM reads only there
    "entrypoints/bench/peer_scripts/vllm_steps.py",
}
IDENTITY = {"name", "use", "algorithm"}
METHODS = 6
#: protocol -> (number of methods, why they are one object)
LARGER_PROTOCOLS = {
    "Scheduler": (9, "the loop's whole view of the waiting and running sequences"),
    "Collectives": (9, "one method a collective"),
    "AttentionBackend": (
        8,
        "a layer of either kind attends or only stores, and accepted drafts are moved",
    ),
    "Sampler": (7, "what a row joins with, and what a step does, share its row state"),
}


def components() -> list[tuple[str, object]]:
    """Yield (slot, component) of every built-in, registered as in the engine."""
    from glowplug.plugins.built_in import DEFAULT_PLUGINS

    found = []
    for module_name in DEFAULT_PLUGINS:
        module = importlib.import_module(module_name)
        for slot in SLOTS:
            hook = getattr(module, slot.hook, None)
            if hook is not None:
                found += [(slot.name, component) for component in hook()]
    return found


def test_no_code_compares_with_a_components_name() -> None:
    """Rule 2: check what a component offers. A comparison of ``x.name`` or ``x.use`` with a
    component's name is a special case.
    """
    names = {component.name for slot, component in components() if slot != "model"} - {
        "none",
        "auto",
    }  # type: ignore[attr-defined]
    asked = []
    for path in sources():
        if path.relative_to(ROOT).parts[0] not in {"core", "entrypoints", "models"}:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                identity = any(
                    isinstance(side, ast.Attribute) and side.attr in IDENTITY for side in sides
                )
                constants = {
                    c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)
                }
                if identity and constants & names:
                    asked.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    assert asked == []


def test_every_offer_is_read() -> None:
    """A field of an offer that no check and no budget reads is a promise without effect."""
    words = {
        field.name
        for offer in vars(offers).values()
        if inspect.isclass(offer) and issubclass(offer, offers.Offers)
        for field in dataclasses.fields(offer)
    }
    core = [
        node
        for path in sources()
        if path.is_relative_to(ROOT / "core")
        for node in ast.walk(tree(path))
    ]
    read = {
        node.attr
        for node in core
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    read |= {
        node.value
        for node in core
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # getattr
    assert words - read == set()


def test_protocols_have_at_most_six_methods() -> None:
    for slot in SLOTS:
        protocol = getattr(protocols, slot.protocol)
        methods = [
            name
            for name, value in vars(protocol).items()
            if inspect.isfunction(value) and name[0] != "_"
        ]
        limit, _ = LARGER_PROTOCOLS.get(slot.protocol, (METHODS, ""))
        assert len(methods) <= limit, (slot.protocol, methods)


def test_each_slot_has_a_hook_an_offers_class_and_a_protocol() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("register_")}
    assert hooks == {slot.hook for slot in SLOTS}
    for slot in SLOTS:
        assert issubclass(getattr(offers, slot.offers), offers.Offers), slot.name
        assert inspect.isclass(getattr(protocols, slot.protocol)), slot.name


def test_every_slot_is_filled_by_a_built_in() -> None:
    assert {slot for slot, _ in components()} == set(BY_NAME)


def test_components_are_complete() -> None:
    for slot, component in components():
        where = f"{slot}.{component.name}"  # type: ignore[attr-defined]
        assert isinstance(component.offers, getattr(offers, BY_NAME[slot].offers)), where  # type: ignore[attr-defined]
        assert component.summary, f"{where} has no summary"  # type: ignore[attr-defined]
        model = component.options  # type: ignore[attr-defined]
        assert issubclass(model, Options) and model.model_config.get("frozen"), where
        assert model.model_config.get("extra") == "forbid", where
        if slot != "model":
            assert typing.get_args(model.model_fields["use"].annotation) == (component.name,), where  # type: ignore[attr-defined]


def test_factories_exist() -> None:
    """Factories are imported; where a required package is not installed, the source is searched
    instead.
    """
    for slot, component in components():
        module, _, name = component.factory.partition(":")  # type: ignore[attr-defined]
        try:
            found = callable(getattr(importlib.import_module(module), name))
        except ImportError as error:
            missing = {
                package.name
                for package in component.requires  # type: ignore[attr-defined]
                if importlib.util.find_spec(IMPORT_NAMES.get(package.name, package.name)) is None
            }
            assert missing, (slot, component.factory, error)  # type: ignore[attr-defined]
            path = importlib.util.find_spec(module).origin  # type: ignore[union-attr]
            found = name in {
                node.name
                for node in ast.parse(Path(path or "").read_text()).body
                if isinstance(node, ast.ClassDef)
            }
        assert found, (slot, component.factory)  # type: ignore[attr-defined]


def test_options_describe_themselves() -> None:
    """Rule 11: every option has a description, from which its line in the docs is generated."""
    bare = []
    for slot, component in components():
        for name, field in component.options.model_fields.items():  # type: ignore[attr-defined]
            if name != "use" and not field.description:
                bare.append(f"{slot}.{component.name}.{name}")  # type: ignore[attr-defined]
    for section in (
        options.MemoryOptions,
        options.ServerOptions,
        operation_options.LogOptions,
        operation_options.MetricsOptions,
        operation_options.TracingOptions,
    ):
        bare += [
            f"{section.__name__}.{name}"
            for name, field in section.model_fields.items()
            if not field.description
        ]
    assert bare == []


def test_configuration_does_not_come_from_the_environment() -> None:
    """Rule 10: the plan cannot explain a value that does not come from the command line or the
    configuration.
    """
    readers = []
    for path in sources():
        for node in ast.walk(tree(path)):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if name in {"os.environ", "os.getenv"} and name_of(path) not in ENVIRONMENT_ACCESS:
                readers.append(f"{name_of(path)}:{node.lineno}")
    assert readers == []


def test_no_global_statement() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Global)
    ]
    assert found == []


def test_every_module_and_contract_has_a_docstring() -> None:
    bare = [
        name_of(path) for path in sources() if tree(path).body and not ast.get_docstring(tree(path))
    ]
    assert bare == []
    undocumented = [
        name
        for name, value in vars(hookspecs).items()
        if inspect.isfunction(value)
        and value.__module__ == hookspecs.__name__
        and not value.__doc__
    ]
    assert undocumented == []
    without = [
        slot.protocol
        for slot in SLOTS
        if not getattr(protocols, slot.protocol).__doc__
        and not any(
            getattr(value, "__doc__", None)
            for value in vars(getattr(protocols, slot.protocol)).values()
            if inspect.isfunction(value)
        )
    ]
    assert without == []


def test_nothing_is_printed_from_the_core() -> None:
    """The core logs; only entry points write to a terminal."""
    printed = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] in {"core", "plugins", "models", "kernels"}
        and "training" not in path.parts
        and "embedded" not in path.parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert printed == []

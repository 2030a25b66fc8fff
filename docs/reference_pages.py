"""The reference pages: every type that the author of a plugin meets, and the offline API."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from docstrings import (
    Rows,
    Table,
    class_entry,
    constant,
    function_entry,
    markdown,
    module_of,
    parse,
)

from glowplug import LLM, PlanRefused
from glowplug.core import api, layers, protocols
from glowplug.core.facts import kv_layout
from glowplug.core.plugin import byte_costs, modes, offers as offers_module
from glowplug.core.plugin.options import OPTION_BASES
from glowplug.core.plugin.slots import SLOTS
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.protocols.tuning import LayerShapes, TableTuner, TuneTable
from glowplug.core.speculation import token_drafts, verify
from glowplug.core.step import (
    batch,
    draft_counts,
    draft_tree,
    graph_pieces,
    kv_pool,
    messages,
    pages,
    request,
    sampled_last_layer,
    sequence_table,
    structured,
)
from glowplug.entrypoints.front.completion import Completion
from glowplug.entrypoints.front.delta import Delta, Times, VerifiedDrafts
from glowplug.entrypoints.front.front import Stream

SLOT_PROTOCOLS = {slot.protocol for slot in SLOTS}
OFFERS = {slot.offers for slot in SLOTS}
#: slot -> types of its offers' fields
BESIDE_OFFERS = {"cache": [api.Tier], "parallel": [api.AutoSize, api.DecidedSize]}


def public(module: ModuleType) -> list[Any]:
    """Return the public classes and functions that a module defines, in the source's order."""
    found = [
        (node.lineno, value)
        for node in module_of(module.__file__ or "")[0].body
        if isinstance(value := vars(module).get(getattr(node, "name", "_")), (type, FunctionType))
        and not value.__name__.startswith("_")
    ]
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def heading(text: str, parts: Iterable[str]) -> Iterator[str]:
    yield f"## {text}\n"
    yield from parts


class Pages:
    """The pages, made with the generator's functions for tables."""

    def __init__(self, notice: str, table: Table, option_rows: Rows) -> None:
        self._notice = notice
        self._table = table
        self._rows = option_rows

    def all(self) -> dict[str, Callable[[], str]]:
        """Return the pages: path in docs -> function that makes it."""
        return {
            "reference/components.md": self.components,
            "reference/planning.md": self.planning,
            "reference/steps.md": self.steps,
            "reference/layers.md": self.layers,
            "reference/llm.md": self.llm,
        }

    def page(self, title: str, introduction: str, *parts: Iterable[str]) -> str:
        """Return a page with a list of its types at the top."""
        body = "\n".join(line for part in parts for line in part)
        names = re.findall(r"^### `(\w+)`$", body, re.MULTILINE)
        index = " · ".join(f"[{name}](#{name.lower()})" for name in names)
        return f"{self._notice}\n# {title}\n\n{introduction}\n\n{index}\n\n{body}"

    def entries(self, things: Iterable[Any]) -> Iterator[str]:
        for thing in things:
            if isinstance(thing, type):
                yield class_entry(thing, self._table, self._rows)
            else:
                yield function_entry(thing)

    def section(self, title: str, things: Iterable[Any]) -> Iterator[str]:
        yield from heading(title, self.entries(things))

    # ---- pages -----------------------------------------------------------------------------------

    def components(self) -> str:
        errors = [one for one in _api() if one.__module__ == api.Refusal.__module__]
        declared = [one for one in _api() if one.__module__ == api.Component.__module__]
        return self.page(
            "Components, options and offers",
            "The declaration of a plugin consists of these types. All of them are imported without "
            "torch. The [slots' hooks](../hooks.md) return components; the "
            "[guides](../README.md#write-plugins) have an example for each slot.",
            self.section("Components and checks", [*declared, api.Decided]),
            self.section("Refusals and errors", errors),
            heading("Names", [self.constants()]),
            self.section("Modes, capture and the base of offers", _base_offers()),
            *(self.slot(slot.name, slot.offers) for slot in SLOTS),
            self.section("Tuners", [TableTuner, TuneTable, LayerShapes]),
        )

    def slot(self, name: str, offers: str) -> Iterator[str]:
        """Yield the section of a slot: offers and the base of options."""
        base = OPTION_BASES.get(name)
        beside = BESIDE_OFFERS.get(name, [])
        things = [getattr(offers_module, offers), *beside, *([base] if base else [])]
        return self.section(f"Slot `{name}`", things)

    def constants(self) -> str:
        """Return the table of the constants and aliases of ``core.api``."""
        rows: list[tuple[object, ...]] = []
        for name in api.__all__:
            value = getattr(api, name)
            if isinstance(value, (type, FunctionType)):
                continue
            if isinstance(value, ModuleType):
                text = markdown(parse(value.__doc__).text)
                rows.append((f"`{name}`", f"module `{value.__name__}`", text))
                continue
            written, comment = constant(_source_of(name), name)
            rows.append((f"`{name}`", f"`{written}`", markdown(comment)))
        return self._table(("name", "value", "meaning"), rows)

    def planning(self) -> str:
        taken = {
            *OFFERS,
            *(base.__name__ for base in OPTION_BASES.values()),
            *(one.__name__ for one in _of(modes)),
        }
        of = (api.Refusal, api.Component)
        others = [
            one
            for one in _api()
            if one.__name__ not in taken
            and one.__module__ not in {each.__module__ for each in of}
            and one is not api.Decided
        ]
        kv = [one for one in others if one.__module__ == kv_layout.__name__]
        facts = [one for one in others if ".core.facts." in one.__module__ and one not in kv]
        plan = [one for one in others if ".core.plan." in one.__module__]
        shapes = _of(byte_costs)
        drafts = [one for one in others if one.__module__.endswith(("draft_shape", "draft_costs"))]
        return self.page(
            "Facts, plan and sizes",
            "The data that a plan is made from, the frozen plan that every factory receives, and "
            "the descriptions of steps from which components compute their memory in bytes. No "
            "type here needs torch.",
            self.section("Facts of model and machine", facts),
            self.section("The KV cache", kv),
            self.section("The plan", plan),
            self.section("Drafts", drafts),
            self.section("Steps as the byte budget sees them", shapes),
        )

    def steps(self) -> str:
        beside = [
            value
            for name in vars(protocols)
            if isinstance(value := getattr(protocols, name), type)
            and value.__module__.startswith(protocols.__name__)
            and name not in SLOT_PROTOCOLS
        ]
        first = [protocols.Worker, protocols.Limits, BuildContext, ParallelStack]
        return self.page(
            "Steps, requests and the types beside the protocols",
            "The arguments and results of the slots' protocols, which "
            "[hooks and protocols](../hooks.md#protocols) lists. Shapes: B rows of a step, T "
            "tokens, D decoding rows, W tokens of a decoding row, N rows or tokens of an argument, "
            "H heads, V vocabulary.",
            self.section("Arguments of factories", first),
            self.section("The batch and its results", _of(batch)),
            self.section("Sequences", [request.Sequence, request.Admission]),
            self.section(
                "Rows, pages and pools",
                [*_of(sequence_table), *_of(pages), *_of(kv_pool), *_of(sampled_last_layer)],
            ),
            self.section("Pieces of a step", _of(graph_pieces)),
            self.section("Drafts", [*_of(draft_tree), *_of(token_drafts), verify.verify]),
            self.section("Protocols beside those of slots", [x for x in beside if x not in first]),
        )

    def layers(self) -> str:
        modules = [
            importlib.import_module(f"{layers.__name__}.{found.name}")
            for found in sorted(pkgutil.iter_modules(layers.__path__), key=lambda one: one.name)
        ]
        return self.page(
            "Layers",
            "The layers that [model families](../guide/model.md) are composed of. Each takes a "
            "[BuildContext](steps.md#buildcontext) as first argument and the module path of its "
            "tensors as second. Calls are plain methods; `torch.nn.Module` is not used.",
            *(self.layer_module(module) for module in modules),
        )

    def layer_module(self, module: ModuleType) -> Iterator[str]:
        name = module.__name__.rpartition(".")[2]
        yield f"## `{name}`\n"
        yield markdown(parse(module.__doc__).text) + "\n"
        yield from self.entries(_of(module))

    def llm(self) -> str:
        outputs = [Completion, messages.Logprobs, VerifiedDrafts, Delta, Times, Stream]
        return self.page(
            "The offline API",
            "`from glowplug import LLM, SamplingParams`. An `LLM` runs an engine in the calling "
            "process, with the [options](../options.md) of a configuration file as keywords. "
            "[The README](../../README.md#in-python) has a first example.",
            self.section("Engine", [LLM]),
            self.section("Requests", [request.SamplingParams, *_structured()]),
            self.section("Outputs", outputs),
            self.section("Statistics", [messages.Stats, *_of(draft_counts)]),
            self.section("Errors", [PlanRefused, api.RequestError]),
        )


def _base_offers() -> list[Any]:
    """Return what every slot's offers share, without the types listed with one slot's."""
    beside = [one for things in BESIDE_OFFERS.values() for one in things]
    return [one for one in _of(modes) if one not in beside]


def _structured() -> list[Any]:
    """Return the types of structured output in requests."""
    return [structured.StructuredOutputsParams, structured.GrammarSpec]


def _of(module: ModuleType) -> list[Any]:
    """Return the public classes and functions defined in a module."""
    return [one for one in public(module) if one.__module__ == module.__name__]


def _api() -> list[Any]:
    """Return the classes and functions of ``core.api``, by module."""
    found = [getattr(api, name) for name in api.__all__]
    things = [one for one in found if isinstance(one, (type, FunctionType))]
    return sorted(things, key=lambda one: (one.__module__, inspect.getsourcelines(one)[1]))


def _source_of(name: str) -> str:
    """Return the file of the module from which ``core.api`` imports a constant."""
    (module,) = map(importlib.import_module, _imports(name))
    return module.__file__ or ""


def _imports(name: str) -> Iterator[str]:
    """Yield the modules from which ``core.api`` imports a name."""
    tree, _ = module_of(api.__file__ or "")
    for node in tree.body:
        if any(alias.name == name for alias in getattr(node, "names", ())):
            yield str(getattr(node, "module", ""))

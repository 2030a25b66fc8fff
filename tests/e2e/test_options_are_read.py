"""Options that no code reads while an engine runs are marked as without effect in its plan.

Reads of the options are recorded while a plan is made, an engine is built and requests are served.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.config.schema import EngineConfig
from glowplug.core.errors import PlanRefused
from glowplug.core.plan import freeze
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.component import Options
from glowplug.core.plugin.options import OPTION_BASES, Section
from glowplug.core.plugin.slots import SLOTS
from glowplug.entrypoints.front import model_text
from glowplug.entrypoints.front.llm import UNUSED_SECTIONS
from tests.plan.test_credit import BUILT_INS, FITTING, OPTIONS, values
from tests.support.source_tree import sources

#: options that are read from the plan's copy of the configuration, in ``model_text``
READ_FROM_THE_PLAN = {"tokenizer", "skip_tokenizer"}
#: options that a process of its own reads, which compiles grammars
READ_ELSEWHERE = {("grammar", "compile_bytes")}
Reads = set[tuple[str, str]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The (section, field) of each option that code reads, except in ``without_effect``."""
    found: Reads = set()
    recording = [True]

    def recorded(section: str, base: type[Any]) -> None:
        plain = base.__getattribute__

        def get(self: Any, name: str) -> Any:
            if recording[0] and name in type(self).model_fields:
                found.add((section or _fixed_section(type(self)), name))
            return plain(self, name)

        monkeypatch.setattr(base, "__getattribute__", get, raising=False)

    for slot in SLOTS:
        if slot.section:
            recorded(slot.section, OPTION_BASES.get(slot.name, Options))
    recorded("", Section)
    marks = freeze._without_effect

    def marked(proposal: Any) -> dict[str, str]:
        recording[0] = False
        try:
            return marks(proposal)
        finally:
            recording[0] = True

    monkeypatch.setattr(freeze, "_without_effect", marked)
    return found


def _fixed_section(kind: type[Any]) -> str:
    """Return the name of a section that no plugin fills; "" for the top level."""
    for name, info in EngineConfig.model_fields.items():
        if info.annotation is kind:
            return name
    return ""


def options_of(plan: EnginePlan) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (section, component, field, type) of every option that a plan of this kind has."""
    for slot in SLOTS:
        for choice in plan.choices_in(slot.name) if slot.section else ():
            found = BUILT_INS.find(slot.name, choice.name)
            assert found is not None
            for name, info in found.component.options.model_fields.items():
                if name != "use":
                    yield slot.section, choice.name, name, info.annotation
    for key, info in EngineConfig.model_fields.items():
        fields = getattr(info.annotation, "model_fields", None)
        for name, field in (fields or {key: info}).items():
            yield key if fields else "", "", name, field.annotation


def configured(section: str, component: str, name: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the path of an option and a configuration that sets it."""
    if not section:
        return name, {name: value}
    if not component:
        return f"{section}.{name}", {section: {name: value}}
    filled = {"use": component, name: value}
    many = any(slot.section == section and slot.many for slot in SLOTS)
    path = f"{section}.0.{name}" if many else f"{section}.{name}"
    return path, {section: [filled] if many else filled}


def marked(path: str, config: dict[str, Any]) -> bool:
    """Return whether the plan of an offline engine refuses an option or marks it as idle."""
    try:
        plan = make_plan(
            {"model": "embedded", "device": "cpu", **config},
            plugins=BUILT_INS,
            contributed={"executor.use": "inline"},
            unused=UNUSED_SECTIONS,
        )
    except PlanRefused:
        return True
    return any(one.field == path and "no effect: " in one.why for one in plan.decisions)


def test_an_option_that_an_offline_engine_never_reads_is_marked(reads: Reads) -> None:
    with LLM("embedded", device="cpu") as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        llm.chat([{"role": "user", "content": "2 + 2?"}], SamplingParams(max_tokens=3))
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, regex="[ab]{2}"))
        llm.control("flush")
        plan = llm.plan
    unread = [one for one in options_of(plan) if (one[0], one[2]) not in reads]
    assert {("executor", "watchdog"), ("collectives", "timeout"), ("server", "port")} <= {
        (section, name) for section, _, name, _ in unread
    }
    silent = []
    for section, component, name, kind in unread:
        if name in READ_FROM_THE_PLAN and not section or (section, name) in READ_ELSEWHERE:
            continue
        for value in FITTING.get(name, [*values(name, kind)]):
            path, config = configured(section, component, name, value)
            if not marked(path, config) and value != default_of(section, component, name):
                silent.append((path, value))
    assert silent == []


def default_of(section: str, component: str, name: str) -> Any:
    """Return the default of a component's option; None for an option of another section."""
    slot = next((slot for slot in SLOTS if slot.section == section), None)
    found = BUILT_INS.find(slot.name, component) if slot is not None else None
    return found.component.options.model_fields[name].default if found is not None else None


def test_the_two_options_read_from_the_plan() -> None:
    source = inspect.getsource(model_text)
    assert all(f'"{name}"' in source for name in READ_FROM_THE_PLAN)
    with LLM("embedded", device="cpu", skip_tokenizer=True) as llm:
        assert llm.tokenizer is None


# ---- every option is read by some code -----------------------------------------------------------


@cache
def names_read() -> frozenset[str]:
    """Return the names that code reads as attributes or keys, except in ``without_effect``."""
    found: set[str] = set()
    for path in sources():
        tree = ast.parse(path.read_text())
        marks = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef) and function.name == "without_effect"
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if id(node) in marks:
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
            elif isinstance(node, ast.Call) and _looks_up(node.func):
                found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
    return frozenset(found)


def _looks_up(function: ast.expr) -> bool:
    """Return whether a called function is ``getattr`` or a method ``get``."""
    if isinstance(function, ast.Name):
        return function.id == "getattr"
    return isinstance(function, ast.Attribute) and function.attr == "get"


#: options that are accepted for other engines' command lines alone; they are always marked
ACCEPTED_ONLY = {"trust_remote_code"}


@pytest.mark.parametrize("path", sorted({path for path, *_ in OPTIONS}))
def test_every_option_is_read_by_some_code(path: str) -> None:
    name = path.rpartition(".")[2]
    assert (name in names_read()) != (name in ACCEPTED_ONLY), path


def test_parsers_of_reasoning_have_no_effect_offline() -> None:
    path, config = configured("outputs", "deepseek_r1", "opening", "implied")
    assert marked(path, config)

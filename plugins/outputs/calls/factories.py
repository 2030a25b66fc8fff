"""Factories of the parsers of tool calls, one for each format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import OutputOptions
from glowplug.core.protocols import OutputParser, OutputRequest, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.outputs.calls import grammars, pythonic
from glowplug.plugins.outputs.calls.base import PlainParser
from glowplug.plugins.outputs.calls.dsml import DsmlParser, Elements, body, frame, layout
from glowplug.plugins.outputs.calls.grammars import CallLayout, Form, Frame
from glowplug.plugins.outputs.calls.json_formats import (
    CLOSE,
    OPEN,
    ArrayParser,
    HermesParser,
    LlamaParser,
)
from glowplug.plugins.outputs.calls.pythonic import PythonicParser
from glowplug.plugins.outputs.calls.tagged import TaggedParser, Tags

_SECTION = ("<｜tool▁calls▁begin｜>",)
_SECTION_END = ("<｜tool▁calls▁end｜>",)
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
V3_TAGS = Tags(_SECTION, _SECTION_END, _CALL, _SEPARATOR, _CALL_END, typed=True)
V31_TAGS = Tags(_SECTION, _SECTION_END, _CALL, _SEPARATOR, _CALL_END)
K2_TAGS = Tags(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    numbered=True,
)


class CallsFactory(ABC):
    """The base of the ``protocols.ToolParserFactory`` of each format.

    Attributes:
        shows_special: the parser needs the text of special tokens.
        layout: the text around and between calls.
    """

    shows_special = False
    layout = CallLayout()

    def __init__(self, options: OutputOptions, plan: EnginePlan, worker: Worker) -> None:
        self._options = options

    @abstractmethod
    def parser(self, request: OutputRequest) -> OutputParser:
        """Return a parser of the format."""
        raise NotImplementedError

    @abstractmethod
    def frame(self, name: str, number: int | None) -> Frame:
        """Return the text around the arguments of a call; see ``grammars.CallFormat``."""
        raise NotImplementedError

    def body(self, schema: Mapping[str, Any] | None) -> Form:
        """Return the form of a call's arguments; see ``grammars.CallFormat``."""
        return grammars.json_value({"type": "object"} if schema is None else schema)

    def as_list(self, request: OutputRequest) -> bool:
        """Return whether required calls are a JSON list, since the format cannot express them."""
        return False

    def strict(self, request: OutputRequest) -> GrammarSpec:
        """Return the grammar of an answer that may have calls of strict tools."""
        return grammars.strict(request, self)

    def start(self, request: OutputRequest) -> OutputParser:
        if not request.tools:
            return PlainParser()
        if request.tool_choice.mode == "required" and self.as_list(request):
            return ArrayParser(request)
        return self.parser(request)

    def call_grammar(self, request: OutputRequest) -> GrammarSpec | None:
        if request.tool_choice.mode != "required":
            return self.strict(request)
        if self.as_list(request):
            return grammars.required_list(request)
        return grammars.required(request, self)


class DeepseekV3Calls(CallsFactory):
    layout = CallLayout(_SECTION[0], "\n", _SECTION_END[0])

    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(V3_TAGS, request)

    def frame(self, name: str, number: int | None) -> Frame:
        return Frame(_CALL, f"{_CALL}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}")


class DeepseekV31Calls(CallsFactory):
    layout = CallLayout(_SECTION[0], "", _SECTION_END[0])

    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(V31_TAGS, request)

    def frame(self, name: str, number: int | None) -> Frame:
        return Frame(_CALL, f"{_CALL}{name}{_SEPARATOR}", _CALL_END)


class KimiK2Calls(CallsFactory):
    shows_special = True
    layout = CallLayout(K2_TAGS.opening[0], "", K2_TAGS.closing[0])

    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(K2_TAGS, request)

    def frame(self, name: str, number: int | None) -> Frame:
        call, separator, end = K2_TAGS.call, K2_TAGS.separator, K2_TAGS.end
        begin = f"{call}functions.{name}:"
        if number is None:
            return Frame(call, begin, end, separator)
        return Frame(call, f"{begin}{number}{separator}", end)


class HermesCalls(CallsFactory):
    layout = CallLayout(separator="\n")

    def parser(self, request: OutputRequest) -> OutputParser:
        return HermesParser(request)

    def frame(self, name: str, number: int | None) -> Frame:
        return Frame(OPEN, f'{OPEN}\n{{"name": "{name}", "arguments": ', f"}}\n{CLOSE}")


class Llama3Calls(CallsFactory):
    shows_special = True
    layout = CallLayout(separator="; ")

    def parser(self, request: OutputRequest) -> OutputParser:
        return LlamaParser(request)

    def frame(self, name: str, number: int | None) -> Frame:
        begin = '{"name": "'
        return Frame(begin, f'{begin}{name}", "parameters": ', "}")


class DsmlCalls(CallsFactory):
    """The base of the versions of DSML.

    Attributes:
        elements: names of the version's elements.
    """

    elements: Elements

    def parser(self, request: OutputRequest) -> OutputParser:
        return DsmlParser(self.elements, request)

    def frame(self, name: str, number: int | None) -> Frame:
        return frame(self.elements, name)

    def body(self, schema: Mapping[str, Any] | None) -> Form:
        return body(self.elements, schema)


class DeepseekV32Calls(DsmlCalls):
    elements = Elements("function_calls")
    layout = layout(elements)


class DeepseekV4Calls(DsmlCalls):
    elements = Elements("tool_calls")
    layout = layout(elements)


class DeepseekV41Calls(DsmlCalls):
    elements = Elements("calls", " ")
    layout = layout(elements)


class PythonicCalls(CallsFactory):
    """The ``protocols.ToolParserFactory`` of lists of calls of Python."""

    shows_special = True
    layout = CallLayout("[", ", ", "]")

    def parser(self, request: OutputRequest) -> OutputParser:
        return PythonicParser(request)

    def frame(self, name: str, number: int | None) -> Frame:
        return Frame(f"{name}(", f"{name}(", ")")

    def body(self, schema: Mapping[str, Any] | None) -> Form:
        form = pythonic.body(schema)
        if form is None:
            raise RequestError(
                "a strict function has a schema that cannot be written as arguments of Python; "
                'leave out strict, or set tool_choice to "required"',
                param="tools",
            )
        return form

    def as_list(self, request: OutputRequest) -> bool:
        schemas = [tool.schema for tool in grammars.allowed_tools(request)]
        return any(pythonic.body(schema) is None for schema in schemas)

    def strict(self, request: OutputRequest) -> GrammarSpec:
        return grammars.strict(request, self, self.layout)

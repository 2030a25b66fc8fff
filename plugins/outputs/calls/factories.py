"""Factories of the parsers of tool calls, one for each format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import OutputOptions
from glowplug.core.protocols import OutputParser, OutputRequest, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.outputs.calls import grammars
from glowplug.plugins.outputs.calls.base import PlainParser
from glowplug.plugins.outputs.calls.dsml import DsmlParser, Elements, body, frame, layout
from glowplug.plugins.outputs.calls.grammars import CallLayout, Form, Frame
from glowplug.plugins.outputs.calls.json_formats import (
    CLOSE,
    OPEN,
    HermesParser,
    LlamaParser,
)
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

    def start(self, request: OutputRequest) -> OutputParser:
        return self.parser(request) if request.tools else PlainParser()

    def call_grammar(self, request: OutputRequest) -> GrammarSpec | None:
        if request.tool_choice.mode == "required":
            return grammars.required(request, self)
        return grammars.strict(request, self)


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

"""Factories of the parsers of tool calls, one for each format."""

from __future__ import annotations

from abc import ABC, abstractmethod

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import OutputOptions
from glowplug.core.protocols import OutputParser, OutputRequest, Worker
from glowplug.core.step.structured import GrammarSpec
from glowplug.plugins.outputs.calls import grammars
from glowplug.plugins.outputs.calls.base import PlainParser
from glowplug.plugins.outputs.calls.dsml import DsmlParser, Elements
from glowplug.plugins.outputs.calls.grammars import Frame
from glowplug.plugins.outputs.calls.json_formats import (
    CLOSE,
    OPEN,
    ArrayParser,
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
V32_ELEMENTS = Elements("function_calls")
V4_ELEMENTS = Elements("tool_calls")
V41_ELEMENTS = Elements("calls", " ")


class CallsFactory(ABC):
    """The base of the ``protocols.ToolParserFactory`` of each format.

    A required call is forced as a JSON list of calls, which every model can write and every grammar
    library can compile.

    Attributes:
        shows_special: the parser needs the text of special tokens.
        numbered: the text around the arguments has the number of the call.
    """

    shows_special = False
    numbered = False

    def __init__(self, options: OutputOptions, plan: EnginePlan, worker: Worker) -> None:
        self._options = options

    @abstractmethod
    def parser(self, request: OutputRequest) -> OutputParser:
        """Return a parser of the format."""
        raise NotImplementedError

    @abstractmethod
    def frame(self, name: str, number: int) -> Frame:
        """Return the text around the arguments of a call.

        ``number``: number of the call in the conversation.
        """
        raise NotImplementedError

    def start(self, request: OutputRequest) -> OutputParser:
        if not request.tools:
            return PlainParser()
        return ArrayParser(request) if _required(request) else self.parser(request)

    def call_grammar(self, request: OutputRequest) -> GrammarSpec | None:
        if _required(request):
            return grammars.required(request)
        return grammars.strict(request, self.frame, self.numbered)


def _required(request: OutputRequest) -> bool:
    return request.tool_choice.mode == "required"


class DeepseekV3Calls(CallsFactory):
    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(V3_TAGS, request)

    def frame(self, name: str, number: int) -> Frame:
        return Frame(_CALL, f"{_CALL}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}")


class DeepseekV31Calls(CallsFactory):
    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(V31_TAGS, request)

    def frame(self, name: str, number: int) -> Frame:
        return Frame(_CALL, f"{_CALL}{name}{_SEPARATOR}", _CALL_END)


class KimiK2Calls(CallsFactory):
    shows_special = True
    numbered = True

    def parser(self, request: OutputRequest) -> OutputParser:
        return TaggedParser(K2_TAGS, request)

    def frame(self, name: str, number: int) -> Frame:
        tags = K2_TAGS
        return Frame(tags.call, f"{tags.call}functions.{name}:{number}{tags.separator}", tags.end)


class HermesCalls(CallsFactory):
    def parser(self, request: OutputRequest) -> OutputParser:
        return HermesParser(request)

    def frame(self, name: str, number: int) -> Frame:
        return Frame(OPEN, f'{OPEN}\n{{"name": "{name}", "arguments": ', f"}}\n{CLOSE}")


class Llama3Calls(CallsFactory):
    shows_special = True

    def parser(self, request: OutputRequest) -> OutputParser:
        return LlamaParser(request)

    def frame(self, name: str, number: int) -> Frame:
        begin = '{"name": "'
        return Frame(begin, f'{begin}{name}", "parameters": ', "}")


class DsmlCalls(CallsFactory):
    """The base of the versions of DSML. In grammars, a call's body is a JSON object."""

    elements = V32_ELEMENTS

    def parser(self, request: OutputRequest) -> OutputParser:
        return DsmlParser(self.elements, request)

    def frame(self, name: str, number: int) -> Frame:
        opening = self.elements.opening("invoke")
        return Frame(opening, f'{opening} name="{name}">\n', "\n" + self.elements.closing("invoke"))


class DeepseekV32Calls(DsmlCalls):
    pass


class DeepseekV4Calls(DsmlCalls):
    elements = V4_ELEMENTS


class DeepseekV41Calls(DsmlCalls):
    elements = V41_ELEMENTS

"""A turn of a conversation, in the form that all chat routes and the offline engine share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glowplug.core.protocols import OutputRequest
from glowplug.core.step.tools import Tool, ToolChoice
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.reasoning_tags import PROMPT_TAIL_CHARS

Message = Mapping[str, Any]


class Arguments(dict[str, Any]):
    """The arguments of a call for a chat template: an object that is its JSON text in texts.

    Some templates take the arguments as an object (``arguments | tojson``,
    ``arguments.items()``), others as text (``'```json' + arguments``).
    """

    def __init__(self, text: str, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


@dataclass(frozen=True)
class Turn:
    """A conversation that the model is to continue, with the tools that it may call.

    Attributes:
        messages: the messages as chat templates take them: dicts with "role" and "content" (a text,
            or None beside "tool_calls"). "tool_calls" has calls in the form of OpenAI's chat API,
            with "arguments" as JSON text or as an object.
        tools: the tools that the request offers.
        tool_choice: the request's rule for calls.
        template: keywords of the chat template.
        add_generation_prompt: end the prompt with the beginning of an assistant's message.
        continue_final_message: leave the last message open.
        separate_reasoning: reasoning gets pieces of its own; False: it stays in the content.
    """

    messages: Sequence[Message] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call; () if the request forbids calls."""
        return () if self.tool_choice.mode == "none" else self.tools

    @property
    def thinking(self) -> bool | None:
        """The request's switch of reasoning; None: the request did not set it."""
        value = self.template.get("thinking", self.template.get("enable_thinking"))
        return None if value is None else bool(value)

    def prompt_text(self, tokenizer: Tokenizer) -> str:
        """Return the rendered conversation, to be encoded without further special tokens.

        Raises:
            RequestError: the template failed.
        """
        return tokenizer.apply_chat_template(
            [_for_template(message) for message in self.messages],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=[tool.described() for tool in self.offered],
            **self.template,
        )

    def output_request(self, prompt: str) -> OutputRequest:
        """Return the part of the request that output parsers get. ``prompt``: the rendered text."""
        return OutputRequest(
            prompt[-PROMPT_TAIL_CHARS:],
            self.thinking,
            self.offered,
            self.tool_choice,
            sum(len(message.get("tool_calls") or ()) for message in self.messages),
        )


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message whose calls have arguments that a template can use as object or as text."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_call_for_template(call) for call in calls]}


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are :class:`Arguments`.

    Arguments that are not a JSON object, such as those of an unfinished call, stay a text.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    given = function.get("arguments")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    made = Arguments(text or "{}", value) if isinstance(value, dict) else text
    return {**call, "function": {**function, "arguments": made}}

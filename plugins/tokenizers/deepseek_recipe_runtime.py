"""A tokenizer whose conversations are rendered by the package ``deepseek-recipe``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import deepseek_recipe as recipe

from glowplug.core.errors import RequestError
from glowplug.core.text.chat_template import check_arguments
from glowplug.core.text.tokenizer import TEMPLATE_ARGUMENTS, Tokenizer

#: parser of tool calls -> the package's name of the model, and its prompt encoding
VERSIONS: dict[str, tuple[str, Any]] = {
    "deepseek_v4": ("DeepSeek-V4-Pro", recipe.DeepseekV4Encoding),
    "deepseek_v41": ("DeepSeek-V4.1-Flash", recipe.DeepseekV41Encoding),
}
#: ends of prompts for an answer, with reasoning and without
OPENINGS = ("<｜Assistant｜><think>", "<｜Assistant｜></think>")


class RecipeTokenizer(Tokenizer):
    """The tokenizer of a V4 folder. A chat template of the operator replaces the package."""

    _encoding: Any = None  #: the prompt encoding of the package
    _name = ""  #: the package's name of the model; "": a chat template is used

    @classmethod
    def of_version(cls, version: str, folder: Path) -> Self:
        """Return the tokenizer of a folder.

        Args:
            version: key of VERSIONS.
            folder: the model's folder, with a ``tokenizer.json``.

        Raises:
            ValueError: a file cannot be read; the message names it.
        """
        made = cls.from_folder(folder)
        assert isinstance(made, cls)
        made._name, encoding = VERSIONS[version]
        made._encoding = encoding()
        return made

    @cached_property
    def digest(self) -> str:
        own = f"{self._name} {recipe.__version__} " if self._name else ""
        return own + super().digest

    @property
    def has_chat_template(self) -> bool:
        return bool(self._name) or super().has_chat_template

    @cached_property
    def template_arguments(self) -> frozenset[str]:
        return TEMPLATE_ARGUMENTS if self._name else super().template_arguments

    def use_chat_template(self, source: str) -> None:
        self._name = ""
        self.__dict__.pop("digest", None)
        super().use_chat_template(source)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> str:
        if not self._name:
            return super().apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **arguments,
            )
        check_arguments(
            arguments, TEMPLATE_ARGUMENTS, add_generation_prompt and continue_final_message
        )
        body: dict[str, Any] = {
            "model": self._name,
            "messages": [_with_texts(message) for message in messages],
            **_reasoning(arguments),
        }
        if tools:
            body["tools"] = list(tools)
        if continue_final_message:
            _leave_open(body["messages"])
        text = self._render(body)
        if add_generation_prompt or continue_final_message:
            return text
        ending = next((one for one in OPENINGS if text.endswith(one)), "")
        return text.removesuffix(ending)

    def _render(self, body: dict[str, Any]) -> str:
        """Return the prompt of a request for a chat completion.

        Raises:
            RequestError: the package refuses the request (code ``template_error``).
        """
        try:
            wanted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
            return str(self._encoding.render_conversation(wanted.conversation).prompt)
        except (recipe.ConversionError, ValueError, TypeError) as error:
            raise RequestError(
                f"the messages cannot be rendered for this model: {str(error)[:300]}",
                code="template_error",
                param="messages",
                confidential=True,
            ) from None


def _reasoning(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the package's fields for the arguments of a chat template."""
    found: dict[str, Any] = {}
    for name in ("enable_thinking", "thinking"):
        if name in arguments:
            found["thinking"] = {"type": "enabled" if arguments[name] else "disabled"}
    if "reasoning_effort" in arguments:
        found["reasoning_effort"] = arguments["reasoning_effort"]
    return found


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]}


def _call_with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function.get("arguments", "{}")
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": text}}


def _leave_open(messages: list[dict[str, Any]]) -> None:
    """Mark the last message as the beginning of the answer.

    Raises:
        RequestError: it is not an assistant's, or has no text.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content"):
        raise RequestError(
            "continue_final_message requires a last message of the assistant with text",
            param="messages",
        )
    last["prefix"] = True

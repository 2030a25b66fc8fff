"""Conversion of messages, texts and token ids of a request to checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import RequestError, prompt_too_long
from glowplug.core.text.tokenizer import TEMPLATE_ARGUMENTS
from glowplug.entrypoints.front.reasoning_tags import PROMPT_TAIL_CHARS as PROMPT_TAIL_CHARS
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.protocol.chat import ChatRequest, Message
from glowplug.entrypoints.server.protocol.completions import MAX_PROMPTS


@dataclass
class TokenizedPrompt:
    """A prompt as token ids. ``text``: the given or rendered text; None if only ids were given."""

    ids: list[int]
    text: str | None = None


async def of_completion(
    context: Context, prompt: Any, add_special_tokens: bool
) -> list[TokenizedPrompt]:
    """Return the tokenised prompts of a completion request.

    ``prompt``: a text, texts, ids, or lists of ids.
    """
    if prompt is None or prompt == []:
        raise RequestError("prompt is missing or empty", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    elif isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"at most {MAX_PROMPTS} prompts in one request, got {len(prompt)}", param="prompt"
        )
    if isinstance(prompt[0], str):
        return await _of_texts(context, prompt, add_special_tokens)
    return [_of_ids(ids) for ids in prompt]


async def _of_texts(
    context: Context, texts: list[str], add_special_tokens: bool
) -> list[TokenizedPrompt]:
    """Return a tokenised prompt for each text."""
    rows = await context.texts.encode(texts, add_special_tokens)
    prompts = [TokenizedPrompt(ids, text) for ids, text in zip(rows, texts, strict=True)]
    for prompt in prompts:
        if not prompt.ids:
            raise RequestError("the prompt is empty", param="prompt")
    return prompts


def _of_ids(ids: list[int]) -> TokenizedPrompt:
    """Return a prompt of token ids."""
    if not ids:
        raise RequestError("the prompt is empty", param="prompt")
    return TokenizedPrompt(ids)


async def of_native(
    context: Context, text: str | list[str] | None, ids: list[int] | list[list[int]] | None
) -> list[TokenizedPrompt]:
    """Return the tokenised prompts of the native route, SGLang's ``/generate``.

    The prompts are given as text or as ids, single or as a list.
    """
    if (text is None) == (ids is None):
        raise RequestError("give either text or input_ids", param="text")
    return await of_completion(context, text if text is not None else ids, True)


async def of_chat(context: Context, request: ChatRequest) -> TokenizedPrompt:
    """Return the prompt of a chat request: the rendered conversation, or ``input_ids`` as given."""
    if request.input_ids is not None:
        return _of_ids(request.input_ids)
    if request.messages is None:
        raise RequestError("messages is required", param="messages")
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise RequestError(
            "continue_final_message needs a last message of role assistant",
            param="continue_final_message",
        )
    generation = request.add_generation_prompt is not False and not request.continue_final_message
    return await render(
        context,
        request.messages,
        template_arguments(request),
        add_generation_prompt=generation,
        continue_final_message=request.continue_final_message,
    )


async def render(
    context: Context,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> TokenizedPrompt:
    """Render messages with the chat template and tokenise the result, in the thread pool.

    Args:
        context: the server's context.
        messages: the conversation.
        arguments: keywords for the template.
        add_generation_prompt: end with the beginning of an assistant's message.
        continue_final_message: leave the last message open.
        add_special_tokens: let the tokenizer add its special tokens, such as bos.

    Raises:
        RequestError: a message has content other than text, or the template failed.
    """
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    context.texts.check_bytes([str(part) for message in plain for part in message.values()])
    tokenizer = context.texts.tokenizer

    def work() -> TokenizedPrompt:
        text = tokenizer.apply_chat_template(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **arguments,
        )
        return TokenizedPrompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)

    prompt = await context.texts.run(work)
    if not prompt.ids:
        raise RequestError("the rendered prompt is empty", param="messages")
    return prompt


def _plain(message: Message, index: int) -> dict[str, Any]:
    """Convert a request's message to the dict that chat templates take.

    Its content is text, unknown keys are dropped, and the role "developer" becomes "system".
    ``index`` is the message's place in the request, for errors.
    """
    where = f"messages.{index}.content"
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, where),
    }
    reasoning = (
        message.reasoning_content if message.reasoning_content is not None else message.reasoning
    )
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    return plain


def _text(message: Message, where: str) -> str | None:
    """Return a message's content as one text; None for an assistant's message with tool calls only.

    ``where``: path of the content in the request, for errors.
    """
    content = message.content
    if content is None:
        if message.role == "assistant" and (
            message.tool_calls or message.reasoning_content or message.reasoning
        ):
            return None if message.tool_calls else ""
        raise RequestError(f"a message of role {message.role} needs content", param=where)
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise RequestError(
                f"content of type {part.type[:64]!r} is refused: this model takes text only",
                param=where,
            )
        if part.text is None:
            raise RequestError("a content part of type text needs text", param=where)
    return "".join(part.text or "" for part in content)


def template_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the keywords that a request sets for the chat template.

    The keywords are those of ``chat_template_kwargs``, and ``reasoning_effort``. The latter also
    sets ``thinking`` and ``enable_thinking``, of which templates use one or the other.

    Raises:
        RequestError: a keyword is not in the allow-list, or its value has a wrong type.
    """
    arguments = dict(request.chat_template_kwargs or {})
    for name, value in arguments.items():
        if name not in TEMPLATE_ARGUMENTS:
            raise RequestError(
                f"chat_template_kwargs: {name[:64]!r} is not allowed; allowed: "
                + ", ".join(sorted(TEMPLATE_ARGUMENTS)),
                param="chat_template_kwargs",
            )
        if not isinstance(value, bool) and not (isinstance(value, str) and len(value) <= 64):
            raise RequestError(
                f"chat_template_kwargs: {name} must be a boolean or a short string",
                param="chat_template_kwargs",
            )
    if request.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", request.reasoning_effort)
        arguments.setdefault("thinking", request.reasoning_effort != "none")
    given = [arguments[name] for name in ("thinking", "enable_thinking") if name in arguments]
    if given:
        arguments["thinking"] = bool(given[0])
        arguments["enable_thinking"] = bool(given[0])
    return arguments


def wanted_thinking(request: ChatRequest) -> bool | None:
    """Return whether the request asked for reasoning; None if it did not specify."""
    value = template_arguments(request).get("thinking")
    return None if value is None else bool(value)


def remaining_context(context: Context, prompt: TokenizedPrompt) -> int:
    """Return the number of tokens of the context that remain after ``prompt``.

    Raises:
        RequestError: no token remains.
    """
    length = context.plan.sizes.context_length
    left = length - len(prompt.ids)
    if left < 1:
        raise prompt_too_long(length, len(prompt.ids))
    return left

"""Conversion of messages, texts and token ids of a request to checked token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glowplug.core.errors import RequestError, prompt_too_long
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.context import Context
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
    return [of_ids(ids) for ids in prompt]


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


def of_ids(ids: list[int]) -> TokenizedPrompt:
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


async def of_turn(
    context: Context, turn: Turn, *, add_special_tokens: bool = False
) -> TokenizedPrompt:
    """Render a turn with the chat template and tokenise the result, in the thread pool.

    ``add_special_tokens`` lets the tokenizer add its special tokens, such as bos.

    Raises:
        RequestError: the template failed.
    """
    parts = [str(part) for message in turn.messages for part in message.values()]
    context.texts.check_bytes(parts + [str(tool.described()) for tool in turn.offered])
    tokenizer = context.texts.tokenizer

    def work() -> TokenizedPrompt:
        text = turn.prompt_text(tokenizer)
        return TokenizedPrompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)

    prompt = await context.texts.run(work)
    if not prompt.ids:
        raise RequestError("the rendered prompt is empty", param="messages")
    return prompt


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


def default_max_tokens(context: Context, prompt: TokenizedPrompt) -> int | None:
    """Return the configured output limit in tokens, reduced to the room that the prompt leaves.

    The result is None if no limit is configured: the engine generates up to the context length.
    """
    default = context.options.default_max_tokens
    return None if default is None else min(default, remaining_context(context, prompt))


def bounded_max_tokens(context: Context, prompt: TokenizedPrompt, wanted: int | None) -> int | None:
    """Return an output limit in tokens, reduced to the room that the prompt leaves.

    None for ``wanted`` stands for the configured limit.

    Raises:
        RequestError: no token remains.
    """
    if wanted is None:
        return default_max_tokens(context, prompt)
    return min(wanted, remaining_context(context, prompt))

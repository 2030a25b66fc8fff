"""The routes ``/tokenize``, ``/detokenize``, ``/tokenizer_info`` and the list of models."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from starlette.responses import Response

from glowplug.core.errors import RequestError
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.conversation import plain_messages
from glowplug.entrypoints.server.generate.tools import tools_of
from glowplug.entrypoints.server.protocol.native import DetokenizeRequest, TokenizeRequest
from glowplug.entrypoints.server.transport.body import body_of
from glowplug.entrypoints.server.transport.streaming import json_response

Server = Annotated[Context, Depends(get_context)]


async def tokenize(
    body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))], context: Server
) -> Response:
    """Return the token ids of a prompt or of a rendered conversation."""
    context.check_model(body.model)
    ids = await _tokens(context, body)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": context.plan.sizes.context_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.names.text(token) for token in ids]
    return json_response(answer)


async def _tokens(context: Context, body: TokenizeRequest) -> list[int]:
    """Return the token ids of the prompt, or of the rendered messages."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        turn = Turn(
            plain_messages(body.messages),
            tools_of(body.tools),
            add_generation_prompt=body.add_generation_prompt,
        )
        rendered = await prompts.of_turn(
            context, turn, add_special_tokens=bool(body.add_special_tokens)
        )
        return rendered.ids
    special = body.add_special_tokens is not False
    return (await context.texts.encode([body.prompt or ""], special))[0]


async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))], context: Server
) -> Response:
    """Return the text of token ids."""
    context.check_model(body.model)
    vocab = context.plan.facts.model.vocab_size
    if body.tokens and max(body.tokens) >= vocab:
        raise RequestError(
            f"token id {max(body.tokens)} is outside the model's vocabulary of {vocab}",
            param="tokens",
            code="invalid_token_id",
        )
    text = (
        await context.texts.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        if body.tokens
        else ""
    )
    return json_response({"prompt": text, "text": text})


async def tokenizer_info(context: Server) -> Response:
    """Return tokenizer_config.json's settings and the chat template in use, without any paths."""
    if not context.options.tokenizer_info:
        raise RequestError(
            "tokenizer information is switched off (server.tokenizer_info)",
            status=404,
            code="tokenizer_info_off",
        )
    # NOTE: ``tokenizer_class`` is the class of transformers that reads a tokenizer.json, for
    # clients that create their own tokenizer.
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **context.texts.tokenizer.settings(),
            "model_max_length": context.plan.sizes.context_length,
        }
    )


async def models(context: Server) -> Response:
    """Return the list of models, which has the served model only."""
    return json_response({"object": "list", "data": [_card(context)]})


async def model(model: str, context: Server) -> Response:
    """Return the served model. The status is 404 for any other name."""
    context.check_model(model)
    return json_response(_card(context))


def _card(context: Context) -> dict[str, Any]:
    """Return the model as ``/v1/models`` lists it."""
    name = context.model_name
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "glowplug",
        "root": name,
        "parent": None,
        "max_model_len": context.plan.sizes.context_length,
    }

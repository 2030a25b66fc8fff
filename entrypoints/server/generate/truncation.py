"""Shortening of conversations that are longer than the context."""

from __future__ import annotations

from dataclasses import replace

from glowplug.core.errors import RequestError
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate import prompts


async def shortened(context: Context, turn: Turn, answer_tokens: int) -> Turn:
    """Return a turn without its oldest messages, as few as possible, so that it fits the context.

    System messages stay. The messages that remain begin with one of the user. If the last message
    of the user and those behind it do not fit, only they remain.

    Args:
        context: the server's context.
        turn: the turn.
        answer_tokens: tokens to leave for the answer; at most half of the context is left.
    """
    length = context.plan.sizes.context_length
    room = length - max(1, min(answer_tokens, length // 2))
    if await _fits(context, turn, room):
        return turn
    system = [one for one in turn.messages if one["role"] == "system"]
    others = [one for one in turn.messages if one["role"] != "system"]
    cuts = [number for number, one in enumerate(others) if one["role"] == "user" and number]
    low = 0
    high = len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, replace(turn, messages=system + others[cuts[middle] :]), room):
            high = middle
        else:
            low = middle + 1
    return replace(turn, messages=system + others[cuts[low] :]) if cuts else turn


async def _fits(context: Context, turn: Turn, room: int) -> bool:
    """Return whether a turn's prompt has at most ``room`` tokens."""
    try:
        prompt = await prompts.of_turn(context, turn)
    except RequestError as error:
        if error.code == "context_length_exceeded":
            return False
        raise
    return len(prompt.ids) <= room

"""A turn made ready to run: its prompt, its sampling parameters and the parsers of its answers.

Every chat route goes the same way: body, ``Turn``, :class:`PreparedTurn`, ``Job``, deltas, and for
each answer an ``AnswerParser`` that makes pieces of the deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front.chat.answers import AnswerForm, answer_form
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.front.reasoning_tags import PROMPT_TAIL_CHARS
from glowplug.entrypoints.server.context import Context
from glowplug.entrypoints.server.generate import prompts
from glowplug.entrypoints.server.generate.prompts import TokenizedPrompt

ParamsOf = Callable[[TokenizedPrompt], SamplingParams]


@dataclass(frozen=True)
class PreparedTurn:
    """A turn that can run.

    Attributes:
        prompt: the prompt.
        form: the form of the answers; ``form.params`` are the sampling parameters of the job, and
            ``form.start()`` makes the parser of one answer.
    """

    prompt: TokenizedPrompt
    form: AnswerForm


async def prepare(
    context: Context, turn: Turn, params_of: ParamsOf, ids: list[int] | None = None
) -> PreparedTurn:
    """Return a turn made ready to run.

    Args:
        context: the server's context.
        turn: the turn.
        params_of: function from the prompt to the sampling parameters that the request gives.
        ids: token ids of a rendered prompt, instead of the turn's messages.

    Raises:
        RequestError: the template failed, or the plan's parsers cannot serve the request.
    """
    prompt = prompts.of_ids(ids) if ids is not None else await prompts.of_turn(context, turn)
    params = params_of(prompt)
    request = turn.output_request(await _tail(context, prompt))
    form = answer_form(request, context.parsers, params, separate_reasoning=turn.separate_reasoning)
    return PreparedTurn(prompt, form)


async def _tail(context: Context, prompt: TokenizedPrompt) -> str:
    """Return the prompt's last characters for the output parsers."""
    if prompt.text is not None:
        return prompt.text[-PROMPT_TAIL_CHARS:]
    if context.tokenizer is None or not context.parsers:
        return ""
    return await context.texts.decode(prompt.ids[-PROMPT_TAIL_CHARS:], skip_special_tokens=False)

"""Grammars of answers that may begin with a reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glowplug.core.protocols import OutputParserFactory, ReasoningTags
from glowplug.core.step.request import SamplingParams

PROMPT_TAIL_CHARS = 64  #: last characters of the rendered prompt that output parsers get
TagsOf = Callable[[str, bool | None], ReasoningTags | None]


def after_reasoning(
    params: SamplingParams,
    parsers: Sequence[OutputParserFactory],
    prompt_tail: str,
    thinking: bool | None,
) -> SamplingParams:
    """Return sampling parameters whose grammar begins behind the answer's reasoning.

    Args:
        params: sampling parameters.
        parsers: the plan's output parsers.
        prompt_tail: last characters of the rendered prompt.
        thinking: whether the request turned reasoning on or off; None: it did neither.
    """
    if params.grammar is None:
        return params
    for parser in parsers:
        tags_of: TagsOf | None = getattr(parser, "reasoning", None)
        tags = tags_of(prompt_tail, thinking) if tags_of is not None else None
        if tags is not None:
            made = params.grammar.after_reasoning(tags.opening, tags.closing, tags.inside)
            return params.replace(grammar=made)
    return params

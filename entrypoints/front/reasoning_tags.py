"""Grammars of answers that may begin with a reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glowplug.core.protocols import OutputParserFactory, OutputRequest, ReasoningTags
from glowplug.core.step.request import SamplingParams

PROMPT_TAIL_CHARS = 64  #: last characters of the rendered prompt that output parsers get
TagsOf = Callable[[OutputRequest], ReasoningTags | None]


def after_reasoning(
    params: SamplingParams, parsers: Sequence[OutputParserFactory], request: OutputRequest
) -> SamplingParams:
    """Return sampling parameters whose grammar begins behind the answer's reasoning.

    Args:
        params: sampling parameters.
        parsers: the plan's output parsers.
        request: the part of the request that parsers get.
    """
    if params.grammar is None:
        return params
    for parser in parsers:
        tags_of: TagsOf | None = getattr(parser, "reasoning", None)
        tags = tags_of(request) if tags_of is not None else None
        if tags is not None:
            made = params.grammar.after_reasoning(tags.opening, tags.closing, tags.inside)
            return params.replace(grammar=made)
    return params

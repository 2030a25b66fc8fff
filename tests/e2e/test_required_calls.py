"""The embedded model writes required calls in every format: they parse and match their schemas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.protocols import OutputRequest, Piece, Worker
from glowplug.core.step.tools import ToolChoice
from glowplug.entrypoints.front.chat.answers import AnswerForm, answer_form, joined
from glowplug.entrypoints.front.delta import Delta
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from tests.contract.test_tool_parsers import FORMATS, NO_PLAN, make
from tests.support.called_tools import TOOLS, valid_calls

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PARALLEL = ToolChoice("required")
CHOICES = (ToolChoice("required", parallel=False), ToolChoice("required", "paint"))
DRAFTS = {"speculative": {"use": "nextn", "steps": 3}}
#: the token of "</think>" is made probable, so that a reasoning ends soon
HOT = SamplingParams(temperature=1.5, max_tokens=400, logit_bias={6: 30.0})


@pytest.mark.parametrize(
    ("config", "choices"),
    [(DRAFTS, CHOICES), pytest.param({}, (*CHOICES, PARALLEL), marks=pytest.mark.slow)],
    ids=["drafts", "none"],
)
def test_calls_of_a_hot_model_parse_and_match_their_schemas(
    config: dict[str, Any], choices: Sequence[ToolChoice]
) -> None:
    """Each request once with and once without reasoning; with drafts, a third of them with it."""
    reasoning = DeepseekR1(DeepseekR1Options(use="deepseek_r1"), NO_PLAN, Worker())
    forms = []
    for i, (name, choice) in enumerate(itertools.product(sorted(FORMATS), choices)):
        for thinking in (False, True) if PARALLEL in choices else (i % 3 == 0,):
            tail = "<think>\n" if thinking else ""
            request = OutputRequest(tail, thinking, TOOLS, choice)
            forms.append(answer_form(request, [make(name), reasoning], HOT))
    params = [form.params.replace(seed=i) for i, form in enumerate(forms)]
    with LLM(model="embedded", scheduler={"max_running_requests": 8}, **config) as llm:
        answers = llm.generate(["Paint a wall."] * len(forms), params)
    for form, answer in zip(forms, answers, strict=True):
        choice = form.request.tool_choice
        whole = pieces_of(form, [answer.text])
        assert whole == pieces_of(form, list(answer.text))
        calls = [one for one in whole if one.kind != "reasoning"]
        assert whole[len(whole) - len(calls) :] == calls and len(whole) - len(calls) <= 1
        if answer.finish_reason == "stop":
            names = valid_calls(calls)
            assert names and (len(names) == 1 or choice == PARALLEL)
            assert not choice.name or names == [choice.name]
        else:  # only calls without end do not end
            assert choice == PARALLEL and len(calls) > 2, repr(answer.text)


def pieces_of(form: AnswerForm, texts: Sequence[str]) -> list[Piece]:
    """Return the joined pieces of an answer that arrives as ``texts``."""
    parser = form.start()
    pieces = [piece for text in texts for piece in parser.feed(Delta(text))]
    made = joined([*pieces, *parser.feed(Delta(finish_reason="stop"))])
    return [replace(one, data={**one.data, "id": ""} if one.data else None) for one in made]

"""Runs of random schemas through an engine, with the check of every finished answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from glowplug import LLM, SamplingParams
from glowplug.entrypoints.front.chat.turn import Turn
from tests.support.random_schemas import random_schema

QUESTION = [{"role": "user", "content": "Give me some JSON."}]
CLOSE = "</think>"


@dataclass
class Outcome:
    """The answers of a run.

    Attributes:
        finished: number of answers that ended by themselves.
        cut: number of answers that reached their token limit.
        wrong: (seed, text, error) of each other end and of each answer that does not validate.
        texts: the answers.
    """

    finished: int = 0
    cut: int = 0
    wrong: list[tuple[int, str, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, seed: int, schema: dict[str, Any], text: str, reason: str | None) -> None:
        self.texts.append(text)
        self.cut += reason == "length"
        self.finished += reason == "stop"
        error = problem(schema, text) if reason == "stop" else ""
        if reason not in ("stop", "length") or error:
            self.wrong.append((seed, text, error or str(reason)))


def problem(schema: dict[str, Any], text: str) -> str:
    """Return why the content of ``text`` does not follow ``schema``; "" if it does."""
    content = text.rpartition(CLOSE)[2]
    try:
        jsonschema.validate(json.loads(content), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def run(
    llm: LLM, seeds: Sequence[int], *, streamed: bool, thinking: bool, max_tokens: int = 300
) -> Outcome:
    """Answer one random schema for each seed at temperature 1.5, and check the answers."""
    schemas = [random_schema(seed) for seed in seeds]
    params = [
        SamplingParams(temperature=1.5, max_tokens=max_tokens, json_schema=schema, seed=seed)
        for seed, schema in zip(seeds, schemas)
    ]
    found = Outcome()
    if not streamed:
        answers = llm.chat([QUESTION] * len(seeds), params, enable_thinking=thinking)
        for seed, schema, answer in zip(seeds, schemas, answers):
            found.add(seed, schema, answer.text, answer.error or answer.finish_reason)
        return found
    template = {"enable_thinking": thinking}
    started = [llm._chat(Turn(QUESTION, template=template), one) for one in params]
    streams = {
        llm._submit(llm._check(ids, form.params)): number
        for number, (ids, form) in enumerate(started)
    }
    texts = [""] * len(seeds)
    ends: dict[int, str | None] = {}
    while len(ends) < len(seeds):
        for stream, delta in llm.poll():
            texts[streams[stream]] += delta.text
            if delta.finish_reason is not None:
                ends[streams[stream]] = delta.error or delta.finish_reason
    for number, (seed, schema) in enumerate(zip(seeds, schemas)):
        found.add(seed, schema, texts[number], ends[number])
    return found

"""Steps per token with and without the tokens that a grammar forces, for chains of drafts.

``python -m tests.e2e.structured_record --part forced --out x.json``. Both runs have the same
prompts and seeds, hence the same answers. The number of drafts is fixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from glowplug import LLM, SamplingParams
from glowplug.core.speculation.forced_drafts import ForcedDrafts
from glowplug.core.step.structured import StructuredOutputsParams
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from tests.e2e.structured import QUESTION
from tests.support.random_schemas import random_schema

TOKENS = 300  #: most tokens of an answer
#: almost all of the text is forced
MOSTLY_FORCED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "description": {"enum": ["abcdefghijklmnop"]},
        "identifier": {"type": "integer", "minimum": 5, "maximum": 9},
    },
    "required": ["description", "identifier"],
    "additionalProperties": False,
}


@contextmanager
def offering(offered: bool) -> Iterator[None]:
    """Let engines of this process offer forced tokens as drafts, or not."""
    offer = ForcedDrafts.offer
    if not offered:
        ForcedDrafts.offer = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ForcedDrafts.offer = offer  # type: ignore[method-assign]


def forced(library: str, chain: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return a row for each kind of schemas, with forced tokens offered and not; print it.

    Args:
        library: the library of grammars.
        chain: configuration of the engine with a chain of drafts.
        count: number of schemas of each kind.
    """
    kinds = {
        "mostly forced": [MOSTLY_FORCED] * count,
        "random": [random_schema(seed) for seed in range(count)],
    }
    config = {**chain, "speculative": {**chain["speculative"], "adaptive": False}}
    rows = []
    with LLM(**config, grammar={"use": library, "workers": 1}) as llm:
        for kind, schemas in kinds.items():
            found = [one_row(llm, schemas, offered) for offered in (False, True)]
            (texts, _), (others, _) = found
            assert texts == others, "forced tokens change no answer"
            rows += [{"schemas": kind, "count": count, **row} for _, row in found]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def one_row(
    llm: LLM, schemas: list[dict[str, Any]], offered: bool
) -> tuple[list[str], dict[str, Any]]:
    """Answer the schemas one after the other; return the answers and the figures."""
    texts = []
    tokens = 0
    with offering(offered):
        before = settled_stats(llm).steps
        for seed, schema in enumerate(schemas):
            outputs = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            params = SamplingParams(
                temperature=1.0, max_tokens=TOKENS, seed=seed, structured_outputs=outputs
            )
            answer = llm.chat(QUESTION, params, enable_thinking=False)[0]
            texts.append(answer.text)
            tokens += len(answer.token_ids)
        steps = settled_stats(llm).steps - before
    figures = {"offered": offered, "steps": steps, "tokens": tokens}
    return texts, {**figures, "steps_per_token": round(steps / tokens, 4)}

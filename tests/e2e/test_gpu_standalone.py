"""A whole model as a draft on a GPU: eager and replayed steps yield the tokens of no speculation,
and the embedded model accepts its own drafts.
"""

from __future__ import annotations

from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.models.embedded.tasks import held_out_tasks

STEPS = 3
TREE = {"topk": 3, "draft_tokens": 7}
CHATS = [[{"role": "user", "content": task.prompt}] for task in held_out_tasks(24)]
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)
#: whole tokens per step of a chain; rounding of 16-bit sums makes the two models differ at times
LEAST = 0.8 * (STEPS + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
@pytest.mark.parametrize("graphs", ["eager", "cuda_graph"])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_the_embedded_model_accepts_its_own_drafts(
    graphs: str, shape: dict[str, int], overlap: bool
) -> None:
    """A step gains nearly all drafts, with prompts beside decoding rows and a warm cache too."""
    config: dict[str, Any] = {
        "device": "cuda",
        "graphs": {"use": graphs},
        "scheduler": {"overlap": overlap, "max_running_requests": 8},
        "speculative": {
            "use": "standalone",
            "draft_model": "embedded",
            "steps": STEPS,
            "adaptive": False,
            **shape,
        },
    }
    with LLM("embedded", **config) as llm:
        answers = llm.chat(CHATS, ANSWER)
        again = llm.chat(CHATS, ANSWER)
        stats = llm.stats
        width = llm.plan.sizes.width
        pages = llm.control("check")
    assert all(one.token_ids for one in answers + again)
    rounds = stats.drafted_tokens / (width - 1)
    assert 1 + stats.accepted_tokens / rounds > (0.7 * (STEPS + 1) if shape else LEAST)
    assert pages["running"] == 0 and pages["free"] + pages["evictable"] == pages["total"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_replayed_steps_yield_the_tokens_of_no_speculation(shape: dict[str, int]) -> None:
    """In float32, tokens are those of an engine without drafts, whatever sizes steps choose."""
    base: dict[str, Any] = {"device": "cuda", "dtype": "float32", "context_length": 512}
    drafts = {"use": "standalone", "draft_model": "embedded", "steps": STEPS, **shape}
    found = []
    for config in (base, {**base, "speculative": drafts}):
        with LLM("embedded", **config) as llm:
            found.append([one.token_ids for one in llm.chat(CHATS[:8], ANSWER)])
            lines = {line.name for line in llm.plan.budget}
            memory = llm.control("info")["memory"]
    assert found[0] == found[1]
    assert "draft kv cache" in lines and memory["draft kv cache"]["measured"]

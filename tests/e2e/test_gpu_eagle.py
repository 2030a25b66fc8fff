"""EAGLE heads on a GPU: eager and replayed steps accept as many drafts as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.models.embedded.tasks import held_out_tasks

STEPS = 3
CHATS = [[{"role": "user", "content": task.prompt}] for task in held_out_tasks(24)]
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["eager", "cuda_graph"])
@pytest.mark.parametrize("drafts", [{}, {"topk": 4, "draft_tokens": 8}], ids=["chain", "tree"])
def test_the_embedded_models_head_is_accepted(graphs: str, drafts: dict[str, Any]) -> None:
    config: dict[str, Any] = {
        "device": "cuda",
        "graphs": {"use": graphs},
        "speculative": {"use": "eagle", "steps": STEPS, "adaptive": False, **drafts},
    }
    with LLM("embedded", **config) as llm:
        answers = llm.chat(CHATS, ANSWER)
        stats = llm.stats
        width = llm.plan.sizes.width
    assert all(one.token_ids for one in answers)
    rounds = stats.drafted_tokens / (width - 1)
    assert 1 + stats.accepted_tokens / rounds > 2.3

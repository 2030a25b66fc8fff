"""The embedded model's promise, through the engine: exact answers on the 500 held-out tasks."""

from __future__ import annotations

import pytest

from glowplug import LLM, SamplingParams
from glowplug.models.embedded.tasks import held_out_tasks, score

GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


def scores(activations: str) -> dict[str, float]:
    """Return percentages by kind of task, answered by the engine with the published weights."""
    tasks = held_out_tasks(500)
    texts = [""] * len(tasks)
    with LLM(
        model="embedded", quantization={"use": "block_fp8", "activations": activations}
    ) as llm:
        for think in (False, True):
            chosen = [i for i, task in enumerate(tasks) if task.think is think]
            chats = [[{"role": "user", "content": tasks[i].prompt}] for i in chosen]
            for i, done in zip(chosen, llm.chat(chats, GREEDY, thinking=think), strict=True):
                texts[i] = done.text
    return score(tasks, texts)


@pytest.fixture(scope="module")
def dynamic() -> dict[str, float]:
    return scores("dynamic")


def test_held_out_tasks(dynamic: dict[str, float]) -> None:
    print(dynamic)
    assert dynamic["all"] >= 95.0


def test_rounding_activations_costs_less_than_a_point(dynamic: dict[str, float]) -> None:
    assert abs(scores("none")["all"] - dynamic["all"]) <= 1.0

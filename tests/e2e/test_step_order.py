"""The order of the host's work before and during the device's computation of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from tests.support.tiny import write_config


def noted(order: list[str], name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        order.append(name)
        return work(*given, **named)

    return call


@pytest.mark.parametrize("steps", [0, 2])
def test_sampling_of_an_eager_step_is_planned_after_its_pass(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens wait only for work that the pass needs, and every row has joined before it is
    sampled from.
    """
    order: list[str] = []
    drafts: dict[str, Any] = (
        {"speculative": {"use": "nextn", "adaptive": False, "steps": steps}} if steps else {}
    )
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    with LLM(
        model=str(folder),
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=64,
        memory={"kv_tokens": 512},
        **drafts,
    ) as llm:
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        for owner, name in (
            (runner, "_forward"),
            (runner.sampler, "join"),
            (runner.sampler, "plan_step"),
            (runner.sampler, "sample"),
        ):
            monkeypatch.setattr(owner, name, noted(order, name, getattr(owner, name)))
        done = llm.generate(
            [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
        )
    assert [len(one.token_ids) for one in done] == [3, 3]
    assert order[:5] == ["_forward", "join", "join", "plan_step", "sample"]
    assert order.count("plan_step") == order.count("sample")

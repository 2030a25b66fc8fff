"""Logits that are not finite: of one request, and of a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.errors import GlowplugError
from glowplug.plugins.weights.random_runtime import RandomSource
from tests.support.tiny import write_config

POISON = 77  #: token id whose embedding is not finite
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine(folder: Path, **config: Any) -> LLM:
    base: dict[str, Any] = {"weights": {"use": "random"}, "skip_tokenizer": True, "device": "cpu"}
    return LLM(model=str(folder), **base, context_length=128, memory={"kv_tokens": 1024}, **config)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("overlap", [True, False])
def test_logits_of_one_request_that_are_not_finite(
    tmp_path: Path, value: float, overlap: bool
) -> None:
    """The request fails. Others in its batch get the tokens they get alone,
    and the pages of all are free afterwards.
    """
    good = [[5, 6, 7, 8], [9] * 20, [30, 31]]
    with engine(write_config(tmp_path, "v3"), scheduler={"overlap": overlap}) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in good]
        llm.control("flush")
        embedding = llm._executor._engine.runner.model.embed  # type: ignore[attr-defined]
        embedding.weight[POISON] = value
        done = llm.generate([good[0], [3, POISON, 4], *good[1:]], GREEDY)
        assert done[1].finish_reason == "error" and "not finite" in str(done[1].error)
        assert [one.token_ids for one in done if one.finish_reason == "length"] == alone
        llm.control("flush")
        pages = llm.control("check")
        assert pages["free"] == pages["total"]


def test_a_model_whose_logits_are_not_finite_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RandomSource.read

    def poisoned(self: RandomSource, target: Any) -> Any:
        tensor = read(self, target)
        return tensor.fill_(torch.nan) if "norm" in str(target.name) else tensor

    monkeypatch.setattr(RandomSource, "read", poisoned)
    with pytest.raises(GlowplugError, match="logits are not finite"):
        engine(write_config(tmp_path, "v3"))

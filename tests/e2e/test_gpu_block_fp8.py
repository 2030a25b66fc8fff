"""Block FP8 on one GPU, where weights stay E4M3: the CPU's log-probabilities, and the embedded
model's scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from glowplug.models.embedded.tasks import held_out_tasks, score
from tests.support.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
DYNAMIC = {"use": "block_fp8", "activations": "dynamic"}


def log_probabilities(folder: Path, device: str, **config: Any) -> np.ndarray:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (2, 17, 40, 64, 100)]
    asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with LLM(
        model=str(folder),
        device=device,
        weights={"use": "random"},
        skip_tokenizer=True,
        memory={"kv_tokens": 2048},
        **config,
    ) as llm:
        done = llm.generate(prompts, asked)
    return np.concatenate(
        [np.array(c.prompt_logprobs.token, np.float64) for c in done if c.prompt_logprobs]
    )


@pytest.mark.parametrize("gemm", ["triton", "auto"])
def test_log_probabilities_are_the_cpus(tmp_path: Path, gemm: str) -> None:
    """The CPU rounds the same activations to the same grid and multiplies in float32."""
    folder = write_config(tmp_path, "v3_fp8")
    wanted = log_probabilities(folder, "cpu", quantization=DYNAMIC, dtype="float32")
    found = log_probabilities(
        folder, "cuda", quantization={**DYNAMIC, "gemm": gemm}, dtype="bfloat16"
    )
    exact = log_probabilities(
        folder, "cpu", quantization={**DYNAMIC, "activations": "none"}, dtype="float32"
    )
    rounding = np.abs(exact - wanted).mean()
    assert np.isfinite(found).all() and 0 < rounding
    assert np.abs(found - wanted).mean() <= max(0.02, 1.2 * rounding), (
        np.abs(found - wanted).mean(),
        rounding,
    )


def test_the_embedded_model_scores_in_fp8() -> None:
    tasks = held_out_tasks(500)
    texts = [""] * len(tasks)
    with LLM(model="embedded", device="cuda", quantization=DYNAMIC) as llm:
        for think in (False, True):
            chosen = [i for i, task in enumerate(tasks) if task.think is think]
            chats = [[{"role": "user", "content": tasks[i].prompt}] for i in chosen]
            greedy = SamplingParams(temperature=0.0, max_tokens=200)
            for i, done in zip(chosen, llm.chat(chats, greedy, thinking=think), strict=True):
                texts[i] = done.text
    found = score(tasks, texts)
    print(found)
    assert found["all"] >= 95.0

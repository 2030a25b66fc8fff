"""The whole engine on one GPU: the CPU's greedy tokens in float32, finite work in bf16, embedded
answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glowplug import LLM, SamplingParams
from tests.support.tiny import CONFIGS, VOCAB, write_config

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, n).tolist() for n in (1, 16, 17, 33, 90)]


def tokens(folder: Path, device: str, **config: Any) -> list[list[int]]:
    base: dict[str, Any] = {
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "memory": {"kv_tokens": 2048},
    }
    with LLM(model=str(folder), device=device, **{**base, **config}) as llm:
        return [c.token_ids for c in llm.generate(prompts(), GREEDY)]


@pytest.mark.parametrize("name", CONFIGS)
def test_gpu_gives_the_cpus_tokens(name: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, name)
    exact: dict[str, Any] = {"dtype": "float32"}
    if "fp8" in name:
        exact["quantization"] = {"use": "block_fp8", "activations": "none"}
    assert tokens(folder, "cuda", **exact) == tokens(folder, "cpu", **exact)


@pytest.mark.parametrize("overlap", [True, False])
def test_gpu_overlap_and_preemption(tmp_path: Path, overlap: bool) -> None:
    folder = write_config(tmp_path, "v3")
    want = tokens(folder, "cuda", dtype="float32")
    got = tokens(
        folder,
        "cuda",
        dtype="float32",
        scheduler={"overlap": overlap, "chunk_size": 7},
        memory={"kv_tokens": 288},
    )
    assert got == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_half_precision_runs(tmp_path: Path, dtype: str) -> None:
    got = tokens(write_config(tmp_path, "v3"), "cuda", dtype=dtype)
    assert all(len(ids) == GREEDY.max_tokens for ids in got)


def test_embedded_model_answers_on_the_gpu() -> None:
    questions = [("What is 17 + 25?", "42"), ("What is the capital of France?", "Paris")]
    with LLM(model="embedded", device="cuda") as llm:
        out = llm.chat(
            [[{"role": "user", "content": q}] for q, _ in questions],
            SamplingParams(temperature=0.0, max_tokens=24),
        )
    for completion, (_, answer) in zip(out, questions, strict=True):
        assert answer in completion.text

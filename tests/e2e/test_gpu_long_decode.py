"""Hundreds of steps replayed from graphs at one and two rows, the next one launched before the last
has ended: each step's logits against one pass over the whole sequence in float32.

The model has V2-Lite's sizes with one dense and one mixture layer, so that lengths cross tiles of
keys, pages, and the rounds in which KV splits are merged, with the kernels that serve single
requests.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from glowplug.kernels.launch.cuda_arch import SHORT_KEYS_MAX
from tests.gpu.logits import TEACHER, reference
from tests.plugins.teacher_runtime import SCRIPTS, SEEN, score_prompts
from tests.support.tiny import write_config

COSINE = 0.999


def engine(folder: Path, device: str, context: int, **changes: Any) -> LLM:
    base = {
        "device": device,
        "skip_tokenizer": True,
        "weights": {"use": "random"},
        "context_length": context,
        "memory": {"kv_tokens": 9 * context},
        "cache": {"use": "none"},
    }
    return LLM(model=str(folder), plugins=TEACHER, **{**base, **changes})


def decoded(
    folder: Path,
    device: str,
    prompt: int,
    steps: int,
    context: int,
    *,
    batches: tuple[int, ...] = (1, 2),
    **changes: Any,
) -> list[tuple[list[int], Tensor]]:
    """Return whole sequences of a single request and of two at once (or of other ``batches``), with
    the logits [steps, V] of their new tokens.
    """
    keeps = {"use": "keeper", "first": prompt, "count": steps}
    found = []
    with engine(
        folder,
        device,
        context,
        sampling=keeps,
        scheduler={"max_running_requests": max(batches)},
        **changes,
    ) as llm:
        vocab = llm.plan.facts.model.vocab_size
        sampler = llm._executor._engine.runner.sampler  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        for rows in batches:
            rng = np.random.default_rng(rows)
            prompts = [rng.integers(2, vocab, prompt).tolist() for _ in range(rows)]
            sampler.kept.fill_(float("nan"))
            done = llm.generate(prompts, params)
            for text, completion in zip(prompts, done, strict=True):
                assert completion.error is None, (
                    f"{rows} rows, {len(completion.token_ids)} tokens: {completion.error}"
                )
                assert len(completion.token_ids) == steps
                tokens = torch.tensor(completion.token_ids, device=device)
                best = sampler.kept[:, :steps].argmax(
                    -1
                )  # of every row of the table; one of them is this request's
                (row,) = (best == tokens).all(-1).nonzero()[:1, 0].tolist()
                found.append((text + completion.token_ids, sampler.kept[row, :steps].clone()))
    return found


def computed(folder: Path, device: str, sequences: list[list[int]]) -> list[Tensor]:
    """Return float32 [length - 1, V] of each sequence, prefilled at once in plain torch."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, seed=i)
        for i in range(len(sequences))
    ]
    longest = max(map(len, sequences))
    with engine(
        folder,
        device,
        longest + 64,
        sampling={"use": "teacher"},
        scheduler={"chunk_size": longest},
        **reference(False),
    ) as llm:
        score_prompts(llm._executor._engine.runner)  # type: ignore[attr-defined]
        SCRIPTS[:] = [[*sequence, 2] for sequence in sequences]
        try:
            llm.generate(sequences, params)
            return [
                torch.stack([SEEN[i, at] for at in range(1, len(sequence))])
                for i, sequence in enumerate(sequences)
            ]
        finally:
            SCRIPTS.clear()
            SEEN.clear()


def check(
    folder: Path, device: str, prompt: int, steps: int, context: int, **changes: Any
) -> float:
    """Return the smallest cosine of any step."""
    found = decoded(folder, device, prompt, steps, context, **changes)
    gc.collect()
    least = 1.0
    for number, ((_, got), all_want) in enumerate(
        zip(found, computed(folder, device, [each for each, _ in found]), strict=True)
    ):
        want = all_want[prompt - 1 :]
        assert torch.isfinite(got).all(), (
            f"sequence {number}: not finite at step {_first(~torch.isfinite(got))}"
        )
        cosine = torch.nn.functional.cosine_similarity(want, got, dim=1)
        assert float(cosine.min()) >= COSINE, (
            f"sequence {number}, step {int(cosine.argmin())}: {float(cosine.min())}"
        )
        least = min(least, float(cosine.min()))
    return least


def _first(wrong: Tensor) -> int:
    return int(wrong.any(-1).nonzero()[0])


def test_the_comparison_holds_on_the_cpu(tmp_path: Path) -> None:
    assert check(write_config(tmp_path, "v2"), "cpu", 20, 12, 64, dtype="float32") > 0.9999


@pytest.mark.gpu
@pytest.mark.parametrize("backend,context", [("auto", 4096), ("triton_mla", 1664)])
def test_v2_lite_at_one_and_two_rows(tmp_path: Path, backend: str, context: int) -> None:
    write_cut(model_config("v2lite", load_plugins()), tmp_path)
    least = check(
        tmp_path,
        "cuda",
        1024,
        576,
        context,
        attention={"use": backend},
        graphs={"use": "cuda_graph", "batch_sizes": [1, 2], "prefill": False},
    )
    print(f"least cosine of 3 x 576 steps: {least:.6f}")


@pytest.mark.gpu
def test_rows_that_grow_past_what_is_short(tmp_path: Path) -> None:
    """Eight rows are replayed as short ones, then as rows of any length, whose KV splits differ."""
    write_cut(model_config("v2lite", load_plugins()), tmp_path)
    least = check(
        tmp_path,
        "cuda",
        SHORT_KEYS_MAX - 20,
        40,
        SHORT_KEYS_MAX + 128,
        batches=(8,),
        graphs={"use": "cuda_graph", "batch_sizes": [8], "prefill": False},
    )
    print(f"least cosine of 8 x 40 steps around {SHORT_KEYS_MAX} keys: {least:.6f}")

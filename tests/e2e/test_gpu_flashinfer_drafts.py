"""Drafts over FlashInfer's latent attention give the results of the reference kernels without
drafts, captured and not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.support.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ROUNDING = 0.08  #: of a log-probability, by bf16 through three layers
#: dense layers: with experts, rounding would decide the choice
ALIKE = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
}


def completions(folder: Path, **config: Any) -> list[Any]:
    """Return the completions of prompts that end on all sides of a page, some of them together and
    some after others.
    """
    rng, base = np.random.default_rng(0), {"device": "cuda", "dtype": "bfloat16"}
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (1, 3, 63, 64, 65, 130, 200, 17, 90)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12 + 9 * i, ignore_eos=True, logprobs=1)
        for i in range(9)
    ]
    with LLM(
        model=str(folder),
        weights={"use": "random"},
        skip_tokenizer=True,
        context_length=384,
        memory={"kv_tokens": 8192},
        **{"scheduler": {"max_running_requests": 5}, **base, **config},
    ) as llm:
        return llm.generate(prompts, params)


def differences(found: list[Any], wanted: list[Any]) -> list[tuple[int, int, float]]:
    """Return (prompt, position, size) of differences of log-probabilities up to the first different
    token, which must be a near tie.
    """
    wrong = []
    for prompt, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert len(one.token_ids) == len(other.token_ids)
        for at, tokens in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            off = abs(one.logprobs.token[at] - other.logprobs.token[at])
            if off > ROUNDING:
                wrong.append((prompt, at, off))
            if tokens[0] != tokens[1]:
                break
    return wrong


@pytest.mark.skipif(not HERE, reason="needs a Hopper GPU")
@pytest.mark.parametrize("steps", [1, 3])
def test_drafts_change_nothing(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("flashinfer")
    folder = write_config(tmp_path, "v3", **ALIKE)
    plain = completions(folder, attention={"use": "triton_mla"}, graphs={"use": "eager"})
    drafts = {
        "attention": {"use": "flashinfer_mla"},
        "speculative": {"use": "nextn", "adaptive": False, "steps": steps},
    }
    for more in (
        {"graphs": {"use": "eager"}},
        {"graphs": {"use": "cuda_graph", "batch_sizes": [1, 2, 4, 5]}},
        {"scheduler": {"max_running_requests": 5, "overlap": False}},
    ):
        wrong = differences(completions(folder, **drafts, **more), plain)
        assert not wrong, (more, wrong)

"""An engine over the interpreted kernels of ``triton_mha`` gives plain torch's tokens: in chunks,
behind cached prefixes, beside decoding rows, in graphs that are filled up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.support.tiny import VOCAB, write_config

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: kernels are not interpreted"
)
REPLAYED = {"use": "replaying", "batch_sizes": [1, 3], "prefill": True, "prefill_tokens": [16]}


def tokens(folder: Path, attention: str, graphs: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of three prompts at once, and of two of them again with other ends."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in (3, 19, 33)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (6, 3, 4)
    ]
    with LLM(
        model=str(folder),
        plugins=["tests.plugins.replaying", "tests.plugins.interpreted_mha"],
        weights={"use": "random"},
        skip_tokenizer=True,
        dtype="float32",
        device="cpu",
        context_length=48,
        memory={"kv_tokens": 512},
        scheduler={"max_running_requests": 3, "chunk_size": 11},
        attention={"use": attention, "page_size": 16},
        graphs=graphs,
    ) as llm:
        found = llm.generate(prompts, params)
        found += llm.generate([prompts[1] + [7, 9], prompts[2][:20] + [5]], params[1:])
        llm.control("check")
    return [one.token_ids for one in found]


@pytest.mark.slow
def test_tokens_are_those_of_plain_torch(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama", num_hidden_layers=2)
    expected = tokens(folder, "torch_mha", {"use": "eager"})
    assert tokens(folder, "interpreted_mha", REPLAYED) == expected

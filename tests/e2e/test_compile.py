"""A compiled engine on the CPU gives the tokens of a plain one, and compiles nothing once it
serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._dynamo.utils import counters

from glowplug import LLM, SamplingParams
from glowplug.core.facts.machine import software
from tests.support.tiny import VOCAB, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not software(()).cxx, reason="needs a C++ compiler"),
]


@pytest.mark.parametrize(
    "speculative",
    [
        {"use": "none"},
        {"use": "nextn", "adaptive": False, "steps": 2},
        {"use": "nextn", "adaptive": False, "steps": 2, "topk": 3},
    ],
    ids=["plain", "nextn", "trees"],
)
def test_compiled_steps_give_the_plain_tokens(
    tmp_path: Path, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = write_config(tmp_path / "v3", "v3", num_nextn_predict_layers=1)
    rng, found = np.random.default_rng(5), []
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in (1, 40, 9, 3, 77)]
    asked = [
        SamplingParams(temperature=0.0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(5)
    ]
    for ops in ({"use": "torch"}, {"use": "torch_compile", "max_batch": 4}):
        with LLM(
            model=str(folder),
            weights={"use": "random"},
            skip_tokenizer=True,
            device="cpu",
            context_length=128,
            memory={"kv_tokens": 1024},
            ops=ops,
            speculative=speculative,
        ) as llm:
            started = counters["stats"]["unique_graphs"]
            found.append(
                [
                    [one.token_ids for one in llm.generate(prompts[:count], asked[:count])]
                    for count in (1, 2, 5)
                ]
            )
            assert counters["stats"]["unique_graphs"] == started, "a step compiled something"
    assert started > 0 and found[0] == found[1]

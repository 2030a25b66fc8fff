"""Memory on a GPU: what the plan predicts, what is measured, what is used; full caches without running out."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.source_tree import ROOT
from tests.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
NEAR = 0.05  #: predicted against real
SMALL = 32 << 20  #: bytes that no line is held to: the allocator's own granularity on models this small
GRAPHS = 64 << 20  #: what graphs may take beyond the prediction: the driver's share differs from card to card
EXACT = ("weights", "draft weights", "rotary tables")
AGAIN = ("activations", "logits", "cuda runtime")  #: measured, then measured again over the whole pool
EVERYTHING = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5, max_tokens=8,
                            ignore_eos=True)


def shape(folder: Path, name: str, **changes: Any) -> Path:
    """A published shape with a few of its layers."""
    config = json.loads((ROOT / "models" / "shapes" / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def near(one: int, other: int) -> bool:
    return abs(one - other) <= max(NEAR * max(one, other), SMALL)


def show(name: str, memory: dict[str, Any]) -> None:
    for line, found in memory.items():
        cells = " ".join(f"{word} {(found.get(word) or 0) / 2**20:10.1f}" for word in ("planned", "measured", "served"))
        print(f"{name:12} {line:14} {cells} MiB")


def checked(name: str, llm: LLM) -> None:
    """Every line that arithmetic can know is as planned; every line that is measured is the same in service."""
    info = llm.control("info")
    memory = info["memory"]
    show(name, memory)
    seconds = {phase: round(taken, 2) for phase, taken in info["startup_seconds"].items()}
    print(name, info["max_total_num_tokens"], "tokens", seconds)
    for line in EXACT:
        if line in memory:
            assert near(memory[line]["planned"], memory[line]["measured"]), (line, memory[line])
    assert near(info["kv_bytes"], memory["kv cache"]["measured"])
    for line in AGAIN:
        assert near(memory[line]["measured"], memory[line]["served"]), (line, memory[line])
    graphs = memory["graphs"]
    assert graphs.get("served", 0) <= graphs["measured"] + GRAPHS, graphs
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0, "the allocator had to give memory back in a step"
    assert memory["step"]["served"] <= memory["step"]["measured"] * (1 + NEAR) + SMALL, memory["step"]


@pytest.mark.parametrize(("name", "steps"), [("v2", 0), ("v3", 0), ("v3", 2), ("v3_fp8", 0), ("llama", 0)])
def test_lines_of_tiny_models(name: str, steps: int, tmp_path: Path) -> None:
    changes = {"num_nextn_predict_layers": 1} if steps else {}
    config: dict[str, Any] = {"speculative": {"use": "nextn", "steps": steps}} if steps else {}
    folder = write_config(tmp_path, name, **changes)
    with LLM(model=str(folder), device="cuda", weights={"use": "random"}, skip_tokenizer=True, dtype="bfloat16",
             memory={"fraction": 0.2}, **config) as llm:
        rng = np.random.default_rng(0)
        llm.generate([rng.integers(2, VOCAB, 50).tolist() for _ in range(300)], EVERYTHING)
        checked(f"{name}+{steps}", llm)


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v2-lite", 3), ("deepseek-v3", 4)])
def test_lines_of_published_shapes_with_a_full_cache(name: str, layers: int, tmp_path: Path) -> None:
    """512 requests over a pool that takes all that is left: no error, and no step beyond what was measured."""
    folder = shape(tmp_path, name, num_hidden_layers=layers, num_nextn_predict_layers=0)
    with LLM(model=str(folder), device="cuda", weights={"use": "random"}, skip_tokenizer=True, context_length=8192,
             scheduler={"max_running_requests": 512}) as llm:
        rng = np.random.default_rng(0)
        done = llm.generate([rng.integers(2, 1000, int(n)).tolist() for n in rng.integers(1, 2000, 512)], EVERYTHING)
        short = [(i, c.finish_reason, c.error, len(c.prompt_token_ids), c.token_ids)
                 for i, c in enumerate(done) if len(c.token_ids) != EVERYTHING.max_tokens]
        assert not short, (len(short), short[:4])
        checked(name, llm)


def test_a_pool_that_does_not_fit_is_refused_before_the_port_opens(tmp_path: Path) -> None:
    from glowplug.core.errors import GlowplugError

    with pytest.raises(GlowplugError, match=r"left for the KV cache|Fix|reserve"):
        LLM(model=str(write_config(tmp_path, "v3")), device="cuda", weights={"use": "random"}, skip_tokenizer=True,
            memory={"fraction": 0.013})

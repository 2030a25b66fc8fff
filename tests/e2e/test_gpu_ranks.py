"""Drafts on one GPU and several ranks on several, over NCCL: the embedded model's greedy tokens in
float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.facts.model_folder import embedded_path, read_folder

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
QUESTIONS = (
    "What is 17 + 25?",
    "Reverse the word: engine",
    "What is the capital of France?",
    "Count from 3 to 9.",
    "Sort these numbers: 5 2 9 1",
)
LAYOUTS = [
    (2, 0, 0, ""),
    (2, 2, 0, "all_gather"),
    (2, 0, 2, ""),
    *((2, 2, 2, exchange) for exchange in ("all_gather", "push", "all_to_all_static")),
    *((4, 4, 2, exchange) for exchange in ("all_gather", "push")),
    *((4, 2, 4, exchange) for exchange in ("all_gather", "push")),
]


def answers(device: str, **config: Any) -> list[list[int]]:
    """Return the answers. NOTE: activations stay in float32, too: rounded to FP8 they change with
    the order of sums.
    """
    with LLM(
        model="embedded",
        device=device,
        dtype="float32",
        memory={"kv_tokens": 4096},
        quantization={"use": "block_fp8", "activations": "none"},
        **config,
    ) as llm:
        found = llm.chat(
            [[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY
        )
        pages = llm.control("check")
    assert pages is not None
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answers("cpu")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_drafts_on_one_gpu(plain: list[list[int]], steps: int, overlap: bool) -> None:
    config: dict[str, Any] = {
        "speculative": {"use": "nextn", "adaptive": False, "steps": steps},
        "scheduler": {"overlap": overlap},
    }
    assert answers("cuda", **config) == plain


@pytest.mark.parametrize("graphs", ["eager", "cuda_graph"])
def test_padding_of_an_idle_group_chooses_no_expert(graphs: str) -> None:
    """One request in one of two groups: each of its tokens is counted once for each chosen expert,
    also in replayed steps, in which the other group pads as many rows.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    sizes = (("tensor", 2), ("ep_moe", 2), ("dp_attention", 2))
    with LLM(
        model="embedded",
        device="cuda",
        dtype="float32",
        memory={"kv_tokens": 4096},
        quantization={"use": "block_fp8", "activations": "none"},
        parallel=[{"use": use, "size": size} for use, size in sizes],
        graphs={"use": graphs},
        scheduler={"overlap": False},
    ) as llm:
        (done,) = llm.generate([[5, 6, 7]], GREEDY)
        loads = [rank["expert_load"] for rank in llm.control("info")["ranks"]]
        chosen = llm.plan.facts.model.sizes.experts_per_token
    computed = 3 + len(done.token_ids) - 1
    for layer in loads[0]:
        assert sum(sum(load[layer]) for load in loads) == computed * chosen, layer


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("dp", [0, 2])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all_static"])
def test_placed_experts_on_two_gpus(
    plain: list[list[int]], exchange: str, dp: int, steps: int
) -> None:
    """Experts are placed by a load in which they differ, with copies of half of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    facts = read_folder(embedded_path())
    assert facts is not None
    counts = [(expert + 1) ** 3 for expert in range(facts.n_routed_experts)]
    routed = [
        layer for layer in range(facts.num_layers) if facts.config["first_k_dense_replace"] <= layer
    ]
    load = {
        "model": "embedded",
        "architecture": facts.architecture,
        "layers": {f"model.layers.{layer}.mlp": counts for layer in routed},
    }
    experts = {"placement": load, "redundant_experts": len(counts) // 2, "exchange": exchange}
    parallel = [{"use": "tensor", "size": 2}, {"use": "ep_moe", "size": 2, **experts}]
    config: dict[str, Any] = {
        "parallel": [*parallel, *([{"use": "dp_attention", "size": dp}] if dp else [])]
    }
    if steps:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": steps}
    assert answers("cuda", **config) == plain


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("tp", "ep", "dp", "exchange"), LAYOUTS)
def test_ranks_on_several_gpus(
    plain: list[list[int]], tp: int, ep: int, dp: int, exchange: str, steps: int
) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    sizes = (("tensor", tp), ("ep_moe", ep), ("dp_attention", dp))
    parallel: list[dict[str, Any]] = [{"use": use, "size": size} for use, size in sizes if size]
    if ep:
        parallel[1]["exchange"] = exchange
    config: dict[str, Any] = {"parallel": parallel}
    if steps:
        config["speculative"] = {"use": "nextn", "adaptive": False, "steps": steps}
    assert answers("cuda", **config) == plain

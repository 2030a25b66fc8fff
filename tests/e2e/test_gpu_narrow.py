"""Int8 and AWQ checkpoints on one GPU, where weights stay narrow: the CPU's log-probabilities,
captured and not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.support.narrow_checkpoints import (
    AWQ,
    COMPRESSED,
    INT8,
    awq_checkpoint,
    float_tensors,
    int8_checkpoint,
    tiny_facts,
    write_folder,
)
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.gpu
#: head sizes of the published models, for which kernels are made
BIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "v2": BIG,
    "v3": {**BIG, "q_lora_rank": 256, "n_shared_experts": 2},
    "llama": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    },
}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "int8": (INT8, int8_checkpoint),
    "compressed": (COMPRESSED, lambda tensors: int8_checkpoint(tensors, flat=True)),
    "awq": ({**AWQ, "group_size": 128}, lambda tensors: awq_checkpoint(tensors, 128)),
}


def log_probabilities(
    folder: Path, device: str, **config: Any
) -> tuple[np.ndarray, list[list[int]]]:
    """Return the log-probabilities of every prompt's tokens, and greedy answers."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB, n).tolist() for n in (2, 17, 40, 64, 100)]
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    few = (
        {}
        if device == "cpu" or "graphs" in config
        else {"graphs": {"use": "cuda_graph", "batch_sizes": [2, 5], "prefill": False}}
    )
    with LLM(
        model=str(folder),
        device=device,
        skip_tokenizer=True,
        memory={"kv_tokens": 2048},
        scheduler={"max_running_requests": 5},
        **few,
        **config,
    ) as llm:
        done = llm.generate(prompts, asked)
    known = [np.array(c.prompt_logprobs.token, np.float64) for c in done if c.prompt_logprobs]
    return np.concatenate(known), [c.token_ids for c in done]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_cpus(name: str, kind: str, tmp_path: Path) -> None:
    """The CPU dequantises the same weights, rounds the same activations and multiplies in
    float32.

    With activations in bfloat16 many round to another code: the GPU may be as far off as the CPU is
    in bfloat16.
    """
    config, quantise = CASES[kind]
    stored, _ = quantise(float_tensors(tiny_facts(name, **MODELS[name])))
    folder = write_folder(tmp_path, name, stored, config, **MODELS[name])
    options = (
        {} if kind == "awq" else {"quantization": {"use": "w8a8_int8", "activations": "dynamic"}}
    )
    wanted, _ = log_probabilities(folder, "cpu", dtype="float32", **options)
    rough, _ = log_probabilities(folder, "cpu", dtype="bfloat16", **options)
    bound = max(0.02, 1.2 * np.abs(rough - wanted).mean())
    graphs, answers = log_probabilities(folder, "cuda", dtype="bfloat16", **options)
    eager, _ = log_probabilities(
        folder, "cuda", dtype="bfloat16", graphs={"use": "eager"}, **options
    )
    for found in (graphs, eager):
        shift = np.abs(found - wanted).mean()
        assert np.isfinite(found).all() and shift <= bound, (shift, bound)
    assert len({token for row in answers for token in row}) > 5


def test_awq_in_float16_and_dequantised_first(tmp_path: Path) -> None:
    """Attention uses our own kernels: a build of FlashAttention-3 may lack float16, and then ends
    the process.
    """
    config, quantise = CASES["awq"]
    stored, _ = quantise(float_tensors(tiny_facts("v2", **BIG)))
    folder = write_folder(tmp_path, "v2", stored, config, **BIG)
    wanted, _ = log_probabilities(folder, "cpu", dtype="float32")
    for gemm in ("triton", "cublas"):
        found, _ = log_probabilities(
            folder,
            "cuda",
            dtype="float16",
            attention={"use": "triton_mla"},
            quantization={"use": "awq", "gemm": gemm},
        )
        assert np.abs(found - wanted).mean() <= 0.01, (gemm, np.abs(found - wanted).mean())


@pytest.mark.parametrize("gemm", ["triton", "cutlass"])
def test_int8_while_loading(gemm: str, tmp_path: Path) -> None:
    """Our own kernels and a library are used in turn; nothing is left on the device."""
    if gemm == "cutlass":
        pytest.importorskip("sgl_kernel")
    tensors = float_tensors(tiny_facts("v2", **BIG))
    plain, _ = log_probabilities(
        write_folder(tmp_path, "v2", tensors, None, **BIG), "cuda", dtype="bfloat16"
    )
    before = torch.cuda.memory_allocated()
    found, _ = log_probabilities(
        tmp_path, "cuda", dtype="bfloat16", quantization={"use": "w8a8_int8", "gemm": gemm}
    )
    assert np.abs(found - plain).mean() <= 0.1, np.abs(found - plain).mean()
    assert torch.cuda.memory_allocated() - before < 1 << 20

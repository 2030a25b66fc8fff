"""The tuner of routed experts in block FP8 without a device: inputs of its GEMMs, and errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.kernels.launch.tuned_tables import Config  # noqa: E402
from glowplug.kernels.moe.align import Alignment, align  # noqa: E402
from glowplug.kernels.moe.fp8 import (  # noqa: E402
    gemm_hopper,
    tiles as moe_fp8_tiles,
    tuning as moe_fp8_tuning,
)

TOKENS = moe_fp8_tuning.PAIRED_TOKENS_MAX + 1
#: the experts of one rank of two
RANK = moe_fp8_tuning.Fp8ExpertsProblem(2, 2, 128, 128, others=2)
HOPPER: Config = {"BLOCK_M": moe_fp8_tiles.HOPPER_ROWS, "GROUP": 1}


def call_each(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    for call in calls:
        call()
    return 1.0


def bench_of_rank() -> moe_fp8_tuning._Experts:
    return moe_fp8_tuning._Experts.make(RANK, RANK.experts, DEVICE)


def test_the_hopper_kernel_finds_a_row_at_each_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding positions in use may outnumber the pairs, and their scales are read."""
    read = []

    def kernel(
        x: Tensor,
        scales: Tensor,
        weight: Tensor,
        w_scales: Tensor,
        order: Alignment,
        *given: object,
    ) -> None:
        read.append(int(order.num_padded))
        assert read[-1] <= len(x) == len(scales) <= scales.stride(1) and scales.stride(0) == 1

    monkeypatch.setattr(moe_fp8_tuning, "expert_candidates", lambda *given: [("second", HOPPER)])
    monkeypatch.setattr(moe_fp8_tuning, "microseconds", call_each)
    monkeypatch.setattr(gemm_hopper, "product", kernel)
    best = moe_fp8_tuning._measure(bench_of_rank(), RANK, TOKENS, set())
    assert best == {("second", 192, False): (1.0, HOPPER)}
    assert max(read) > TOKENS * RANK.topk


def test_the_hopper_kernel_refuses_input_with_a_row_per_pair() -> None:
    ids, weights = moe_fp8_tuning.routing(RANK, RANK.experts, TOKENS, 0, DEVICE)
    order = align(ids, RANK.experts, moe_fp8_tiles.HOPPER_ROWS)
    bench = bench_of_rank()
    x = torch.zeros(ids.numel(), 128, device=DEVICE)
    with pytest.raises(AssertionError, match="each position"):
        gemm_hopper.product(
            x,
            torch.ones(1, len(x), device=DEVICE).t(),
            bench.w2,
            bench.scales2,
            order,
            weights,
            torch.bfloat16,
            {"GROUP": 1},
        )


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("others", [0, 28])
def test_candidates_are_compiled_for_the_ids_of_a_run(
    fused: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ids of a token is a constant of kernels; a run would compile them again."""
    problem = RANK._replace(experts=9 + fused, topk=8 + fused, fused_shared=fused, others=others)
    ran = []

    def call(
        bench: object, kind: str, config: Config, x: object, routing: moe_fp8_tuning._Routing
    ) -> None:
        ran.append((kind, config, routing.ids.shape[1]))

    make = moe_fp8_tuning._Experts.make
    monkeypatch.setattr(moe_fp8_tuning._Experts, "call", call)
    monkeypatch.setattr(
        moe_fp8_tuning._Experts, "make", staticmethod(lambda *given: make(*given, DEVICE))
    )
    monkeypatch.setattr(moe_fp8_tuning, "routing", partial(moe_fp8_tuning.routing, device=DEVICE))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    wanted = [
        (kind, config)
        for kind, config in moe_fp8_tuning.variants(1, problem)
        if config["num_warps"] == 4 and config["num_stages"] == 3 and config["TMA"]
    ]
    assert {config["PAIRED"] for _, config in wanted} == {False, True}
    assert moe_fp8_tuning._compile_experts(wanted, problem) == []
    assert ran == [(kind, config, problem.topk) for kind, config in wanted]


def test_an_error_names_its_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(calls: object, repeats: int) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(moe_fp8_tuning, "expert_candidates", lambda *given: [("second", HOPPER)])
    monkeypatch.setattr(moe_fp8_tuning, "microseconds", fail)
    with pytest.raises(RuntimeError, match="CUDA error") as raised:
        moe_fp8_tuning._measure(bench_of_rank(), RANK, TOKENS, set())
    (note,) = raised.value.__notes__
    assert all(part in note for part in (f"{TOKENS} tokens", "second", "'GROUP': 1"))

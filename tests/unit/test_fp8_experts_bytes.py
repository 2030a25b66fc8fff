"""Bytes that routed experts in block FP8 hold by ``quantization.experts``, and the steps measured
for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.byte_costs import ExpertsStep
from glowplug.core.startup import warmup
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options, fp8_peak_tokens
from glowplug.plugins.quantization.shared.expert_bytes import (
    DEEP_GEMM_TILE,
    MASKED_TOKENS,
    fp8_experts,
    masked_rows,
)
from tests.gpu.traced_memory import planned, plugins_of_the_card, written

MIB = 1 << 20
INSTALLED = {"sgl-deep-gemm": "0.1.0", "sglang-kernel": "0.4.2"}


def step(tokens: int, experts: Any = "auto", element: int = 2) -> ExpertsStep:
    """Return a step of DeepSeek-V3's experts."""
    return ExpertsStep(
        tokens, 9, 257, 1, 7168, 2048, element, False, BlockFp8Options(experts=experts), INSTALLED
    )


@pytest.mark.parametrize(("tokens", "rows"), [(1, 128), (128, 128), (129, 256), (512, 512)])
def test_masked_rows_are_whole_tiles_of_every_token(tokens: int, rows: int) -> None:
    assert masked_rows(tokens) == rows and rows % DEEP_GEMM_TILE == 0
    work = fp8_experts(step(tokens, "deep_gemm_masked"))
    inner, outer = 257 * rows * 2048 * (1 + 4 / 128), 257 * rows * 7168 * 2
    assert work.result == tokens * 7168 * 2 and 0 <= work.peak - (inner + outer) < MIB


@pytest.mark.parametrize("tokens", [MASKED_TOKENS + 1, 2048, 8192])
def test_larger_steps_hold_the_larger_of_auto_and_the_largest_masked_step(tokens: int) -> None:
    found, auto = fp8_experts(step(tokens, "deep_gemm_masked")), fp8_experts(step(tokens))
    masked = fp8_experts(step(MASKED_TOKENS, "deep_gemm_masked"))
    assert found.peak == max(auto.peak, masked.peak) and found.result == max(
        auto.result, masked.result
    )
    assert masked.peak > fp8_experts(step(MASKED_TOKENS)).peak


@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_cutlass_holds_a_row_of_each_pair(tokens: int) -> None:
    work = fp8_experts(step(tokens, "cutlass"))
    given, both, inner, outer = (
        tokens * 9 * size
        for size in (7168 * (1 + 4 / 128), 2 * 2048 * 2, 2048 * (1 + 4 / 128), 7168 * 2)
    )
    most = max(given + both, both + inner, inner + outer, outer + tokens * 7168 * 2)
    assert 0 <= work.peak - most < MIB


@pytest.mark.parametrize("experts", ["deep_gemm_masked", "cutlass"])
def test_results_in_float32_come_from_rows_of_16_bits(experts: str) -> None:
    narrow, wide = (fp8_experts(step(64, experts, element)) for element in (2, 4))
    assert (
        wide.result == 2 * narrow.result
        and narrow.peak <= wide.peak <= narrow.peak + 2 * wide.result
    )


def test_auto_holds_the_bytes_of_our_own_kernels_in_float32() -> None:
    assert fp8_experts(step(8192, element=4)) == fp8_experts(step(8192, "triton", 4))
    assert (
        fp8_experts(step(8192))
        == fp8_experts(step(8192, "deep_gemm"))
        != fp8_experts(step(8192, "triton"))
    )


@pytest.mark.parametrize("experts", ["auto", "triton", "deep_gemm", "cutlass", "deep_gemm_masked"])
def test_a_step_that_may_hold_more_than_larger_ones_is_measured(experts: str) -> None:
    given = step(1, experts)
    sizes = [
        fp8_experts(replace(given, tokens=tokens)).peak
        for tokens in (128, 256, 512, 513, 1024, 8192)
    ]
    assert sizes == sorted(sizes)
    assert fp8_peak_tokens(given.options) == (
        (MASKED_TOKENS,) if experts == "deep_gemm_masked" else ()
    )


@pytest.mark.parametrize("element", [2, 4])
def test_our_kernels_hold_sorted_rows_where_the_hopper_kernel_runs(element: int) -> None:
    """Activations have 16 bits. V3's 8192 tokens fill up to 122,496 rows in tiles of 192: gathered
    rows and gated results.
    """
    there = replace(step(8192, "triton", element), compute=90)
    found, elsewhere = fp8_experts(there), fp8_experts(replace(there, compute=80))
    if element == 4:
        assert found == elsewhere
        return
    rows = (8192 * 9 + 257 * 191) // 192 * 192
    wanted = rows * (7168 * (1 + 4 / 128) + 2048 * 2)
    assert 0 <= found.peak - wanted < 2 * MIB and found.result == elsewhere.result
    assert found.peak < elsewhere.peak
    sizes = [
        fp8_experts(replace(there, tokens=tokens)).peak
        for tokens in (128, 512, 1142, 1143, 2048, 8192)
    ]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("experts", "peaks"), [("auto", ()), ("deep_gemm_masked", (MASKED_TOKENS,))]
)
def test_the_plan_lists_the_steps_of_peak_memory(
    experts: str, peaks: tuple[int, ...], tmp_path: Path
) -> None:
    plan = planned(
        written(tmp_path, "deepseek-v3", 4),
        plugins_of_the_card(),
        context_length=4096,
        quantization={"use": "block_fp8", "experts": experts},
    )
    assert plan.sizes.peak_tokens == peaks


def test_peak_steps_run_before_the_pool_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        warmup, "_run_chunks", lambda runner, plan, lengths, cached: seen.append(int(lengths.sum()))
    )
    plan = bare_plan(peak_tokens=(24, 100), pass_tokens=(8, 16, 32))
    runner: Any = None
    warmup.most_tokens(runner, plan)
    assert seen[2:] == [24], "no step of more tokens than the largest"
    seen.clear()
    warmup.most_passed(runner, plan)
    assert seen == [32, 16], "the largest pass, and the largest within a peak"
    seen.clear()
    warmup.most_passed(runner, bare_plan(peak_tokens=(24,)))
    assert not seen


@pytest.mark.parametrize(
    ("width", "peaks", "rows"),
    [(1, (), [16]), (1, (8,), [16, 8]), (2, (19,), [16, 8]), (1, (400,), [16]), (2, (1,), [16])],
)
def test_captured_peak_steps_run_before_the_pool_is_made(
    width: int, peaks: tuple[int, ...], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch size whose tokens, drafts included, are within a peak may take more of the graphs'
    pool than the largest batch.
    """
    seen: list[int] = []
    monkeypatch.setattr(warmup, "_decoding", lambda plan, rows, length: rows)
    monkeypatch.setattr(warmup, "_run_joined", lambda runner, batch, params: seen.append(batch))
    runner: Any = None
    warmup.most_captured(runner, bare_plan(width=width, peak_tokens=peaks), [16, 8, 1])
    assert list(dict.fromkeys(seen)) == rows and len(seen) == len(rows) * len(warmup.SAMPLING_MODES)

"""What routed experts hold on a CUDA device beside their input. No torch.

The byte budget's view of ``dense_cuda``, ``block_fp8_cuda`` and ``w8a8_int8_cuda``.
"""
from __future__ import annotations

from glowplug.core.memory.work import SHOWN, ExpertsStep, Work, tiled_rows

GROUP = 128  #: numbers with one scale
CAST = 1 + SHOWN / GROUP  #: bytes of a number as FP8 products read it, its scale's share among them
TILE = 128  #: rows that one expert's are filled up to where tensor cores are what takes time
#: rows an expert gets on average from which sorting them for DeepGEMM pays (H200: 3.34 against 3.41 ms at 36)
LEAST_LOAD = 35
#: rows an expert gets on average above which dense experts have tiles of so many (the tables of ``moe_experts``)
TILE_LOADS = {TILE: 59, TILE // 2: 29}
LARGE_LOAD = 128  #: from which the shared expert is computed apart, as the tables of ``moe_experts`` have it
DEEP_GEMM = ("sgl-deep-gemm", "deep-gemm")  #: packages that bring it


def dense_experts(step: ExpertsStep) -> Work:
    """Gated rows in order of experts, with the places that tiles leave empty; the shared expert's behind them, or
    before all of that its gates, ups and their product, for which one row of results is left."""
    routed, experts = step.tokens * (step.chosen - step.shared), step.count - step.shared
    if step.shared and routed >= LARGE_LOAD * experts:
        outer, out = (step.tokens * rows * step.hidden * step.element for rows in (step.chosen - step.shared + 1, 1))
        apart = 3 * step.tokens * step.shared * step.inter * step.element
        rows = tiled_rows(routed, experts, TILE)
        most = outer + max(apart, rows * (step.inter * step.element + SHOWN))
        return Work(most, outer) if step.parts else Work(max(most, outer + out), out)
    tile = next((tile for tile in (TILE, TILE // 2) if routed > TILE_LOADS[tile] * experts), TILE // 4)
    rows = tiled_rows(routed, experts, tile)
    return step.summed(0, (rows + step.tokens * step.shared) * step.inter * step.element + rows * SHOWN)


def fp8_experts(step: ExpertsStep) -> Work:
    """By DeepGEMM's grouped product where experts get many rows each, else by our own."""
    if grouped_pays(step.options.experts, step.tokens, step.chosen, step.count) and any(
            step.packages.get(name) for name in DEEP_GEMM):
        return _grouped(step)
    return step.summed(0, int(step.pairs * step.inter * (2 * step.element + CAST)))


def int8_experts(step: ExpertsStep) -> Work:
    """Gated rows, and the same as the second product reads them."""
    return step.summed(0, step.pairs * step.inter * (step.element + 1))


def grouped_pays(wanted: str, tokens: int, chosen: int, experts: int) -> bool:
    """Does the option's ``wanted`` give such a step to DeepGEMM's grouped product, where there is one?"""
    if wanted == "auto":
        return tokens * chosen >= LEAST_LOAD * experts
    return wanted == "deep_gemm"


def _grouped(step: ExpertsStep) -> Work:
    """See ``fp8_grouped.Grouped.experts``: rows in order of experts, filled up; gate and up; their product; results."""
    rows = tiled_rows(step.pairs, step.count, TILE)
    given, both, inner, outer = (int(rows * size) for size in (
        step.hidden * CAST, 2 * step.inter * step.element, step.inter * CAST, step.hidden * step.element))
    out = step.tokens * step.hidden * step.element
    kept = (step.pairs + 3 * rows) * SHOWN  # places, and who is whose
    most = max(given + both, both + inner, inner + outer, outer + out)
    return Work(kept + most, out, given + both + inner + outer + out - most)

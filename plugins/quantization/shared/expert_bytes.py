"""Bytes that routed experts allocate on a CUDA device beside their input. No torch.

These are the byte budget's figures for ``dense.experts_cuda``, ``block_fp8.cuda`` and
``int8.cuda``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from glowplug.core.plugin.byte_costs import NUMBER_BYTES, ExpertsStep, MemoryUse, tiled_rows
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.cards import HOPPER
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import tiles as moe_tiles
from glowplug.kernels.moe.fp8 import tiles as moe_fp8_tiles

GROUP = 128  #: consecutive elements that share one scale
#: bytes of a quantised activation with its share of a scale
FP8_NUMBER_BYTES = 1 + NUMBER_BYTES / GROUP
DEEP_GEMM_TILE = 128  #: multiple to which each expert's rows are padded for DeepGEMM
#: average rows per expert from which sorting them for DeepGEMM pays (H200: 3.34 against 3.41 ms at
#: 36)
GROUPED_LOAD_MIN = 35
DEEP_GEMM = ("sgl-deep-gemm", "deep-gemm")  #: distributions that install DeepGEMM
#: most tokens of a step in DeepGEMM's masked layout, in which every expert has rows for all tokens
MASKED_TOKENS = 512
LIBRARY_RESULT_BYTES = 2  #: bytes of an element of the libraries' results
#: bytes of CUTLASS's descriptors: two for each SM and operand, and those of the results
CUTLASS_WORKSPACE = 1 << 17
CUTLASS_LAYOUT_INTS = 5  #: int32 numbers that describe the layout of one group's scales


def dense_experts(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of dense experts in steps of up to ``step.tokens`` tokens.

    Smaller steps count too, because the tuned table may give them a configuration that needs more
    memory.
    """
    problem = moe_tiles.ExpertsProblem(step.count, step.chosen, step.hidden, step.inter, step.dtype)
    machine = (step.card or "cpu", step.packages.get("triton", ""))
    measured = tuned_tables.table(problem.table_on(machine)) or {}
    works = [
        _dense(replace(step, tokens=tokens), moe_tiles.pick(problem, tokens, measured)["up"])
        for tokens in _peak_tokens(measured, step.tokens)
    ]
    return MemoryUse(max(work.peak for work in works), max(work.result for work in works))


def _peak_tokens(measured: Iterable[int], tokens: int) -> set[int]:
    """Return the token counts at which memory may peak, up to ``tokens``.

    Each row of the tuned table applies to a range of token counts. The result has the largest
    count of each range, if below ``tokens``, and ``tokens`` itself. ``measured``: the token counts
    of the table's rows, ascending.
    """
    return {
        tokens,
        *(last for row, after in pairwise(measured) if (last := (row + after - 1) // 2) < tokens),
    }


def _dense(step: ExpertsStep, up: Config) -> MemoryUse:
    """Return the memory use of ``kernels.moe.experts``; ``up`` configures the first GEMM.

    Most of the memory is that of the gated rows, the results of the first GEMM. With ``up["way"]``
    "hopper" or "sorted" they are stored in expert order and padded to whole tiles; otherwise they
    are stored per token. A shared expert with wide tiles of its own adds its gated rows.

    A shared expert that runs as dense GEMMs (``up["apart"]``) adds one result row per token. Its
    gate and up results and their gated product are released before the gated rows are allocated.
    """
    routed = step.tokens * (step.chosen - step.fused_shared)
    experts = step.count - step.fused_shared
    if up["way"] == "hopper" and up["apart"] and step.fused_shared:
        outer, out = (
            step.tokens * rows * step.hidden * step.element
            for rows in (step.chosen - step.fused_shared + 1, 1)
        )
        dense = 3 * step.tokens * step.fused_shared * step.inter * step.element
        rows = tiled_rows(routed, experts, up["block_m"])
        most = outer + max(dense, rows * (step.inter * step.element + NUMBER_BYTES))
        return MemoryUse(most, outer) if step.parts else MemoryUse(max(most, outer + out), out)
    places = step.pairs
    beside = step.tokens * step.fused_shared
    if up["way"] in ("hopper", "sorted"):
        wide = moe_tiles.fused_shared_has_own_tiles(up, step.tokens)
        places = tiled_rows(
            *((routed, experts) if wide else (step.pairs, step.count)), up["block_m"]
        )
        beside = beside if wide else 0
    return step.with_expert_rows(
        0, (places + beside) * step.inter * step.element + places * NUMBER_BYTES
    )


def fp8_experts(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of experts in block FP8, by the provider that computes the step.

    The provider is the library that ``quantization.experts`` names, DeepGEMM's grouped GEMM where
    experts get many rows each, or our own kernels.
    """
    wanted = provider_for_dtype(step.options.experts, step.element)
    if wanted == "cutlass":
        return _cutlass(step)
    if wanted == "deep_gemm_masked":
        masked = _masked(replace(step, tokens=min(step.tokens, MASKED_TOKENS)))
        return masked if step.tokens <= MASKED_TOKENS else _maximum(_by_load(step, "auto"), masked)
    return _by_load(step, wanted)


def provider_for_dtype(wanted: str, element: int) -> str:
    """Return the provider setting that applies to activations of ``element`` bytes each.

    This is ``wanted``, the value of ``quantization.experts``, except that "auto" becomes "triton"
    for activations of more than 16 bits: the libraries that "auto" may choose have only 16-bit
    results.
    """
    return "triton" if wanted == "auto" and element > LIBRARY_RESULT_BYTES else wanted


def _maximum(work: MemoryUse, other: MemoryUse) -> MemoryUse:
    """Return a memory use that covers either of two: the larger value of each field."""
    return MemoryUse(
        max(work.peak, other.peak),
        max(work.result, other.result),
        max(work.fragmentation, other.fragmentation),
    )


def _by_load(step: ExpertsStep, wanted: str) -> MemoryUse:
    """Return the memory use of DeepGEMM's grouped GEMM if it pays, else of our own kernels."""
    if grouped_pays(wanted, step.tokens, step.chosen, step.count) and any(
        step.packages.get(name) for name in DEEP_GEMM
    ):
        return _grouped(step)
    inter = -(-step.inter // GROUP) * GROUP
    has_hopper = step.compute == HOPPER and moe_fp8_tiles.fits_hopper(step.hidden, step.element)
    config = moe_fp8_tiles.fp8_experts_config(
        step.tokens,
        step.chosen,
        step.count,
        inter,
        step.hidden,
        has_hopper,
        (step.card or "cpu", step.packages.get("triton", "")),
    )
    if moe_fp8_tiles.on_hopper(config):
        return _on_hopper(step, config["BLOCK_M"])
    return step.with_expert_rows(0, int(step.pairs * inter * (2 * step.element + FP8_NUMBER_BYTES)))


def _on_hopper(step: ExpertsStep, tile: int) -> MemoryUse:
    """Return the memory use of our warp-specialised FP8 kernel with tiles of ``tile`` rows.

    The step holds, in expert order: the input rows, the gated rows, the gated rows in FP8 and the
    results.
    """
    rows = tiled_rows(step.pairs, step.count, tile)
    given, hidden, inner = (
        int(rows * size)
        for size in (
            step.hidden * FP8_NUMBER_BYTES,
            step.inter * step.element,
            step.inter * FP8_NUMBER_BYTES,
        )
    )
    kept = (step.pairs + rows + rows // tile) * NUMBER_BYTES
    return step.with_expert_rows(kept + max(given + hidden, hidden + inner), kept + inner)


def int8_experts(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of experts in int8: the gated rows, and the same rows quantised."""
    return step.with_expert_rows(0, step.pairs * step.inter * (step.element + 1))


def grouped_pays(wanted: str, tokens: int, chosen: int, experts: int) -> bool:
    """Return True if a step should run DeepGEMM's grouped GEMM, supposing it is installed.

    Args:
        wanted: value of ``quantization.experts``.
        tokens: number of tokens of the step.
        chosen: number of experts per token.
        experts: number of experts held on the rank.
    """
    if wanted == "auto":
        return tokens * chosen >= GROUPED_LOAD_MIN * experts
    return wanted == "deep_gemm"


def masked_rows(tokens: int) -> int:
    """Return the number of rows of each expert in DeepGEMM's masked layout.

    This is ``tokens``, rounded up to whole tiles.
    """
    return -(-tokens // DEEP_GEMM_TILE) * DEEP_GEMM_TILE


def _grouped(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of ``block_fp8.grouped.Grouped.experts``."""
    rows = tiled_rows(step.pairs, step.count, DEEP_GEMM_TILE)
    maps = (step.pairs + 3 * rows) * NUMBER_BYTES  # row of each pair; pair and expert of each row
    return _library(step, rows, maps, step.element)


def _masked(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of ``block_fp8.masked.Masked.experts``."""
    return _library(
        step,
        step.count * masked_rows(step.tokens),
        (step.pairs + step.count) * NUMBER_BYTES,
        LIBRARY_RESULT_BYTES,
    )


def _cutlass(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of ``block_fp8.cutlass.CutlassExperts.experts``.

    Besides activations this counts the arrays passed to the library. Each expert has the number of
    its first row and three strides in them. For each of the two GEMMs it also has three sizes, the
    library's copy of these sizes, five pointers and two layouts.
    """
    layouts = 2 * CUTLASS_LAYOUT_INTS * NUMBER_BYTES
    per_expert = (
        (1 + 6) * NUMBER_BYTES + 3 * 2 * NUMBER_BYTES + (5 + 3) * 2 * NUMBER_BYTES + layouts
    )
    return _library(
        step,
        step.pairs,
        step.pairs * NUMBER_BYTES + step.count * per_expert + CUTLASS_WORKSPACE,
        LIBRARY_RESULT_BYTES,
    )


def _library(step: ExpertsStep, rows: int, kept: int, element: int) -> MemoryUse:
    """Return the memory use of a library's grouped GEMMs over rows in expert order.

    The step holds, in turn: input rows, gate and up results, gated rows and results.

    Args:
        step: the step.
        rows: number of rows in expert order.
        kept: bytes held throughout.
        element: bytes of an element of the GEMMs' results.
    """
    given, both, inner, outer = (
        int(rows * size)
        for size in (
            step.hidden * FP8_NUMBER_BYTES,
            2 * step.inter * element,
            step.inter * FP8_NUMBER_BYTES,
            step.hidden * element,
        )
    )
    out = step.tokens * step.hidden * step.element
    summed = out if step.element == element else out + step.tokens * step.hidden * element
    most = max(given + both, both + inner, inner + outer, outer + summed)
    return MemoryUse(kept + most, out, given + both + inner + outer + out - most)

"""What routed experts hold on a CUDA device beside their input. No torch.

The byte budget's view of ``dense_cuda``, ``block_fp8_cuda`` and ``w8a8_int8_cuda``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from glowplug.core.plugin.byte_costs import SHOWN, ExpertsStep, Work, tiled_rows
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.cards import HOPPER
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import tiles as moe_tiles
from glowplug.kernels.moe.fp8 import tiles as moe_fp8_tiles

if TYPE_CHECKING:
    from glowplug.plugins.quantization.block_fp8.plugin import BlockFp8Options

GROUP = 128  #: numbers with one scale
CAST = 1 + SHOWN / GROUP  #: bytes of a number as FP8 products read it, its scale's share among them
TILE = 128  #: rows that one expert's are filled up to for DeepGEMM
#: rows an expert gets on average from which sorting them for DeepGEMM pays (H200: 3.34 against 3.41
#: ms at 36)
LEAST_LOAD = 35
DEEP_GEMM = ("sgl-deep-gemm", "deep-gemm")  #: packages that bring it
#: of the largest steps in DeepGEMM's masked layout, where every expert has rows for all of them
MASKED_TOKENS = 512
HALF = 2  #: bytes of a number of the libraries' results
CUTLASS_WORKSPACE = (
    1 << 17
)  #: two descriptors for each processor and operand, and for those of results
LAYOUT = 5  #: int32 numbers that say how a group's scales lie


def dense_experts(step: ExpertsStep) -> Work:
    """What a step of as many tokens holds at most, or of fewer, which a table may serve in a way
    that holds more.
    """
    problem = moe_tiles.Problem(step.count, step.chosen, step.hidden, step.inter, step.dtype)
    machine = (step.card or "cpu", step.packages.get("triton", ""))
    measured = tuned.table(problem.table_on(machine)) or {}
    works = [
        _dense(replace(step, tokens=tokens), moe_tiles.pick(problem, tokens, measured)["up"])
        for tokens in _turns(measured, step.tokens)
    ]
    return Work(max(work.most for work in works), max(work.left for work in works))


def _turns(measured: Iterable[int], tokens: int) -> set[int]:
    """``tokens``, and the largest numbers below that the table's rows serve."""
    return {
        tokens,
        *(last for row, after in pairwise(measured) if (last := (row + after - 1) // 2) < tokens),
    }


def _dense(step: ExpertsStep, up: Config) -> Work:
    """Of ``moe_experts`` with this configuration of the first product: gated rows, in order of
    experts with the places that tiles leave empty, or of each token; where everybody's experts have
    tiles of their own, theirs behind. Where these are dense products, their gates, ups and product
    come before all that, and one row of results is left.
    """
    routed = step.tokens * (step.chosen - step.shared)
    experts = step.count - step.shared
    if up["way"] == "hopper" and up["apart"] and step.shared:
        outer, out = (
            step.tokens * rows * step.hidden * step.element
            for rows in (step.chosen - step.shared + 1, 1)
        )
        apart = 3 * step.tokens * step.shared * step.inter * step.element
        rows = tiled_rows(routed, experts, up["block_m"])
        most = outer + max(apart, rows * (step.inter * step.element + SHOWN))
        return Work(most, outer) if step.parts else Work(max(most, outer + out), out)
    places = step.pairs
    beside = step.tokens * step.shared
    if up["way"] in ("hopper", "sorted"):
        wide = moe_tiles.has_wide_tiles(up, step.tokens)
        places = tiled_rows(
            *((routed, experts) if wide else (step.pairs, step.count)), up["block_m"]
        )
        beside = beside if wide else 0
    return step.summed(0, (places + beside) * step.inter * step.element + places * SHOWN)


def fp8_experts(step: ExpertsStep) -> Work:
    """By the library that is named, DeepGEMM's grouped product where experts get many rows each, or
    our own.
    """
    wanted = by_dtype(step.options.experts, step.element)
    if wanted == "cutlass":
        return _packed(step)
    if wanted == "deep_gemm_masked":
        masked = _masked(replace(step, tokens=min(step.tokens, MASKED_TOKENS)))
        return masked if step.tokens <= MASKED_TOKENS else _more(_by_load(step, "auto"), masked)
    return _by_load(step, wanted)


def by_dtype(wanted: str, element: int) -> str:
    """``quantization.experts`` for activations of ``element`` bytes a number: whom auto may choose
    makes 16 bits.
    """
    return "triton" if wanted == "auto" and element > HALF else wanted


def fp8_turns(options: BlockFp8Options) -> tuple[int, ...]:
    """Larger steps than those in the masked layout have rows for the pairs that there are."""
    return (MASKED_TOKENS,) if options.experts == "deep_gemm_masked" else ()


def _more(work: Work, other: Work) -> Work:
    """Of ``work``, where a smaller step may be the ``other``."""
    return Work(
        max(work.most, other.most), max(work.left, other.left), max(work.extra, other.extra)
    )


def _by_load(step: ExpertsStep, wanted: str) -> Work:
    if grouped_pays(wanted, step.tokens, step.chosen, step.count) and any(
        step.packages.get(name) for name in DEEP_GEMM
    ):
        return _grouped(step)
    inter = -(-step.inter // GROUP) * GROUP
    has_hopper = step.compute == HOPPER and moe_fp8_tiles.fits_hopper(step.hidden, step.element)
    config = moe_fp8_tiles.config_for(
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
    return step.summed(0, int(step.pairs * inter * (2 * step.element + CAST)))


def _on_hopper(step: ExpertsStep, tile: int) -> Work:
    """See ``moe_gemm_fp8_hopper``: rows in order of experts, what is gated, the same as FP8,
    results.
    """
    rows = tiled_rows(step.pairs, step.count, tile)
    given, hidden, inner = (
        int(rows * size)
        for size in (step.hidden * CAST, step.inter * step.element, step.inter * CAST)
    )
    kept = (step.pairs + rows + rows // tile) * SHOWN
    return step.summed(kept + max(given + hidden, hidden + inner), kept + inner)


def int8_experts(step: ExpertsStep) -> Work:
    """Gated rows, and the same as the second product reads them."""
    return step.summed(0, step.pairs * step.inter * (step.element + 1))


def grouped_pays(wanted: str, tokens: int, chosen: int, experts: int) -> bool:
    """Does the option's ``wanted`` give such a step to DeepGEMM's grouped product, where there is
    one?
    """
    if wanted == "auto":
        return tokens * chosen >= LEAST_LOAD * experts
    return wanted == "deep_gemm"


def masked_rows(tokens: int) -> int:
    """Rows of every expert in DeepGEMM's masked layout: each token's, filled up to whole tiles."""
    return -(-tokens // TILE) * TILE


def _grouped(step: ExpertsStep) -> Work:
    """See ``fp8_grouped.Grouped.experts``."""
    rows = tiled_rows(step.pairs, step.count, TILE)
    return _in_order(
        step, rows, (step.pairs + 3 * rows) * SHOWN, step.element
    )  # places, and who is whose


def _masked(step: ExpertsStep) -> Work:
    """See ``fp8_masked.Masked.experts``."""
    return _in_order(
        step, step.count * masked_rows(step.tokens), (step.pairs + step.count) * SHOWN, HALF
    )


def _packed(step: ExpertsStep) -> Work:
    """See ``fp8_cutlass.Cutlass.experts``: an expert has a start, two problems of three numbers and
    three strides, and in a product five pointers, two layouts and, within the library, another
    problem."""
    told = (1 + 6) * SHOWN + 3 * 2 * SHOWN + (5 + 3) * 2 * SHOWN + 2 * LAYOUT * SHOWN
    return _in_order(
        step, step.pairs, step.pairs * SHOWN + step.count * told + CUTLASS_WORKSPACE, HALF
    )


def _in_order(step: ExpertsStep, rows: int, kept: int, element: int) -> Work:
    """Rows in order of experts; gate and up; their product; results. ``element``: bytes of the
    products' results.
    """
    given, both, inner, outer = (
        int(rows * size)
        for size in (
            step.hidden * CAST,
            2 * step.inter * element,
            step.inter * CAST,
            step.hidden * element,
        )
    )
    out = step.tokens * step.hidden * step.element
    summed = out if step.element == element else out + step.tokens * step.hidden * element
    most = max(given + both, both + inner, inner + outer, outer + summed)
    return Work(kept + most, out, given + both + inner + outer + out - most)

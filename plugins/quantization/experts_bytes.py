"""What routed experts hold on a CUDA device beside their input. No torch.

The byte budget's view of ``dense_cuda``, ``block_fp8_cuda`` and ``w8a8_int8_cuda``.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from glowplug.core.memory.work import SHOWN, ExpertsStep, Work, tiled_rows
from glowplug.kernels.triton import moe_tiles, tuned
from glowplug.kernels.triton.tuned import Config

GROUP = 128  #: numbers with one scale
CAST = 1 + SHOWN / GROUP  #: bytes of a number as FP8 products read it, its scale's share among them
TILE = 128  #: rows that one expert's are filled up to for DeepGEMM
#: rows an expert gets on average from which sorting them for DeepGEMM pays (H200: 3.34 against 3.41 ms at 36)
LEAST_LOAD = 35
DEEP_GEMM = ("sgl-deep-gemm", "deep-gemm")  #: packages that bring it


def dense_experts(step: ExpertsStep) -> Work:
    """What a step of as many tokens holds at most, or of fewer, which a table may serve in a way that holds more."""
    problem = moe_tiles.Problem(step.count, step.chosen, step.hidden, step.inter, step.dtype)
    machine = (step.card or "cpu", step.packages.get("triton", ""))
    measured = tuned.table(problem.table_on(machine)) or {}
    works = [_dense(replace(step, tokens=tokens), moe_tiles.pick(problem, tokens, measured)["up"])
             for tokens in _turns(measured, step.tokens)]
    return Work(max(work.most for work in works), max(work.left for work in works))


def _turns(measured: Iterable[int], tokens: int) -> set[int]:
    """``tokens``, and the largest numbers below that the table's rows serve."""
    return {tokens, *(last for row, after in pairwise(measured) if (last := (row + after - 1) // 2) < tokens)}


def _dense(step: ExpertsStep, up: Config) -> Work:
    """Of ``moe_experts`` with this configuration of the first product: gated rows, in order of experts with the places
    that tiles leave empty, or of each token; where everybody's experts have tiles of their own, theirs behind. Where
    these are dense products, their gates, ups and product come before all that, and one row of results is left.
    """
    routed, experts = step.tokens * (step.chosen - step.shared), step.count - step.shared
    if up["way"] == "hopper" and up["apart"] and step.shared:
        outer, out = (step.tokens * rows * step.hidden * step.element for rows in (step.chosen - step.shared + 1, 1))
        apart = 3 * step.tokens * step.shared * step.inter * step.element
        rows = tiled_rows(routed, experts, up["block_m"])
        most = outer + max(apart, rows * (step.inter * step.element + SHOWN))
        return Work(most, outer) if step.parts else Work(max(most, outer + out), out)
    places, beside = step.pairs, step.tokens * step.shared
    if up["way"] in ("hopper", "sorted"):
        wide = moe_tiles.has_wide_tiles(up, step.tokens)
        places = tiled_rows(*((routed, experts) if wide else (step.pairs, step.count)), up["block_m"])
        beside = beside if wide else 0
    return step.summed(0, (places + beside) * step.inter * step.element + places * SHOWN)


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

"""A kernel replayed from a graph with other inputs, into poisoned memory, against the reference of
those inputs.

A kernel that keeps a value from the capture, leaves out a row or reads memory that was never
written gives another result. 16-bit results have to be within 1% of the float64 reference, FP8
GEMMs within 1.2 times the error of rounding to FP8 itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BF16, ERROR, FP8_ERROR = torch.bfloat16, 1e-2, 1.2
NAN = float("nan")
Results = Tensor | tuple[Tensor, ...]


@dataclass
class Case:
    """One kernel under test.

    Attributes:
        inputs: Tensors that a replay overwrites.
        run: Computes the results from the inputs.
        want: Computes float64 references.
        within: Permitted error of a result relative to the reference's norm; ``ERROR`` by default.
        read: The part of the results that is compared.
    """

    inputs: Sequence[Tensor]
    run: Callable[[], Results]
    want: Callable[[], Results]
    within: Callable[[], float | Sequence[float]] = lambda: ERROR
    read: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda results: results


def several(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def distance(got: Tensor, want: Tensor) -> float:
    """Return the relative distance of the norms; infinite where a result is not finite."""
    assert got.shape == want.shape
    off = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    return off if off == off else float("inf")


def check(made: Callable[[int], Case]) -> None:
    case = made(0)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = several(case.run())
    for seed in (0, 1, 2):
        for held, fresh in zip(case.inputs, made(seed).inputs, strict=True):
            held.copy_(fresh)
        for result in results:
            result.copy_(torch.full(result.shape, NAN if result.is_floating_point() else -7))
        graph.replay()
        wanted, within = several(case.want()), case.within()
        bounds = [within] * len(wanted) if isinstance(within, float) else within
        for number, (got, want, bound) in enumerate(
            zip(case.read(results), wanted, bounds, strict=True)
        ):
            assert distance(got, want) <= bound, f"result {number} at replay {seed}"


def randn(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)

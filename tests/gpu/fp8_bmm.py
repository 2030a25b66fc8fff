"""Speed and error of MLA's absorbed GEMMs (W_UK's and W_UV's) with weights in bfloat16 and in
FP8.

``python -m tests.gpu.fp8_bmm --output docs/benchmarks/fp8-bmm-h200.json``, on one GPU. Methods:
cuBLAS's batched GEMM and this project's kernel in bfloat16; this project's kernel over E4M3 blocks;
and where sgl_kernel is installed its ``bmm_fp8``, which takes E4M3 activations too, one scale a
tensor (casts of activations are not counted). Times are those of a graph that reads the weights of
as many layers as exceed the second-level cache. Errors are relative to the float64 result with the
unrounded weights, which for a published FP8 checkpoint are the E4M3 blocks themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glowplug.kernels.formats import fp8
from glowplug.kernels.formats.fp8 import Blocks
from glowplug.kernels.mla import absorbed_fp8 as mla_absorbed_fp8, head_gemms

NOPE, VALUE, LORA = 128, 128, 512
COLD = 256 << 20  #: bytes of weights that a graph reads
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPLAYS = 5
MOST = 64  #: largest number of tokens for this project's few-row kernels
LIBRARY = "fp8 x fp8 library"
#: columns and warps of a program of the kernel for stored blocks
CUTS = {
    "W_UK": ((64, 4), (128, 4), (128, 8)),
    "W_UV": ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8)),
}
Work = Callable[[int], None]  #: the GEMM of one layer


class Products:
    """One GEMM of every layer: x [T, H, K] times weight [H, K, N]."""

    def __init__(self, tokens: int, heads: int, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.tokens, self.heads, self.kind = tokens, heads, kind
        size, columns = (NOPE, LORA) if kind == "W_UK" else (LORA, VALUE)
        count = -(-COLD // (heads * size * columns))
        both = torch.randn(heads * (NOPE + VALUE), LORA, device="cuda") * LORA**-0.5
        values, scales = fp8.quantize_weight(both)
        self.blocks = [self._view(values.clone(), scales) for _ in range(count)]
        dense = fp8.dequantize_weight(values, scales, torch.bfloat16)
        self.dense = [
            self._part(dense.clone().view(heads, NOPE + VALUE, LORA))
            for _ in range(max(2, count // 2))
        ]
        self.exact = self._part(both.view(heads, NOPE + VALUE, LORA)).double()
        self.stored = fp8.dequantize_weight(*self.blocks[0], torch.float64)
        self.x = torch.randn(tokens, heads, size, device="cuda").bfloat16()
        self.out = torch.empty(tokens, heads, columns, device="cuda", dtype=torch.bfloat16)
        self.results: dict[str, Tensor] = {}  #: results of methods with an output of their own

    def _part(self, weight: Tensor) -> Tensor:
        return weight[:, :NOPE] if self.kind == "W_UK" else weight[:, NOPE:].transpose(1, 2)

    def _view(self, values: Tensor, scales: Tensor) -> Blocks:
        values, scales = values.view(self.heads, -1, LORA), scales.view(self.heads, -1, LORA // 128)
        if self.kind == "W_UK":
            return Blocks(values[:, :NOPE], scales[:, : NOPE // 128])
        return Blocks(values[:, NOPE:].transpose(1, 2), scales[:, NOPE // 128 :].transpose(1, 2))

    # ---- methods ---------------------------------------------------------------------------------

    def ways(self) -> dict[str, Work]:
        found: dict[str, Work] = {"bf16 cublas": self._cublas}
        if self.tokens <= MOST:
            for width in (64,) if self.kind == "W_UK" else (32, 64):
                found[f"bf16 kernel {width}"] = lambda layer, width=width: self._kernel(
                    layer, width
                )  # type: ignore[misc]
            for width, warps in CUTS[self.kind]:
                found[f"fp8 kernel {width} {warps}"] = lambda layer, width=width, warps=warps: (
                    mla_absorbed_fp8.multiply(  # type: ignore[misc]
                        self.x, self.blocks[layer % len(self.blocks)], self.out, width, warps, True
                    )
                )
        try:
            from sgl_kernel import bmm_fp8
        except ImportError:
            return found
        x, x_scale = rounded(self.x.transpose(0, 1).contiguous())
        weight, w_scale = rounded(self.exact.transpose(1, 2).contiguous())
        weights = [weight.clone().transpose(1, 2) for _ in self.blocks]
        out = torch.empty(
            self.heads, self.tokens, self.out.shape[2], device="cuda", dtype=torch.bfloat16
        )

        def library(layer: int) -> None:
            bmm_fp8(x, weights[layer % len(weights)], x_scale, w_scale, out.dtype, out)

        self.results[LIBRARY] = out.transpose(0, 1)
        found[LIBRARY] = library
        return found

    def _cublas(self, layer: int) -> None:
        torch.bmm(
            self.x.transpose(0, 1),
            self.dense[layer % len(self.dense)],
            out=self.out.transpose(0, 1),
        )

    def _kernel(self, layer: int, width: int) -> None:
        head_gemms.by_heads(self.x, self.dense[layer % len(self.dense)], self.out, width, True)

    def error(self, name: str, work: Work, of: Tensor) -> float:
        out = self.results.get(name, self.out)
        out.fill_(float("nan"))
        work(0)
        want = torch.einsum("thk,hkn->thn", self.x.double(), of)
        return float((out.double() - want).norm() / want.norm())


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 with one scale."""
    scale = x.abs().amax().float() / 448.0
    return (x / scale).to(torch.float8_e4m3fn), scale


def microseconds(work: Work, layers: int) -> float:
    """Return the time of one layer's GEMM: the fastest of a few replays of a graph of all
    layers.
    """
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            work(layer)
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / layers)
    return min(times)


def measure(tokens: int, heads: int, kind: str) -> dict[str, Any]:
    products, line = Products(tokens, heads, kind), {}
    layers = min(len(products.blocks), 128)
    for name, work in products.ways().items():
        try:
            found: dict[str, Any] = {"us": round(microseconds(work, layers), 2)}
        except Exception as error:
            line[name] = {"us": float("nan"), "failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        found["error_of_unrounded"] = float(f"{products.error(name, work, products.exact):.3g}")
        if name != LIBRARY:
            found["error_of_stored"] = float(f"{products.error(name, work, products.stored):.3g}")
        line[name] = found
    return {"product": kind, "heads": heads, "tokens": tokens, "ways": line}


def shown(line: dict[str, Any]) -> str:
    ways = ", ".join(f"{name} {found['us']:.1f}" for name, found in line["ways"].items())
    ways += "".join(
        f" {name}: {found['failed']}" for name, found in line["ways"].items() if "failed" in found
    )
    errors = {
        name.partition(" kernel")[0]: found["error_of_unrounded"]
        for name, found in line["ways"].items()
        if "failed" not in found
    }
    return f"{line['product']} H={line['heads']:3} T={line['tokens']:3}: {ways}; error {errors}"


def main() -> int:
    """Measure every method, and return the exit status: 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.gpu.fp8_bmm measures on a GPU, and there is none", file=sys.stderr)
        return 2
    from glowplug.entrypoints.bench.others.conditions import conditions

    lines = []
    for heads in options.heads:
        for kind in ("W_UK", "W_UV"):
            for tokens in options.tokens:
                lines.append(measure(tokens, heads, kind))
                print(shown(lines[-1]), flush=True)
    if options.output:
        said = conditions("cuda") | {
            "command": "python -m tests.gpu.fp8_bmm " + " ".join(sys.argv[1:]),
            "lines": lines,
        }
        options.output.write_text(json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

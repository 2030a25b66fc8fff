"""A script that finds the variants of kernels that a step launches, by its token counts, without a
GPU, and prints JSON.

Launches are recorded instead of executed: constants, dtypes, and Triton's specialisation of
integers and pointers. The output has the kernels with variants that steps of the warm-up and
captured ones do not reach, with token counts that do. The shapes are DeepSeek-V2-Lite's with the
tables of an H200, and V3's for the gate as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from glowplug.core.plan.plan import Sizes
from glowplug.core.startup.first_use.steps_between import counts_between
from glowplug.kernels.elementwise import norm
from glowplug.kernels.launch import dependent_launch as dependent, tuned_tables as tuned
from glowplug.kernels.mla import decode as mla_decode, decode_tiling, value_projection as mla_values
from glowplug.kernels.moe import experts as moe_experts, gemm_hopper as moe_gemm_hopper, route
from glowplug.plugins.graphs.cuda_graph import default_sizes

HIDDEN, EXPERTS, SHARED, TOPK, INTER, CONTEXT, PAGE = 2048, 64, 2, 6, 1408, 4096, 64
HEADS = 16, 128  #: V2-Lite's, V3's
V3 = (256, 7168)  #: experts and channels of its gate
BF16 = torch.bfloat16
Launches = defaultdict[str, dict[Any, list[int]]]


def specialised(value: object, param: Any) -> object:
    """Return the part of an argument that selects a variant."""
    if param.is_constexpr:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not param.do_not_specialize:
        return value == 1, value % 16 == 0, value < 2**31
    return type(value).__name__


def record(into: Launches, now: SimpleNamespace) -> None:
    def run(self: Any, *args: Any, **given: Any) -> None:
        given = {name: value for name, value in given.items() if name not in ("grid", "warmup")}
        bound = dict(zip([param.name for param in self.params], args)) | given
        key = tuple(
            (param.name, specialised(bound.get(param.name, param.default), param))
            for param in self.params
        )
        rest = tuple(
            sorted((name, repr(value)) for name, value in given.items() if name.startswith("num_"))
        )
        into[self.fn.__name__].setdefault((key, rest), []).append(now.count)

    def uncomputed(*given: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return given[0].new_empty(len(given[-2]), given[-1].shape[1]) if out is None else out

    JITFunction.run = run
    torch.mm = torch.addmm = uncomputed
    route._library_scores = lambda x, weight: torch.empty(len(x), len(weight))
    dependent.options = lambda: {"DEPENDENT": True, "launch_pdl": True}
    moe_gemm_hopper.processors = lambda device: 132
    tuned.device_name, tuned.triton_version = (lambda: "NVIDIA_H200"), (lambda: "3.6")


def cold(launches: Launches, warm: set[int]) -> dict[str, list[list[int]]]:
    found = {
        name: [counts[:8] for counts in variants.values() if not warm & set(counts)]
        for name, variants in launches.items()
    }
    return {name: counts for name, counts in found.items() if counts}


def token_launches(counts: list[int]) -> Launches:
    """Launch gate, experts and norms of steps with these token counts."""
    found, now = Launches(dict), SimpleNamespace(count=0)
    record(found, now)
    gates = [torch.empty(EXPERTS, HIDDEN, dtype=dtype) for dtype in (torch.float32, BF16)]
    of_v3, bias, ready = (
        torch.empty(V3, dtype=BF16),
        torch.empty(V3[0]),
        torch.zeros(2, dtype=torch.int32),
    )
    w13 = torch.empty(EXPERTS + SHARED, 2 * INTER, HIDDEN, dtype=BF16)
    w2 = torch.empty(EXPERTS + SHARED, HIDDEN, INTER, dtype=BF16)
    for now.count in counts:
        x = torch.empty(now.count, HIDDEN, dtype=BF16)
        early = moe_experts.begin(x, w13, TOPK + SHARED, SHARED, ready)
        for gate in gates:
            route.route(
                x, gate, None, TOPK, 1, 1, False, 1.0, SHARED, None if early is None else ready
            )
        route.route(torch.empty(now.count, V3[1], dtype=BF16), of_v3, bias, 8, 8, 4, True, 2.5, 1)
        ids = torch.empty(now.count, TOPK + SHARED, dtype=torch.int32)
        rows, named = moe_experts.products(
            x, w13, w2, ids, torch.empty(ids.shape), fused_shared=SHARED, early=early
        )
        norm.add_rms_norm(rows, x, x[0], 1e-6, named)
    return found


def row_launches(counts: list[int], heads: int) -> Launches:
    """Launch latent attention of these numbers of decoding rows, and W_UV's GEMM where it merges KV
    splits.
    """
    found, now = Launches(dict), SimpleNamespace(count=0)
    record(found, now)
    kv, scale = torch.empty(4 * PAGE, 576, dtype=BF16), 0.1
    w_uv = torch.empty(heads, 256, 512, dtype=BF16)[:, 128:].transpose(1, 2)
    for now.count in counts:
        query = torch.empty(now.count, heads, 576, dtype=BF16)
        table = torch.zeros(now.count, CONTEXT // PAGE, dtype=torch.int32)
        lens = torch.ones(now.count, dtype=torch.int32)
        cut = decode_tiling.mla_tiling(now.count, 1, heads, CONTEXT, BF16, BF16, True, True)
        step = query, kv, table, lens, scale, PAGE, 512, cut
        if cut.merge_in_values:
            out = query.new_empty(now.count, heads, 128)
            mla_values.merge_and_project(
                *mla_decode.decode_splits(*step), lens, w_uv, out, cut.block_n
            )
        else:
            mla_decode.mla_decode(*step)
    return found


def main() -> None:
    passes = (
        16,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        320,
        384,
        512,
        640,
        768,
        896,
        1024,
        1152,
        1280,
        1536,
    )
    sizes = Sizes(
        context_length=CONTEXT,
        max_running=256,
        max_queued=1024,
        max_step_tokens=8448,
        chunk_size=8192,
        page_size=PAGE,
        num_pages=4096,
        kv_bytes=0,
        pass_tokens=passes,
    )
    tried = counts_between(sizes)
    tokens = {tokens for _, tokens in tried} | {*passes, 13, 2048, 8192, 8447, 8448}
    rows = {rows for rows, _ in tried} | {rows for rows in default_sizes() if rows <= 256}
    every = [*range(passes[-1] + 1, 8449, 13), *range(2048, 8449, 128)]
    of_rows = {
        str(heads): cold(row_launches([*sorted(rows), *range(1, 257)], heads), rows)
        for heads in HEADS
    }
    print(
        json.dumps(
            {"tokens": cold(token_launches([*sorted(tokens), *every]), tokens), "rows": of_rows}
        )
    )


if __name__ == "__main__":
    main()

"""Time SGLang's all-reduce in CUDA graphs, with the communicator that its server would choose.

This script runs in SGLang's interpreter and imports nothing of glowplug.

    python sglang_all_reduce.py --ranks 2 --bytes 4096 8192

Each size is checked against a sum in float32, then timed as ``bench kernels --collectives`` does:
the median over rounds of the slowest rank's mean time of a call. Prints one line of JSON per size.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

CALLS_PER_GRAPH = 16  #: calls captured in one graph
ROUNDS = 5  #: timed replays
WARM_CALLS = 3  #: calls before a capture
ROW = 2048  #: numbers of a row; sizes are whole rows of bfloat16


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bytes", type=int, nargs="+", required=True)
    return parser.parse_args()


def main() -> None:
    """Start the ranks, and print rank 0's lines."""
    args = arguments()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    processes.spawn(run_rank, (args.ranks, args.bytes, port), nprocs=args.ranks)


def run_rank(rank: int, ranks: int, sizes: list[int], port: int) -> None:
    """Connect one rank with the others and measure every size."""
    here = Path(__file__).resolve().parent
    # SGLang must not import modules of this folder by their names.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    from sglang.srt.distributed import parallel_state

    torch.cuda.set_device(rank)
    parallel_state.init_distributed_environment(
        world_size=ranks,
        rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
        backend="nccl",
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    group = parallel_state.get_tp_group()
    for size in sizes:
        error = slowest(group, error_of(group, rank, ranks, size))
        seconds = measure(
            parallel_state, group, torch.zeros(rows_of(size), dtype=torch.bfloat16, device="cuda")
        )
        if rank == 0:
            line = {"bytes": size, "us": seconds * 1e6, "error": error}
            print(json.dumps(line), flush=True)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def rows_of(size: int) -> tuple[int, int]:
    """Return the shape of a tensor of ``size`` bytes."""
    columns = min(ROW, size // 2)
    return size // (2 * columns), columns


def error_of(group: Any, rank: int, ranks: int, size: int) -> float:
    """Return the largest difference from a sum in float32, relative to its largest number."""
    given = [
        torch.randn(rows_of(size), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        for seed in range(ranks)
    ]
    wanted = torch.stack([part.float() for part in given]).sum(0)
    found = group.all_reduce(given[rank].cuda()).float().cpu()
    return float((found - wanted).abs().max() / wanted.abs().max())


def measure(state: Any, group: Any, x: Tensor) -> float:
    """Return the seconds of one captured all-reduce of ``x``."""
    graph = torch.cuda.CUDAGraph()
    with state.graph_capture() as context:
        for _ in range(WARM_CALLS):
            group.all_reduce(x)
        torch.cuda.synchronize()
        dist.barrier(group.cpu_group)
        with torch.cuda.graph(graph, stream=context.stream, capture_error_mode="thread_local"):
            for _ in range(CALLS_PER_GRAPH):
                group.all_reduce(x)
    torch.cuda.synchronize()
    return statistics.median(timed(group, graph.replay) for _ in range(ROUNDS)) / CALLS_PER_GRAPH


def timed(group: Any, play: Callable[[], object]) -> float:
    """Return the seconds of one of two calls of ``play`` on the slowest rank.

    The first call lets the devices begin the timed one together.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group.cpu_group)
    play()
    start.record()
    play()
    end.record()
    end.synchronize()
    return slowest(group, start.elapsed_time(end) / 1e3)


def slowest(group: Any, value: float) -> float:
    """Return the largest ``value`` of any rank."""
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group.cpu_group)
    return float(most)


if __name__ == "__main__":
    main()

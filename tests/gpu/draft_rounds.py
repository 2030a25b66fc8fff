"""Milliseconds and graph launches of a step with drafts, with a round in one graph and pass by
pass.

``python -m tests.gpu.draft_rounds --model /models/v3slice --output x.json``, on one GPU. With
``--device cpu`` functions take the place of graphs, to try the program. An engine is started for
each way and number of passes. The milliseconds of a round and of all graphs of a step are those of
replays alone, and ``step_ms`` is that of decoding the batch, the host included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from glowplug import LLM
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.draft_settings import measure_drafts
from glowplug.plugins.graphs.capture.decode_graph import DecodeGraph
from glowplug.plugins.speculative.shared.draft_passes import DraftPasses

WAYS = {"one graph": True, "a graph for each pass": False}
PAGE = 64  #: at least the tokens of a page of any backend
REPLAYS = 50  #: replays whose median time is taken
TARGET = "forward"  #: piece of the target's pass; those of the drafts come before it
ACCEPT = "accept greedy"  #: piece of a greedy step after the target's pass


def engine(args: argparse.Namespace, steps: int) -> LLM:
    """Return an engine whose steps have chains of ``steps`` drafts, of which about half count."""
    most = max(args.batch)
    each = -(-(args.input_len + args.output_len + (steps + 1) * 2 + PAGE) // PAGE) * PAGE
    on_gpu = args.device == "cuda"
    return LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        weights={"use": args.weights},
        skip_tokenizer=True,
        benchmark=True,
        context_length=each,
        cache={"use": "none"},
        plugins=[] if on_gpu else ["tests.plugins.replaying"],
        scheduler={"max_running_requests": most, "overlap": on_gpu},
        memory={"kv_tokens": (most + 1) * each},
        graphs={
            "use": "cuda_graph" if on_gpu else "replaying",
            "batch_sizes": sorted(args.batch),
        },
        speculative={
            "use": args.algorithm,
            "adaptive": False,
            "steps": steps,
            "simulate_accept_rates": [0.5] * steps,
        },
    )


def timed(replays: list[Callable[[], None]]) -> float:
    """Return the median milliseconds of ``replays`` one after another, by the device's clock."""
    found = []
    for _ in range(REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for replay in replays:
            replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last))
    return round(statistics.median(found), 4)


def replays_of(graph: DecodeGraph) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
    """Return the replays of the drafts before the target's pass, and all those of a greedy step."""
    names = graph.pieces
    drafts = names[: names.index(TARGET)]
    pieces = {name: graph._graphs[name][0] for name in names}
    return [pieces[name] for name in drafts], [pieces[name] for name in (*drafts, TARGET, ACCEPT)]


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of passes, way and batch size."""
    rng = np.random.default_rng(0)
    for steps in args.steps:
        for way, one_piece in WAYS.items():
            with ExitStack() as stack:
                if not one_piece:
                    apart = mock.patch.object(DraftPasses, "_in_one_piece", lambda self: False)
                    stack.enter_context(apart)
                llm = stack.enter_context(engine(args, steps))
                for batch in args.batch:
                    prompts = rng.integers(2, args.vocabulary, (batch, args.input_len)).tolist()
                    yield {"steps": steps, "way": way, "batch": batch, **row(llm, prompts, args)}


def row(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of an engine that decodes ``prompts`` together."""
    executor: Any = llm._executor
    graphs = executor._engine.runner.graphs._decode_graphs[llm.plan.sizes.draft_shape]
    drafts, whole = replays_of(graphs[len(prompts)])
    launches: list[str] = []
    run = DecodeGraph.run

    def counted(graph: DecodeGraph, name: str, work: Callable[[], Any]) -> Any:
        launches.append(name)
        return run(graph, name, work)

    measure_drafts(llm, prompts, len(prompts), args.output_len, 1)  # first-use costs
    with mock.patch.object(DecodeGraph, "run", counted):
        speed = measure_drafts(llm, prompts, len(prompts), args.output_len, 1)
    found = {
        "launches_of_a_round": len(drafts),
        "launches_of_a_step": round(len(launches) / launches.count(TARGET), 2),
        "step_ms": round(1e3 * speed.step_seconds, 4),
    }
    if args.device == "cuda":  # functions depend on the host's plan of the last step
        with torch.inference_mode():
            found |= {"round_ms": timed(drafts), "graphs_ms": timed(whole)}
        passes = llm.plan.sizes.draft_shape.steps
        found["draft_pass_ms"] = round(found["round_ms"] / passes, 4)
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--algorithm", default="nextn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto", help="random: made-up weights")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(given)
    words = sys.argv[1:] if given is None else given
    about = {**conditions_apart(), "command": f"python -m tests.gpu.draft_rounds {' '.join(words)}"}
    rows = []
    for found in measure(args):  # the record has every row so far if the run is cut short
        rows.append(found)
        print(found, flush=True)
        args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

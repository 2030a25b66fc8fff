"""The speed of adaptive drafts while load and acceptance change, beside fixed sizes and none.

``python -m tests.support.draft_trace --model /models/v3slice --device cuda --output x.json``.
Acceptance is simulated. One engine runs all policies in turn, at each load of the trace: drafts of
one fixed size, none, and those that the engine chooses. ``none`` still writes the draft's cache
entries; ``--plain`` adds an engine without speculation, for a model that fits twice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import glowplug
from glowplug import LLM
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.step.draft_counts import rates_of_length
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from glowplug.entrypoints.bench.others.in_process import run_static_batch

PAGE = 64  #: at least the tokens of a page of any backend
ADAPTIVE = "adaptive"
PLAIN = "no speculation"


class Pinned:
    """The ``protocols.DraftPolicy`` that always chooses one size."""

    clocked = False

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def choose(self, rows: NDArray[np.int32], most: int) -> DraftShape:
        return self._shape

    def observe(self, rows: object, shape: object, counts: object) -> None:
        pass

    def took(self, rows: int, shape: object, seconds: float) -> None:
        pass

    def forget(self, row: int) -> None:
        pass


class Trace:
    """An engine whose policy and simulated acceptance can be changed between requests."""

    def __init__(self, args: argparse.Namespace) -> None:
        most = max(args.loads)
        each = args.input_len + args.output_len + PAGE
        context = 4 * -(-each // PAGE) * PAGE
        self.base: dict[str, Any] = {
            "device": args.device,
            "dtype": args.dtype,
            "weights": {"use": args.weights},
            "skip_tokenizer": True,
            "cache": {"use": "none"},
            "scheduler": {"max_running_requests": most},
            "memory": {"kv_tokens": max(most * -(-each // PAGE) * PAGE, 2 * context)},
            "context_length": context,
        }
        if args.device == "cuda":
            sizes = sorted(set(args.loads))
            self.base["graphs"] = {"use": "cuda_graph", "batch_sizes": sizes}
        self.llm = LLM(
            args.model,
            **self.base,
            benchmark=True,
            speculative={
                "use": args.algorithm,
                "steps": args.steps,
                "simulate_accept_rates": [0.5] * args.steps,
            },
        )
        executor: Any = self.llm._executor
        self._engine = executor._engine
        self._own = self._engine.scheduler.decodes.policy
        self.shapes = self.llm.plan.sizes.draft_shapes

    def accept(self, length: float) -> None:
        """Let verify steps gain ``length`` tokens on average."""
        self._engine.runner.sampler_rows.simulated.change(rates_of_length(length))

    def use(self, shape: DraftShape | None) -> None:
        """Use drafts of one size; None: those that the engine chooses."""
        policy = self._own if shape is None else Pinned(shape)
        self._engine.scheduler.decodes.policy = policy


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return rng.integers(2, vocabulary, (count, length)).tolist()


def run(llm: LLM, load: int, args: argparse.Namespace) -> dict[str, float]:
    """Return speed and drafts per row and step of ``load`` requests at a time.

    The speed is that of the steps in which all rows of a group gain tokens: as drafts are accepted
    at random, rows end at different steps, which they would not do under a steady load. One group
    of few requests takes too short a time, so there are at least ``args.requests``.
    """
    groups = -(-args.requests // load)
    prompts = prompts_of(groups * load, args.input_len, args.vocabulary)
    before = settled_stats(llm)
    runs = [
        run_static_batch(llm, prompts[first : first + load], args.output_len)
        for first in range(0, len(prompts), load)
    ]
    after = settled_stats(llm)
    drafted = after.drafted_tokens - before.drafted_tokens
    tokens = sum(sum(one.gained) for one in runs)
    return {
        "tokens_per_s": round(tokens / sum(sum(one.decodes) for one in runs), 1),
        "drafts": round(drafted / max(1, after.steps - before.steps) / load, 2),
    }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the speeds of all policies at each length and load."""
    trace = Trace(args)
    policies = {("none" if not s.steps else str(s)): s for s in trace.shapes}
    plain = LLM(args.model, **trace.base) if args.plain else None
    for shape in trace.shapes:  # first-use costs of each size and load
        trace.use(shape)
        for load in sorted(set(args.loads)):
            run(trace.llm, load, args)
    for length in args.lengths:
        trace.accept(length)
        for number, load in enumerate(args.loads):
            order = [*policies, ADAPTIVE, *([PLAIN] if plain is not None else [])]
            found: dict[str, Any] = {}
            for name in order[number % len(order) :] + order[: number % len(order)]:
                trace.use(policies.get(name))
                llm = plain if name == PLAIN and plain is not None else trace.llm
                found[name] = run(llm, load, args)
            speeds = {name: one["tokens_per_s"] for name, one in found.items()}
            own = speeds.pop(ADAPTIVE)
            best = max(speeds, key=lambda name: speeds[name])
            share = round(own / speeds[best], 3)
            print(length, load, {**speeds, ADAPTIVE: own}, share, flush=True)
            yield {
                "accept_length": length,
                "load": load,
                **{name: found[name] for name in order},
                "best": best,
                "adaptive / best": share,
            }
    trace.llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--algorithm", default="nextn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weights", default="auto", help="random: made-up weights")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 1.85, 2.6, 3.5])
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8, 32, 128, 256, 128, 32, 8, 1])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = {
        "command": "python -m tests.support.draft_trace " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": card,
        "versions": {"glowplug": glowplug.__version__, "torch": torch.__version__},
    }
    rows = []
    for row in measure(args):  # the record has every row so far if the run is cut short
        rows.append(row)
        args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

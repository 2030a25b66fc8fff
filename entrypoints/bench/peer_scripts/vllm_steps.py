"""Measure prefill and decode-step times of vLLM's offline engine.

This script runs in vLLM's interpreter and imports nothing of glowplug.

    python vllm_steps.py MODEL --batch-size 1 8 --input-len 1024 --output-len 64 \\
        [--engine '{"enforce_eager": true}']

The time of a decode step is the median time between the ends of consecutive engine steps in which
every sequence gets one token; the first eight are left out. The time of prefill is the
median time of a run that generates one token. Prints one line per batch size in the format that
``glowplug bench peers`` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The engine's step has to be a call in this process.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
SETTLING_STEPS = 8  #: decode steps at the start of a run that are left out


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, nargs="+", required=True)
    parser.add_argument("--input-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    parser.add_argument(
        "--vocab-size", type=int, default=100_000, help="random token ids are below this"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further arguments of vllm.LLM, as JSON",
    )
    return parser.parse_args()


def main() -> None:
    """Load the model in vLLM and measure every batch size."""
    args = arguments()
    here = Path(__file__).resolve().parent
    # vLLM must not import modules of this folder by their names.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    from vllm import LLM

    sizes = sorted(set(args.batch_size))
    settings = {
        "max_model_len": max(4096, args.input_len + args.output_len + 1),
        "enable_prefix_caching": False,
        "max_num_seqs": max(sizes),
        "max_num_batched_tokens": 16384,
        "seed": 0,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enable_expert_parallel": args.enable_expert_parallel,
        **args.engine,
    }
    llm = LLM(model=args.model, **settings)
    print("engine loaded", flush=True)
    for batch in sizes:
        measure(llm, args, batch)


def measure(llm: Any, args: argparse.Namespace, batch: int) -> None:
    """Measure one batch size and print its line."""
    rng = random.Random(batch)
    ends: list[float] = []
    step = llm.llm_engine.step

    def timed_step(*given: Any, **named: Any) -> Any:
        outputs = step(*given, **named)
        ends.append(time.perf_counter())
        return outputs

    llm.llm_engine.step = timed_step
    try:
        generate(llm, rng, args, batch, min(args.output_len, 8))
        prefills: list[float] = []
        steps: list[float] = []
        for _ in range(args.repeat):
            prefills.append(generate(llm, rng, args, batch, 1))
            ends.clear()
            generate(llm, rng, args, batch, args.output_len)
            steps += decode_steps(ends, args.output_len)
    finally:
        llm.llm_engine.step = step
    prefill = statistics.median(prefills)
    decode = statistics.median(steps)
    print(
        f"batch {batch}: prefill {prefill * 1e3:.1f} ms "
        f"({batch * args.input_len / prefill:.0f} tokens/s), "
        f"decode step {decode * 1e3:.3f} ms ({batch / decode:.0f} tokens/s)",
        flush=True,
    )


def generate(
    llm: Any, rng: random.Random, args: argparse.Namespace, batch: int, tokens: int
) -> float:
    """Return the seconds to generate ``tokens`` tokens for each of ``batch`` new prompts."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [rng.randrange(args.vocab_size) for _ in range(args.input_len)]}
        for _ in range(batch)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def decode_steps(ends: Sequence[float], tokens: int) -> list[float]:
    """Return the durations in seconds of a run's last decode steps, from the steps' end times.

    Earlier steps are left out, since prefill may have taken several steps.
    """
    times = [after - before for before, after in zip(ends, ends[1:])]
    return times[-max(1, tokens - 1 - SETTLING_STEPS) :]


if __name__ == "__main__":
    main()

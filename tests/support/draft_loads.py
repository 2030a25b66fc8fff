"""The speed of adaptive drafts while the load changes, beside fixed drafts and none.

``python -m tests.support.draft_loads --output x.json``. Each engine answers the same questions of
the embedded model's held-out tasks, in their reasoning form and to their natural end, some at a
time: the number of requests at a time rises and falls. The engines take turns at each load, and
each load counts with its fastest round: in CPU seconds, or with ``--device cuda`` in seconds. The
time of the first tokens, the fastest of those measured by themselves, is subtracted.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import sys
import time
from contextlib import ExitStack
from operator import eq
from pathlib import Path
from typing import Any

import torch

from glowplug import LLM, SamplingParams
from glowplug.core.step.draft_counts import Acceptance, since
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from glowplug.entrypoints.evaluation.tasks import held_out_path

NONE = "none"
#: groups of requests at each load: one group of 256 requests takes 0.1 s on an H200, too short
GROUPS = 4


def engines_of(algorithms: list[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of the engines: none; for each algorithm chains, a tree and adaptive."""
    found: dict[str, dict[str, Any]] = {NONE: {"use": NONE}}
    for use in algorithms:
        found[f"{use} 1"] = {"use": use, "steps": 1, "adaptive": False}
        found[f"{use} 3"] = {"use": use, "steps": 3, "adaptive": False}
        tree = {"use": use, "steps": 3, "topk": 4, "draft_tokens": 8}
        found[f"{use} 3/4/8"] = {**tree, "adaptive": False}
        found[f"{use} up to 3"] = {"use": use, "steps": 3}
        found[f"{use} up to 3/4/8"] = tree
    return found


def answer(
    llm: LLM, prompts: list[list[int]], load: int, args: argparse.Namespace
) -> tuple[list[list[int]], float, float]:
    """Return the answers, ``load`` requests at a time, the seconds of first tokens, and of all."""
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    answers: list[list[int]] = []
    seconds = []
    for tokens in (1, args.tokens):
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        begun = clock()
        answers = []
        for first in range(0, len(prompts), load):
            found = llm.generate(prompts[first : first + load], params)
            answers += [one.token_ids for one in found]
        seconds.append(clock() - begun)
    return answers, *seconds


def reasoning_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Return ``count`` held-out tasks in their reasoning form, from the start again if too few."""
    assert llm.tokenizer is not None
    tasks = [json.loads(line) for line in held_out_path().read_text().splitlines()]
    texts = [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": task["question"]}], thinking=True
        )
        for task in tasks
        if task.get("think")
    ]
    return [
        llm.tokenizer.encode(text, add_special_tokens=False)
        for text in itertools.islice(itertools.cycle(texts), count)
    ]


def open_engine(drafts: dict[str, Any], args: argparse.Namespace) -> LLM:
    most = max(args.loads)
    config: dict[str, Any] = {
        "dtype": "float32",
        "device": args.device,
        "cache": {"use": "none"},
        "scheduler": {"max_running_requests": most},
        "speculative": drafts,
    }
    if args.device == "cuda":
        config["graphs"] = {"use": "cuda_graph", "batch_sizes": sorted(set(args.loads))}
        config["context_length"] = 320
        config["memory"] = {"kv_tokens": max(most, 8) * 320}
    return LLM("embedded", **config)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each load the figures of each engine, all engines open at once."""
    fastest: dict[tuple[int, str], float] = {}  # seconds of a token, those of first tokens included
    first: dict[tuple[int, str], float] = {}  # least of the latter
    gained: dict[tuple[int, str], tuple[float, float]] = {}
    equal: dict[tuple[int, str], float] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(open_engine(drafts, args))
            for name, drafts in engines_of(args.algorithms).items()
        }
        for _ in range(args.rounds):
            for place, load in enumerate(args.loads):
                prompts = reasoning_prompts(engines[NONE], max(args.questions, GROUPS * load))
                wanted = None
                for name, llm in engines.items():
                    before = settled_stats(llm)
                    answers, of_first, seconds = answer(llm, prompts, load, args)
                    after = settled_stats(llm)
                    wanted = wanted or answers
                    key = place, name
                    equal[key] = sum(map(eq, answers, wanted)) / len(wanted)
                    # sums of a batch on a GPU depend on the number of its tokens
                    assert args.device == "cuda" or equal[key] == 1, f"{name} changed an answer"
                    tokens = sum(len(one) - 1 for one in answers)
                    first[key] = min(of_first / tokens, first.get(key, math.inf))
                    if seconds / tokens < fastest.get(key, math.inf):
                        fastest[key] = seconds / tokens
                        gained[key] = _gain(before, after)
    decoding = {key: seconds - first[key] for key, seconds in fastest.items()}
    rows = [_row(place, load, args, decoding, gained) for place, load in enumerate(args.loads)]
    for (place, name), share in equal.items():
        rows[place][name]["equal answers"] = round(share, 3)
    return rows


def _gain(before: Stats, after: Stats) -> tuple[float, float]:
    """Return accept length and drafts per verify step of a row between two statistics."""
    found = Acceptance(since(after.drafts, before.drafts))
    return found.length or 1.0, found.drafted / max(1, found.verify_steps)


def _row(
    place: int,
    load: int,
    args: argparse.Namespace,
    fastest: dict[tuple[int, str], float],
    gained: dict[tuple[int, str], tuple[float, float]],
) -> dict[str, Any]:
    row: dict[str, Any] = {"requests at a time": load}
    for name in engines_of(args.algorithms):
        length, drafts = gained[place, name]
        row[name] = {
            "tokens per second": round(1 / fastest[place, name], 1),
            "to none": round(fastest[place, NONE] / fastest[place, name], 3),
            "accept length": round(length, 2),
            "drafts": round(drafts, 2),
        }
    for use in args.algorithms:
        for adaptive, fixed in ((" up to 3", (" 1", " 3")), (" up to 3/4/8", (" 3/4/8",))):
            best = min(fastest[place, name] for name in (NONE, *(use + one for one in fixed)))
            row[use + adaptive]["to the best"] = round(best / fastest[place, use + adaptive], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 4, 1])
    parser.add_argument("--algorithms", nargs="+", default=["nextn"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--questions", type=int, default=16, help="at least so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="limit of an answer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args)
    about = {
        "command": "python -m tests.support.draft_loads " + " ".join(sys.argv[1:]),
        "model": "embedded, float32",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()

"""The speed of adaptive drafts on the CPU while the load changes, beside fixed drafts and none.

``python -m tests.support.draft_loads --output x.json``. Each engine
answers the same questions of the embedded model's held-out tasks, some at a time: the number of
requests at a time rises and falls. The engines take turns at each load, and each load counts with
its fastest round, in CPU seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from glowplug import LLM, SamplingParams
from glowplug.entrypoints.bench.others.draft_settings import read_prompts, settled_stats

ENGINES: dict[str, dict[str, Any]] = {
    "none": {"use": "none"},
    "1 step": {"use": "nextn", "steps": 1, "adaptive": False},
    "3 steps": {"use": "nextn", "steps": 3, "adaptive": False},
    "adaptive, up to 3": {"use": "nextn", "steps": 3},
}


def answer(llm: LLM, prompts: list[list[int]], load: int, tokens: int) -> tuple[list[Any], float]:
    """Return the answers, ``load`` requests at a time, and the CPU seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begun = time.process_time()
    answers = []
    for first in range(0, len(prompts), load):
        answers += [one.token_ids for one in llm.generate(prompts[first : first + load], params)]
    return answers, time.process_time() - begun


def measure(loads: list[int], questions: int, rounds: int, tokens: int) -> list[dict[str, Any]]:
    fastest: dict[tuple[int, str], float] = {}
    drafted: dict[tuple[int, str], float] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    "embedded",
                    dtype="float32",
                    device="cpu",
                    cache={"use": "none"},
                    scheduler={"max_running_requests": max(loads)},
                    speculative=drafts,
                )
            )
            for name, drafts in ENGINES.items()
        }
        prompts = read_prompts(engines["none"], None, questions)
        for _ in range(rounds):
            for place, load in enumerate(loads):
                wanted = None
                for name, llm in engines.items():
                    before = settled_stats(llm)
                    answers, seconds = answer(llm, prompts, load, tokens)
                    after = settled_stats(llm)
                    wanted = wanted or answers
                    assert answers == wanted, "speculation changed an answer"
                    key = place, name
                    if seconds < fastest.get(key, seconds + 1):
                        fastest[key] = seconds
                        steps = after.steps - before.steps
                        drafted[key] = (after.drafted_tokens - before.drafted_tokens) / steps / load
    made = questions * tokens
    return [
        {
            "requests at a time": load,
            "tokens per CPU second": {
                name: round(made / fastest[place, name], 1) for name in ENGINES
            },
            "drafts per row and step": round(drafted[place, "adaptive, up to 3"], 2),
            "adaptive / best of none and fixed": round(
                min(fastest[place, name] for name in list(ENGINES)[:-1])
                / fastest[place, "adaptive, up to 3"],
                3,
            ),
        }
        for place, load in enumerate(loads)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 4, 1])
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.loads, args.questions, args.rounds, args.tokens)
    about = {
        "command": "python -m tests.support.draft_loads " + " ".join(sys.argv[1:]),
        "model": "embedded, float32, one thread",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()

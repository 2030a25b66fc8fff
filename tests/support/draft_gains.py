"""The gain of NextN at batch 1 on the CPU: accept length and speed on held-out chat, beside no
speculation.

``python -m tests.support.draft_gains --output docs/benchmarks/nextn-cpu.json``. The engines take
turns on each question, one question at a time, nothing in the prefix cache; each question counts
with its fastest round. Decoding is the time of an answer beyond its first token.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from glowplug import LLM, SamplingParams
from glowplug.core.step.messages import Stats
from glowplug.models.embedded.tasks import held_out_tasks

STEPS = (0, 1, 2, 3)


def engine(steps: int) -> LLM:
    more: dict[str, Any] = (
        {"speculative": {"use": "nextn", "adaptive": False, "steps": steps}} if steps else {}
    )
    return LLM("embedded", dtype="float32", device="cpu", **more)


def timed(llm: LLM, question: str, most: int) -> tuple[list[int], float]:
    """Return the greedy answer and its CPU seconds, which other work on the machine lengthens
    least.
    """
    llm.control("flush")
    began = time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=most)
    tokens = llm.chat([{"role": "user", "content": question}], params)[0].token_ids
    return tokens, time.process_time() - began


def measure(questions: int, rounds: int, most: int) -> list[dict[str, Any]]:
    fastest: dict[tuple[int, int, int], float] = {}
    answers: dict[int, list[int]] = {}
    with ExitStack() as stack:
        engines = {steps: stack.enter_context(engine(steps)) for steps in STEPS}
        for _ in range(rounds):
            for (number, task), limit in itertools.product(
                enumerate(held_out_tasks(questions)), (1, most)
            ):
                for steps, llm in engines.items():
                    tokens, seconds = timed(llm, task.prompt, limit)
                    if limit == most:
                        assert answers.setdefault(number, tokens) == tokens, (
                            "speculation changed an answer"
                        )
                    key = steps, number, limit
                    fastest[key] = min(seconds, fastest.get(key, seconds))
        stats = {steps: llm.stats for steps, llm in engines.items()}
    return [row(steps, answers, fastest, most, stats[steps]) for steps in STEPS]


def row(
    steps: int,
    answers: dict[int, list[int]],
    fastest: dict[tuple[int, int, int], float],
    most: int,
    stats: Stats,
) -> dict[str, Any]:
    first, whole = (sum(fastest[steps, number, limit] for number in answers) for limit in (1, most))
    tokens = sum(map(len, answers.values()))
    later = tokens - len(answers)
    return {
        "steps": steps,
        "accept_length": round(1 + stats.accepted_tokens / (stats.drafted_tokens / steps), 3)
        if steps
        else None,
        "output_tokens": tokens,
        "first_token_ms": round(1e3 * first / len(answers), 2),
        "decode_ms_per_token": round(1e3 * (whole - first) / later, 3),
        "whole_ms_per_token": round(1e3 * whole / tokens, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args.questions, args.rounds, args.max_tokens)
    about = {
        "command": "python -m tests.support.draft_gains " + " ".join(sys.argv[1:]),
        "model": "embedded, float32, batch 1",
        "date": datetime.date.today().isoformat(),
        "threads": args.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    args.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()

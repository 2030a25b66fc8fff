"""``glowplug demo``: the plan, then streamed answers of the embedded model and their speed.

Runs offline on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.cli.commands.check import add_plan_option, show_plan
from glowplug.entrypoints.front.delta import Delta

PROMPTS = ("What is 27 + 15?", "Who are you?")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        nargs="*",
        default=PROMPTS,
        metavar="PROMPT",
        help="questions, each answered in a chat of its own "
        f"(default: {' and '.join(map(repr, PROMPTS))})",
    )
    parser.add_argument(
        "--model", default="embedded", help="model folder (default: the embedded model)"
    )
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_plan_option(parser, "brief")
    parser.add_argument("--think", action="store_true", help="answer with reasoning")


def run(args: argparse.Namespace) -> int:
    """Answer the given prompts; print the plan, answers and their speed; return the exit code."""
    from glowplug.entrypoints.front.llm import LLM

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    thinking = {"thinking": True} if args.think else {}
    start = time.perf_counter()
    with LLM(model=args.model) as llm:
        show_plan(llm.plan, args.plan or "brief", sys.stdout)
        print(f"\nready in {time.perf_counter() - start:.1f} s")
        for prompt in args.prompts:
            print(f"\n> {prompt}\n")
            speed = show(llm.stream([{"role": "user", "content": prompt}], params, **thinking))
            print(f"\n\n{speed}")
    return 0


@dataclass
class Speed:
    """Token counts and times of one streamed answer.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of the answer.
        first: seconds from the request to the first token.
        total: seconds from the request to the end.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    first: float = 0.0
    total: float = 0.0

    def __str__(self) -> str:
        text = (
            f"{self.prompt_tokens} prompt tokens, {self.output_tokens} output tokens: "
            f"first after {self.first * 1000:.0f} ms"
        )
        if self.output_tokens < 2 or self.total <= self.first:
            return text
        return f"{text}, then {(self.output_tokens - 1) / (self.total - self.first):.1f} tokens/s"


def show(deltas: Iterable[Delta]) -> Speed:
    """Print an answer while it is generated; return its speed."""
    speed = Speed()
    start = time.perf_counter()
    for delta in deltas:
        if delta.token_ids and not speed.output_tokens:
            speed.first = time.perf_counter() - start
        speed.prompt_tokens = delta.prompt_tokens
        speed.output_tokens = delta.output_tokens
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    speed.total = time.perf_counter() - start
    return speed

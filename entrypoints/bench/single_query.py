"""``glowplug bench single-query``: one query with every combination of four features.

The features are radix cache, NextN, EP-MoE and DP attention, as in published ablation tables of
DeepSeek engines. A row of the table is a combination and shows how fast it answers a single query.
Each row is measured on a new engine with real ranks. If a combination cannot run, its row has the
reason.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import ConfigError, EngineDead, PlanRefused
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.drafts import acceptance, counted
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

if TYPE_CHECKING:
    from glowplug.entrypoints.front.llm import LLM

QUESTIONS = (
    "What is 347 + 258?",
    "What is 902 - 417?",
    "Reverse the list: k, d, r, b, z, m",
    "Who are you?",
    "Sort these numbers: 41, 7, 93, 18, 66",
    "What is a harbour?",
)
COLUMNS = (
    "ranks",
    "radix",
    "NextN",
    "EP-MoE",
    "DP-attention",
    "runs",
    "start s",
    "TTFT ms",
    "latency ms",
    "TPS@1",
    "accept length",
    "same output",
)


@dataclass(frozen=True)
class Mixture:
    """A combination of features, which is one row of the table.

    Attributes:
        ranks: number of ranks; EP and DP span all of them.
        radix: use the radix cache.
        steps: drafted tokens; 0: no NextN.
        ep: use EP-MoE.
        dp: use DP attention.
    """

    ranks: int
    radix: bool
    steps: int
    ep: bool
    dp: bool

    def config(self, given: dict[str, Any], threads: int) -> dict[str, Any]:
        """Return the operator's configuration with the features of this combination.

        Args:
            threads: torch threads of each rank.
        """
        strategies = [("tensor", self.ranks > 1), ("ep_moe", self.ep), ("dp_attention", self.dp)]
        config = {**given, "cache": {"use": "radix" if self.radix else "none"}}
        parallel = [{"use": use, "size": self.ranks} for use, wanted in strategies if wanted]
        if parallel:
            config["parallel"] = parallel
        if self.steps:
            config["speculative"] = {"use": "nextn", "steps": self.steps}
        config.setdefault("executor", {"use": "multiprocess", "threads": threads})
        return config

    @property
    def marks(self) -> dict[str, object]:
        """Return the row's cells by the names of the columns that show its features."""
        return {
            "ranks": self.ranks,
            "radix": _mark(self.radix),
            "NextN": self.steps or "",
            "EP-MoE": _mark(self.ep),
            "DP-attention": _mark(self.dp),
        }


def _mark(on: bool) -> str:
    return "x" if on else ""


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("table")
    group.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2],
        help="numbers of ranks to measure (default: 1 and 2)",
    )
    group.add_argument("--steps", type=int, default=1, help="tokens that NextN drafts per step")
    group.add_argument(
        "--question",
        action="append",
        dest="questions",
        help="question to ask; may be given several times",
    )
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--threads", type=int, default=1, help="torch threads of each rank")
    group.add_argument(
        "--repeat", type=int, default=3, help="rounds over the questions; medians are reported"
    )
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="write JSON to this file",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure all combinations of features and print a table with a row for each.

    Returns:
        Exit status 0 if every row ran or was refused; 1 if one failed; 2 if the options are
            invalid.
    """
    try:
        given = engine_config(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    reference: list[list[int]] | None = None
    for mixture in mixtures(args.ranks, args.steps):
        found, tokens = measure(mixture, args, given)
        if tokens is not None:
            reference = reference or tokens
            found["same output"] = "yes" if tokens == reference else "no"
        rows.append({**mixture.marks, **found})
        print(one_line(rows[-1]), flush=True)
    print(
        "\n" + report.table(COLUMNS, ([row.get(column, "-") for column in COLUMNS] for row in rows))
    )
    for reason in dict.fromkeys(row["reason"] for row in rows if "reason" in row):
        print("\n" + reason)
    if args.result_filename:
        report.write_json(Path(args.result_filename), {**_conditions(args), "rows": rows})
    return 1 if any(row["runs"] == "failed" for row in rows) else 0


def mixtures(ranks: Iterable[int], steps: int) -> list[Mixture]:
    """Return every combination of features for each number of ranks, starting with no features."""
    switches = list(itertools.product((False, True), repeat=4))
    return [
        Mixture(count, radix, steps if nextn else 0, ep, dp)
        for count in ranks
        for dp, ep, nextn, radix in switches
    ]


def measure(
    mixture: Mixture,
    args: argparse.Namespace,
    given: dict[str, Any],
) -> tuple[dict[str, Any], list[list[int]] | None]:
    """Measure the combination ``mixture`` with the operator's configuration ``given``.

    Returns:
        (the row's figures, the tokens of each answer), or (the reason why it did not run, None).
    """
    from glowplug.entrypoints.front.llm import LLM

    started = time.perf_counter()
    try:
        with LLM(**mixture.config(given, args.threads)) as llm:
            ready = time.perf_counter() - started
            figures, tokens = _measure_questions(llm, args)
            return {
                "runs": "yes",
                "start s": round(ready, 2),
                "dtype": llm.plan.dtype,
                **figures,
            }, tokens
    except PlanRefused as refused:
        return {"runs": "refused", "reason": str(refused)}, None
    except EngineDead as error:
        return {"runs": "failed", "reason": str(error)}, None


@dataclass(frozen=True)
class QueryAnswer:
    """Times and tokens of one answer.

    Attributes:
        first: seconds from the request to the first token.
        last: seconds from the request to the last token.
        tokens: ids of the answer.
    """

    first: float
    last: float
    tokens: list[int]


def _measure_questions(
    llm: LLM, args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """Measure all questions, one at a time.

    Returns:
        The figures of the row, and the tokens of each answer in the first round.
    """
    questions = args.questions or QUESTIONS
    _answer(llm, questions[0], args.max_tokens)  # warm-up
    before = counted(llm)
    rounds = [
        [_answer(llm, question, args.max_tokens) for question in questions]
        for _ in range(args.repeat)
    ]
    drafts = acceptance(before, counted(llm))
    figures = _times(rounds)
    length = drafts["accept_length"]
    figures["accept length"] = "-" if length is None else round(length, 3)
    figures["accept rates"] = drafts["accept_rates"]
    figures["output tokens"] = sum(len(one.tokens) for one in rounds[0])
    return figures, [one.tokens for one in rounds[0]]


def _times(rounds: list[list[QueryAnswer]]) -> dict[str, Any]:
    """Return a row's figures: median times of all rounds, and the decode rate of each round."""
    rates = [
        sum(len(one.tokens) - 1 for one in answers) / sum(one.last - one.first for one in answers)
        for answers in rounds
    ]
    latencies = [sum(one.last for one in answers) / len(answers) for answers in rounds]
    first = median(one.first for answers in rounds for one in answers)
    return {
        "TTFT ms": round(1e3 * first, 1),
        "latency ms": round(1e3 * median(latencies), 1),
        "TPS@1": round(median(rates), 1),
        "rates": rates,
    }


def _answer(llm: LLM, question: str, most: int) -> QueryAnswer:
    """Generate one greedy answer of at most ``most`` tokens with an empty prefix cache.

    The chat template gets ``thinking=True``, so a model with a reasoning mode reasons first.
    """
    from glowplug.core.step.request import SamplingParams

    llm.control("flush")
    params = SamplingParams(temperature=0.0, max_tokens=most)
    tokens: list[int] = []
    first = last = 0.0
    started = time.perf_counter()
    for delta in llm.stream([{"role": "user", "content": question}], params, thinking=True):
        if delta.token_ids:
            last = time.perf_counter() - started
            first = first or last
            tokens.extend(delta.token_ids)
    return QueryAnswer(first, last, tokens)


def one_line(row: dict[str, Any]) -> str:
    parts = [f"{name} {row[name]}" for name in COLUMNS[:5] if row[name]]
    figures = [f"{name} {row[name]}" for name in COLUMNS[6:] if name in row]
    return f"{', '.join(parts)}: {', '.join(figures) or row['runs']}"


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the measurement for the record.

    The conditions are the machine, versions and the command's options.
    """
    import torch

    return {
        "command": "glowplug " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load_average": os.getloadavg()[1],
        "rounds": args.repeat,
        "questions": list(args.questions or QUESTIONS),
    }

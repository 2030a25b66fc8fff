"""The option ``--alone`` of ``glowplug bench one-batch``, and what it changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.entrypoints.bench.others.in_process import BatchTimes, random_ids, run_static_batch
from glowplug.entrypoints.bench.ranks.exchange_times import ExchangeTimes

if TYPE_CHECKING:
    from glowplug.entrypoints.front.llm import LLM


def add_alone_option(group: Any) -> None:
    """Add the option to ``group``."""
    group.add_argument(
        "--alone",
        type=int,
        nargs="?",
        const=0,
        default=None,
        metavar="RANK",
        help="run only this rank of the layout (default: 0), on one device: its slices of the "
        "weights, with exchanges replaced by copies of the same size; the answers are meaningless",
    )


def open_engine(rank: int | None, batches: Sequence[int], config: dict[str, Any]) -> LLM:
    """Return an engine, or one rank of its layout.

    Args:
        rank: number of the rank that runs alone; None: a whole engine.
        batches: numbers of sequences that will run at once.
        config: keywords of ``LLM``.

    Raises:
        ValueError, PlanRefused: see ``LoneRankLLM``.
    """
    from glowplug.entrypoints.bench.alone.llm import LoneRankLLM
    from glowplug.entrypoints.front.llm import LLM

    return LLM(**config) if rank is None else LoneRankLLM(rank, batches, **config)


def run_once(llm: LLM, rng: random.Random, batch: int, length: int, output: int) -> BatchTimes:
    """Run a batch of random prompts and return its times.

    Args:
        llm: the engine, or a rank that runs alone.
        rng: source of the prompts.
        batch: number of sequences.
        length: prompt tokens of each.
        output: tokens to generate for each.
    """
    from glowplug.entrypoints.bench.alone.llm import LoneRankLLM

    if isinstance(llm, LoneRankLLM):
        return llm.run_batch(rng, batch, length, output)
    vocab = llm.plan.facts.model.vocab_size
    return run_static_batch(llm, random_ids(rng, batch, length, vocab), output)


def about_rank(
    llm: LLM, rng: random.Random, times: BatchTimes, exchange_times: Path | None
) -> dict[str, Any]:
    """Return the keys of a record about a rank that runs alone; {} for a whole engine.

    Args:
        llm: the engine, or a rank that runs alone.
        rng: source of prompts.
        times: times of the batch.
        exchange_times: record of `bench kernels --collectives`; None: exchanges have no times.
    """
    from glowplug.entrypoints.bench.alone.llm import LoneRankLLM

    if not isinstance(llm, LoneRankLLM):
        return {}
    found = None if exchange_times is None else ExchangeTimes.read(exchange_times)
    return llm.record(rng, times, found)

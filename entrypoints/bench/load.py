"""The load itself: when requests leave, how many may be in flight, and what comes back."""
from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from glowplug.entrypoints.bench.backends import Backend, Outcome, Request, ask
from glowplug.entrypoints.bench.datasets import Prompt
from glowplug.entrypoints.bench.http_stream import Target


@dataclass(frozen=True)
class Load:
    """``rate`` requests a second (inf: all at once) with gamma-distributed gaps of shape ``burstiness`` (1: Poisson);
    never more than ``concurrency`` in flight (None: no limit)."""

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0


def gaps(load: Load, count: int) -> list[float]:
    """Seconds before each request. They sum to ``count / rate`` exactly, so that runs of one rate compare."""
    if math.isinf(load.rate):
        return [0.0] * count
    drawn = np.random.default_rng(load.seed).gamma(load.burstiness, 1.0, count)
    return [float(gap) for gap in drawn * (count / load.rate / drawn.sum())]


async def _departures(load: Load, prompts: Sequence[Prompt]) -> AsyncIterator[Prompt]:
    due = time.perf_counter()
    for gap, prompt in zip(gaps(load, len(prompts)), prompts):
        due += gap
        ahead = due - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        yield prompt


async def drive(target: Target, backend: Backend, request: Request, prompts: Sequence[Prompt], load: Load,
                finished: Callable[[], None]) -> tuple[list[Outcome], float]:
    """Send everything; (outcomes in the prompts' order, seconds from the first request to the last token)."""
    gate: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext())

    async def one(prompt: Prompt) -> Outcome:
        async with gate:
            outcome = await ask(target, backend, prompt, request)
        finished()
        return outcome

    start = time.perf_counter()
    tasks = [asyncio.create_task(one(prompt)) async for prompt in _departures(load, prompts)]
    outcomes = list(await asyncio.gather(*tasks))
    return outcomes, time.perf_counter() - start


def progress(total: int, enabled: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """(one more is done, close the bar): a bar on a terminal, nothing elsewhere."""
    if not (enabled and sys.stderr.isatty()):
        return (lambda: None), (lambda: None)
    from tqdm import tqdm

    bar = tqdm(total=total, unit="req")
    return (lambda: (bar.update(1), None)[1]), bar.close

"""The load generator: sends requests at a given rate and concurrency and collects the outcomes."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from glowplug.entrypoints.bench.load.backends import (
    Backend,
    Outcome,
    RawAnswer,
    Request,
    outcome_of,
    send_prompt,
)
from glowplug.entrypoints.bench.load.datasets import BenchPrompt
from glowplug.entrypoints.bench.load.http_stream import ServerTarget

#: bytes of unparsed answers above which they are parsed during the run
UNREAD_BYTES_MAX = 256 << 20


@dataclass(frozen=True)
class RampUp:
    """A request rate that rises over a run, as with vLLM's options ``--ramp-up-*``.

    Attributes:
        strategy: "linear" or "exponential" in the number of the request.
        start: requests per second at the first request.
        end: requests per second at the last.
    """

    strategy: str
    start: float
    end: float

    def rate(self, index: int, count: int) -> float:
        """Return the rate before request ``index`` of ``count``."""
        done = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * done
        return float(self.start * (self.end / self.start) ** done)


@dataclass(frozen=True)
class Load:
    """The times at which requests are sent, and the limit on requests in flight.

    Attributes:
        rate: requests per second; inf sends all at once.
        burstiness: shape of the gamma-distributed gaps between requests; 1 is a Poisson process.
        concurrency: most requests in flight; None: no limit.
        seed: seed of the gaps.
        ramp: rates between which the run rises, in place of ``rate``; None: ``rate`` is constant.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    ramp: RampUp | None = None


def load_of(args: argparse.Namespace, concurrency: int | None) -> Load:
    """Return the load that the command line describes.

    ``concurrency``: most requests in flight; None: no limit.

    Raises:
        ValueError: a number is out of range, or options contradict each other.
    """
    if args.request_rate <= 0 or args.burstiness <= 0:
        raise ValueError("--request-rate and --burstiness must be greater than 0")
    ends = args.ramp_up_start_rps, args.ramp_up_end_rps
    ramp = None
    if args.ramp_up_strategy is not None:
        ramp = _ramp_up(args.ramp_up_strategy, *ends)
        if not math.isinf(args.request_rate):
            raise ValueError(
                "--request-rate and --ramp-up-strategy both set the rate: leave one out"
            )
    elif ends != (None, None):
        raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    return Load(args.request_rate, args.burstiness, concurrency, args.seed, ramp)


def _ramp_up(strategy: str, start: float | None, end: float | None) -> RampUp:
    """Return the ramp-up of the options; raise ValueError if they are incomplete or wrong."""
    if start is None or end is None:
        raise ValueError("--ramp-up-strategy needs both --ramp-up-start-rps and --ramp-up-end-rps")
    if not 0 < start <= end < math.inf:
        raise ValueError("--ramp-up-start-rps must be greater than 0 and at most --ramp-up-end-rps")
    return RampUp(strategy, start, end)


def gaps(load: Load, count: int) -> list[float]:
    """Return the seconds to wait before each request.

    At a constant rate the gaps sum to exactly ``count / rate``, so that runs at one rate are
    comparable. Gaps of a ramp-up are not scaled. An infinite burstiness gives equal gaps.
    """
    if load.ramp is None and math.isinf(load.rate):
        return [0.0] * count
    shape = load.burstiness
    drawn = (
        np.ones(count)
        if math.isinf(shape)
        else np.random.default_rng(load.seed).gamma(shape, 1 / shape, count)
    )
    if load.ramp is not None:
        return [float(gap / load.ramp.rate(i, count)) for i, gap in enumerate(drawn)]
    return [float(gap) for gap in drawn * (count / load.rate / drawn.sum())]


async def _departures(load: Load, prompts: Sequence[BenchPrompt]) -> AsyncIterator[BenchPrompt]:
    """Yield each prompt when it is time to send it."""
    due = time.perf_counter()
    for gap, prompt in zip(gaps(load, len(prompts)), prompts):
        due += gap
        ahead = due - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        yield prompt


async def drive(
    target: ServerTarget,
    backend: Backend,
    request: Request,
    prompts: Sequence[BenchPrompt],
    load: Load,
    finished: Callable[[], None],
) -> tuple[list[Outcome], float]:
    """Send all prompts and wait for their answers.

    Args:
        target: the server.
        backend: kind of server and route.
        request: settings of all requests.
        prompts: the prompts.
        load: the times of the requests.
        finished: called after each answer.

    Returns:
        (outcomes in the order of the prompts, seconds from the first request to the last answer).
    """
    gate: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext()
    )
    answers = _Answers(backend)

    async def one(index: int, prompt: BenchPrompt) -> None:
        async with gate:
            raw = await send_prompt(target, backend, prompt, request, index)
        answers.take(index, raw)
        finished()

    start = time.perf_counter()
    tasks = list[asyncio.Task[None]]()
    async for prompt in _departures(load, prompts):
        tasks.append(asyncio.create_task(one(len(tasks), prompt)))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    return answers.outcomes(), seconds


class _Answers:
    """The answers of a run by the index of their prompt.

    Answers are parsed at the end, or earlier when their bytes exceed ``UNREAD_BYTES_MAX``.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._raw: dict[int, RawAnswer] = {}
        self._read: dict[int, Outcome] = {}
        self._held = 0

    def take(self, index: int, raw: RawAnswer) -> None:
        self._raw[index] = raw
        self._held += raw.size
        if self._held > UNREAD_BYTES_MAX:
            self._read_all()

    def _read_all(self) -> None:
        for index, raw in self._raw.items():
            self._read[index] = outcome_of(raw, self._backend)
        self._raw.clear()
        self._held = 0

    def outcomes(self) -> list[Outcome]:
        self._read_all()
        return [self._read[index] for index in sorted(self._read)]


def progress(total: int, enabled: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Show a progress bar on standard error.

    Nothing is shown unless ``enabled`` is true and standard error is a terminal.

    Returns:
        (function that advances the bar by one request, function that closes the bar).
    """
    if not (enabled and sys.stderr.isatty()):
        return (lambda: None), (lambda: None)
    from tqdm import tqdm

    bar = tqdm(total=total, unit="req")
    return (lambda: (bar.update(1), None)[1]), bar.close

"""Parts shared by the in-process benchmarks: static batches with their step times, and traces."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from glowplug.core.errors import GlowplugError

if TYPE_CHECKING:
    from glowplug.entrypoints.front.delta import Delta
    from glowplug.entrypoints.front.front import Stream
    from glowplug.entrypoints.front.llm import LLM


#: decode steps at the start that statistics leave out, if a run has at least four times as many
SETTLING_STEPS = 4


@dataclass(frozen=True)
class BatchTimes:
    """Times of one static batch, from submission to the last token, in seconds.

    Attributes:
        batch: number of sequences.
        input_len: prompt tokens of each sequence.
        output_len: generated tokens of each sequence.
        prefill: time until every sequence had its first token.
        decodes: duration of each step in which every sequence got a token.
        total: time until the last token.
        gained: tokens that each step of ``decodes`` gained; (): one of each sequence.
    """

    batch: int
    input_len: int
    output_len: int
    prefill: float
    decodes: tuple[float, ...]
    total: float
    gained: tuple[int, ...] = ()

    @property
    def prefill_throughput(self) -> float:
        """Prompt tokens per second."""
        return self.batch * self.input_len / self.prefill

    @property
    def steady(self) -> tuple[float, ...]:
        """Durations of the decode steps without the first ones, or of all if they are too few."""
        return self.decodes[self._settling :]

    @property
    def _settling(self) -> int:
        """Number of decode steps that statistics leave out."""
        return SETTLING_STEPS if len(self.decodes) >= 4 * SETTLING_STEPS else 0

    @property
    def median_decode(self) -> float:
        return float(np.median(self.steady)) if self.decodes else 0.0

    @property
    def mean_decode(self) -> float:
        return float(np.mean(self.steady)) if self.decodes else 0.0

    @property
    def decode_throughput(self) -> float:
        """Tokens per second at the median step; 0 if there was no decode step.

        The tokens of a step are the mean of all steps.
        """
        if not self.decodes:
            return 0.0
        gained = np.mean(self.gained[self._settling :]) if self.gained else self.batch
        return float(gained) / self.median_decode

    @property
    def throughput(self) -> float:
        """Prompt and output tokens per second over the whole run."""
        return self.batch * (self.input_len + self.output_len) / self.total


def random_ids(rng: random.Random, batch: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def run_static_batch(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> BatchTimes:
    """Submit all prompts at once and generate ``output_len`` tokens for each, ignoring EOS.

    Nothing else may run in ``llm``. A step in which only some of the sequences get a token does not
    count as a decode step. The groups of data-parallel attention report their tokens separately, so
    their reports are added up until every sequence has a token.

    Raises:
        GlowplugError: a sequence ended before its length, so the measured times are meaningless.
    """
    from glowplug.core.step.request import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = now = time.perf_counter()
    open_streams = {llm.submit(prompt, params) for prompt in prompts}
    steps = _Steps(len(prompts), llm.plan.sizes.groups > 1)
    while open_streams:
        deltas = llm.poll()
        now = time.perf_counter()
        steps.add(deltas, now)
        for stream, delta in deltas:
            if stream.done:
                open_streams.discard(stream)
            _check_end(delta, prompts)
    decodes = tuple(later - earlier for earlier, later in zip(steps.ends, steps.ends[1:]))
    sizes = len(prompts), len(prompts[0]), output_len
    prefill = steps.ends[0] - started if steps.ends else 0.0
    return BatchTimes(*sizes, prefill, decodes, now - started, tuple(steps.gained))


class _Steps:
    """The steps of a static batch, found from the tokens of each poll.

    Attributes:
        ends: the time when every sequence had its first token, then the end of each decode step.
        gained: tokens that each decode step gained.
    """

    def __init__(self, sequences: int, has_groups: bool) -> None:
        self.ends: list[float] = []
        self.gained: list[int] = []
        self._sequences = sequences
        self._has_groups = has_groups
        self._step: Counter[Stream] = Counter()

    def add(self, deltas: Iterable[tuple[Stream, Delta]], now: float) -> None:
        """Add the tokens of a poll, and end the step if every sequence has some."""
        if self.ends and not self._has_groups:
            self._step.clear()
        for stream, delta in deltas:
            if delta.token_ids:
                self._step[stream] += len(delta.token_ids)
        if len(self._step) < self._sequences:
            return
        if self.ends:
            self.gained.append(self._step.total())
        self.ends.append(now)
        self._step.clear()


def _check_end(delta: Delta, prompts: Sequence[list[int]]) -> None:
    """Raise GlowplugError if a sequence of the batch ``prompts`` ended before its length."""
    if delta.finish_reason not in (None, "length"):
        raise GlowplugError(
            f"a sequence of the batch of {len(prompts)} x {len(prompts[0])} ended with "
            f"{delta.finish_reason!r} ({delta.error or 'no reason given'})"
        )


def traced(llm: LLM, label: str, work: Callable[[], object]) -> Path:
    """Run ``work`` under torch's profiler and return the path of the Chrome trace.

    NOTE: tracing slows the run down, so its time is never reported.
    """
    from glowplug.core.engine.profiling import profile_folder  # imports torch

    llm.control("profile_start", label=label)
    work()
    return profile_folder() / str(llm.control("profile_stop")["file"])


def median_run(runs: Sequence[BatchTimes]) -> BatchTimes:
    """Return the run with the median total time; of two middle runs, the faster one."""
    return sorted(runs, key=lambda run: run.total)[(len(runs) - 1) // 2]

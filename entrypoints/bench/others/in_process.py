"""What the in-process benchmarks share: engine options, a static batch with its step times, several
runs' median.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from glowplug.core.errors import GlowplugError

if TYPE_CHECKING:
    from glowplug.entrypoints.front.llm import LLM


SETTLING = (
    4  #: decode steps at the start that statistics leave out, when there are four times as many
)


@dataclass(frozen=True)
class BatchTimes:
    """One static batch, from submit to the last token. Seconds.

    Attributes:
        batch, input_len, output_len: its shape, in sequences and tokens.
        prefill: until every sequence had its first token.
        decodes: one entry for each step in which every sequence got a token.
        total: until the last token.
    """

    batch: int
    input_len: int
    output_len: int
    prefill: float
    decodes: tuple[float, ...]
    total: float

    @property
    def prefill_throughput(self) -> float:
        """Prompt tokens a second."""
        return self.batch * self.input_len / self.prefill

    @property
    def steady(self) -> tuple[float, ...]:
        """The decode steps once they have settled."""
        return self.decodes[SETTLING:] if len(self.decodes) >= 4 * SETTLING else self.decodes

    @property
    def median_decode(self) -> float:
        return float(np.median(self.steady)) if self.decodes else 0.0

    @property
    def mean_decode(self) -> float:
        return float(np.mean(self.steady)) if self.decodes else 0.0

    @property
    def decode_throughput(self) -> float:
        """Tokens a second at the median step; 0 when there was no decode step."""
        return self.batch / self.median_decode if self.decodes else 0.0

    @property
    def throughput(self) -> float:
        """Prompt and output tokens a second over the whole."""
        return self.batch * (self.input_len + self.output_len) / self.total


def random_ids(rng: random.Random, batch: int, length: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def run_static_batch(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> BatchTimes:
    """All prompts at once, ``output_len`` tokens each, end-of-sequence ignored. Nothing else may
    run in ``llm``.

    A step in which only some of them get a token does not count as a decode step. GlowplugError
    when a sequence ends
    before its length: numbers of such a run would mean nothing.
    """
    from glowplug.core.step.request import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    begun = now = time.perf_counter()
    waiting = {llm.submit(prompt, params) for prompt in prompts}
    open_streams = set(waiting)
    prefill = 0.0
    marks = []
    while open_streams:
        deltas = llm.poll()
        now = time.perf_counter()
        advanced = sum(bool(delta.token_ids) for _, delta in deltas)
        for stream, delta in deltas:
            if delta.token_ids:
                waiting.discard(stream)
            if stream.done:
                open_streams.discard(stream)
            if delta.finish_reason not in (None, "length"):
                raise GlowplugError(
                    f"a sequence of the batch of {len(prompts)} x {len(prompts[0])} ended with "
                    f"{delta.finish_reason!r} ({delta.error or 'no reason given'})"
                )
        if waiting or not deltas:
            continue
        if not prefill:
            prefill = now - begun
            marks.append(now)
        elif advanced == len(prompts):
            marks.append(now)
    decodes = tuple(later - earlier for earlier, later in zip(marks, marks[1:]))
    return BatchTimes(len(prompts), len(prompts[0]), output_len, prefill, decodes, now - begun)


def traced(llm: LLM, label: str, work: Callable[[], object]) -> Path:
    """``work`` once more under torch's profiler; the Chrome trace. NOTE: tracing slows it down, so
    it never counts.
    """
    from glowplug.core.engine.profiling import profile_folder  # here, since it needs torch

    llm.control("profile_start", label=label)
    work()
    return profile_folder() / str(llm.control("profile_stop")["file"])


def median_run(runs: Sequence[BatchTimes]) -> BatchTimes:
    """The run of median total time (the lower of the middle two)."""
    return sorted(runs, key=lambda run: run.total)[(len(runs) - 1) // 2]

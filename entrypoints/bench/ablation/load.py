"""The loads of an ablation's row: one query at a time, and requests at a fixed concurrency."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.load.metrics import summarize
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.draft_settings import read_prompts
from glowplug.entrypoints.bench.others.drafts import acceptance, counted

if TYPE_CHECKING:
    from glowplug.entrypoints.front.delta import Delta
    from glowplug.entrypoints.front.front import Stream
    from glowplug.entrypoints.front.llm import LLM

#: output tokens of each request that warms up a load: with 8 tokens on one H200, steps of prompts
#: beside many decoding rows met kernels that were not compiled yet, and the first row lost a quarter
WARM_TOKENS = 32
PERCENTILES = (99.0,)


@dataclass(frozen=True)
class AblationLoad:
    """The requests that every row of an ablation is measured with.

    Attributes:
        queries: number of single queries.
        repeat: rounds over the single queries.
        output_len: most output tokens of a request.
        levels: concurrencies of the throughput table.
        prompts: requests at each level.
        input_len: tokens of random prompts; None: texts.
        shared_len: leading tokens that all random prompts have in common.
        file: JSON lines with texts; None: built-in questions.
    """

    queries: int
    repeat: int
    output_len: int
    levels: tuple[int, ...]
    prompts: tuple[int, ...]
    input_len: int | None = None
    shared_len: int = 0
    file: str | None = None

    @property
    def ignore_eos(self) -> bool:
        """True if answers have ``output_len`` tokens each, as those to random prompts have."""
        return self.input_len is not None

    def make(self, llm: LLM, count: int) -> list[list[int]]:
        """Return ``count`` prompts as token ids, the same ones for every engine."""
        if self.input_len is None:
            return read_prompts(llm, Path(self.file) if self.file else None, count)
        vocab = llm.plan.facts.model.vocab_size
        shared = random.Random(0)
        start = [shared.randrange(vocab) for _ in range(self.shared_len)]
        rng = random.Random(1)
        own = self.input_len - self.shared_len
        return [[*start, *(rng.randrange(vocab) for _ in range(own))] for _ in range(count)]


@dataclass
class TimedRequest:
    """Times of a request on the clock of ``time.perf_counter``, in seconds, and its tokens."""

    prompt: list[int]
    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)
    ended: str = ""  #: reason of the end
    error: str | None = None

    @property
    def ok(self) -> bool:
        """True if the request got its answer."""
        return self.ended in ("stop", "length")

    @property
    def latency(self) -> float:
        """Seconds from the request to its last token."""
        return self.last - self.sent

    @property
    def ttft(self) -> float:
        """Seconds from the request to its first token."""
        return self.first - self.sent

    def take(self, delta: Delta, now: float) -> bool:
        """Add new tokens, received at ``now``; return True if the request has ended."""
        if delta.token_ids:
            self.last = now
            self.first = self.first or now
            self.tokens.extend(delta.token_ids)
        self.ended = delta.finish_reason or ""
        self.error = delta.error
        return bool(self.ended)


def run_requests(
    llm: LLM, prompts: Sequence[list[int]], output_len: int, ignore_eos: bool, concurrency: int
) -> list[TimedRequest]:
    """Generate greedy answers to ``prompts`` with at most ``concurrency`` requests in flight."""
    most = min(concurrency, llm.plan.sizes.max_admitted)
    waiting = deque(prompts)
    running: dict[Stream, TimedRequest] = {}
    done: list[TimedRequest] = []
    while waiting or running:
        while waiting and len(running) < most:
            stream, request = _submit(llm, waiting.popleft(), output_len, ignore_eos)
            running[stream] = request
        deltas = llm.poll()
        now = time.perf_counter()
        for stream, delta in deltas:
            if running[stream].take(delta, now):
                done.append(running.pop(stream))
    return done


def _submit(
    llm: LLM, prompt: list[int], output_len: int, ignore_eos: bool
) -> tuple[Stream, TimedRequest]:
    """Start a greedy request of at most ``output_len`` tokens, as far as the context allows."""
    from glowplug.core.step.request import SamplingParams

    room = max(1, min(output_len, llm.plan.sizes.context_length - len(prompt)))
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=ignore_eos)
    sent = time.perf_counter()
    return llm.submit(prompt, params), TimedRequest(prompt, sent)


def measure_single(llm: LLM, load: AblationLoad) -> dict[str, Any]:
    """Measure single queries, each with an empty prefix cache, and return their figures.

    The figures are medians over the rounds.

    Raises:
        GlowplugError: a query failed.
    """
    prompts = load.make(llm, load.queries)
    run_requests(llm, prompts[:1], load.output_len, load.ignore_eos, 1)
    before = counted(llm)
    rounds = [_round(llm, load, prompts) for _ in range(load.repeat)]
    drafts = acceptance(before, counted(llm))
    rates = [_decode_rate(requests) for requests in rounds]
    answers = [one.tokens for one in rounds[0]]
    return {
        "tokens_per_s": median(rates),
        "rates": rates,
        "ttft_ms": 1e3 * median(median(one.ttft for one in requests) for requests in rounds),
        "latency_ms": 1e3 * median(median(one.latency for one in requests) for requests in rounds),
        "output_tokens": sum(map(len, answers)),
        "answers": hashlib.sha256(repr(answers).encode()).hexdigest()[:16],
        **drafts,
    }


def _decode_rate(requests: Sequence[TimedRequest]) -> float:
    """Return the output tokens per second of requests, from the first token of each on."""
    seconds = sum(one.last - one.first for one in requests)
    return sum(len(one.tokens) - 1 for one in requests) / max(seconds, 1e-9)


def _round(llm: LLM, load: AblationLoad, prompts: Sequence[list[int]]) -> list[TimedRequest]:
    """Answer the single queries, one after another."""
    found = []
    for prompt in prompts:
        llm.control("flush")
        found += run_requests(llm, [prompt], load.output_len, load.ignore_eos, 1)
    _check(found)
    return found


def _check(requests: Sequence[TimedRequest]) -> None:
    """Raise GlowplugError if a request failed."""
    for one in requests:
        if not one.ok:
            raise GlowplugError(f"a request ended with {one.ended!r}: {one.error or 'no reason'}")


def measure_level(llm: LLM, load: AblationLoad, concurrency: int, count: int) -> dict[str, Any]:
    """Measure ``count`` requests with ``concurrency`` of them in flight, and return the record.

    A warm-up comes first, and the prefix cache is empty at the start.

    Raises:
        GlowplugError: no request succeeded.
    """
    prompts = load.make(llm, count)
    run_requests(llm, prompts[:concurrency], WARM_TOKENS, load.ignore_eos, concurrency)
    llm.control("flush")
    before = counted(llm)
    stats = asdict(llm.stats)
    started = time.perf_counter()
    requests = run_requests(llm, prompts, load.output_len, load.ignore_eos, concurrency)
    duration = time.perf_counter() - started
    drafts = acceptance(before, counted(llm))
    done = [one for one in requests if one.ok]
    if not done:
        _check(requests)
    after = asdict(llm.stats)
    return {
        "concurrency": concurrency,
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "duration": duration,
        **_rates(done, duration),
        **drafts,
        "cached_tokens": after["cached_tokens"] - stats["cached_tokens"],
        "preemptions": after["preemptions"] - stats["preemptions"],
        "device_idle_share": report.idle_share(stats, after),
    }


def _rates(done: Sequence[TimedRequest], duration: float) -> dict[str, float]:
    """Return throughput and latency of the requests that succeeded in ``duration`` seconds.

    ``request_decode_throughput`` is the mean over requests of tokens by the time from the request
    to its last token; ``total_throughput`` has prompt and output tokens.
    """
    inputs = sum(len(one.prompt) for one in done)
    outputs = sum(len(one.tokens) for one in done)
    rates = [len(one.tokens) / max(one.latency, 1e-9) for one in done]
    gaps = [(one.last - one.first) / (len(one.tokens) - 1) for one in done if len(one.tokens) > 1]
    return {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_throughput": (inputs + outputs) / duration,
        "output_throughput": outputs / duration,
        "request_decode_throughput": sum(rates) / len(rates),
        **summarize([one.ttft for one in done], "ttft", PERCENTILES),
        **summarize(gaps, "tpot", PERCENTILES),
    }

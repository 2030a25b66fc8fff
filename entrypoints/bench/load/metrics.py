"""The result record of a run, computed from the outcomes of its requests.

The keys are those of vLLM's ``bench serve``, with SGLang's names as aliases.

TTFT: request sent to first token. TPOT: (last token - first token) / (tokens - 1), one value per
request. ITL: time between two consecutive chunks, one value per gap. E2E: request sent to last
token. The record has them in milliseconds.

``per_user_throughput`` is the output throughput divided by the concurrency, as in the published
tables; ``mean_request_output_throughput`` is the mean over requests of output tokens / duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glowplug.entrypoints.bench.load.backends import Outcome

SCHEMA_VERSION = 1
METRICS = ("ttft", "tpot", "itl", "e2el")

Record = dict[str, Any]


def summarize(values: Sequence[float], name: str, percentiles: Sequence[float]) -> dict[str, float]:
    """Return statistics of ``values`` (seconds) as ``{mean_<name>_ms: ...}``.

    Mean, median, standard deviation, maximum and the given percentiles; all 0 if there are no
    values.
    """
    data = np.asarray(values if len(values) else [0.0], dtype=np.float64) * 1e3
    found = {
        f"mean_{name}_ms": float(data.mean()),
        f"median_{name}_ms": float(np.median(data)),
        f"std_{name}_ms": float(data.std()),
        f"max_{name}_ms": float(data.max()),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(data, percentile))
    return found


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse the limits of goodput, ``["ttft:200", "tpot:50"]``, into milliseconds by metric.

    Raises:
        ValueError: unknown metric or bad number.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in {"ttft", "tpot", "e2el"}:
            raise ValueError(f"unknown goodput metric {name!r}: use ttft, tpot or e2el")
        limits[name] = float(value)
    return limits


def is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    measured = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return outcome.ok and all(measured[name] * 1e3 <= limit for name, limit in limits.items())


@dataclass(frozen=True)
class Peaks:
    """Peak load of a run.

    Attributes:
        tokens_per_s: most output tokens in any second of the run.
        concurrent: most requests in flight at once.
    """

    tokens_per_s: float
    concurrent: int


def peaks(outcomes: Sequence[Outcome]) -> Peaks:
    """Return the peak load of a run, over the requests that succeeded."""
    done = [outcome for outcome in outcomes if outcome.ok]
    if not done:
        return Peaks(0.0, 0)
    origin = min(outcome.start for outcome in done)
    seconds: dict[int, float] = {}
    for outcome in done:
        share = outcome.output_tokens / len(outcome.arrivals)  # a chunk may carry several tokens
        for arrival in outcome.arrivals:
            bucket = int(arrival - origin)
            seconds[bucket] = seconds.get(bucket, 0.0) + share
    changes = sorted(
        [(outcome.start, 1) for outcome in done] + [(outcome.end, -1) for outcome in done]
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return Peaks(max(seconds.values()), most)


def measure(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    percentiles: Sequence[float] = (90, 95, 99),
    goodput: dict[str, float] | None = None,
) -> Record:
    """Return the metrics of a run: request counts, throughputs and latencies.

    Failed requests count only in ``failed``.
    """
    done = [outcome for outcome in outcomes if outcome.ok]
    record = _totals(outcomes, done, duration, goodput or {})
    record |= summarize([o.ttft for o in done], "ttft", percentiles)
    record |= summarize([o.tpot for o in done if o.output_tokens > 1], "tpot", percentiles)
    record |= summarize([gap for o in done for gap in o.itls], "itl", percentiles)
    record |= summarize([o.latency for o in done], "e2el", percentiles)
    return with_aliases(record)


def _totals(
    outcomes: Sequence[Outcome],
    done: Sequence[Outcome],
    duration: float,
    goodput: dict[str, float],
) -> Record:
    """Return the figures of a run that are no times of single requests.

    Args:
        outcomes: all requests.
        done: those that succeeded.
        duration: seconds of the run.
        goodput: limits of goodput in milliseconds by metric; {}: not measured.
    """
    inputs = sum(o.prompt_tokens for o in done)
    outputs = sum(o.output_tokens for o in done)
    top = peaks(outcomes)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "request_goodput": sum(is_good(o, goodput) for o in outcomes) / duration
        if goodput
        else None,
        "goodput_limits_ms": goodput or None,
        "max_output_tokens_per_s": top.tokens_per_s,
        "max_concurrent_requests": top.concurrent,
        "concurrency": sum(o.latency for o in done) / duration,
        "mean_request_output_throughput": request_throughput(done),
    }


def with_aliases(record: Record) -> Record:
    """Return ``record`` with its values also under the names that SGLang gives them."""
    record["total_throughput"] = record["total_token_throughput"]
    for key in [key for key in record if key.endswith("_e2el_ms")]:
        record[key.replace("_e2el_ms", "_e2e_latency_ms")] = record[key]
    return record


def request_throughput(done: Sequence[Outcome]) -> float:
    """Return the mean of (output tokens / duration) over requests, in tokens per second.

    The duration of a request ends with its last token. The result is 0 without requests.
    """
    rates = [o.output_tokens / o.latency for o in done if o.latency > 0]
    return float(np.mean(rates)) if rates else 0.0


def per_user_throughput(record: Mapping[str, Any]) -> float | None:
    """Return the output throughput divided by the concurrency, in tokens per second.

    The concurrency is the limit ``max_concurrency``, or the measured mean without a limit.

    Returns:
        The quotient; None if the record lacks one of the two figures.
    """
    throughput = record.get("output_throughput")
    users = record.get("max_concurrency") or record.get("concurrency")
    return None if throughput is None or not users else float(throughput / users)


def details(outcomes: Sequence[Outcome]) -> Record:
    """Return the values of each request for ``--output-details``; times are in seconds."""
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }

"""From outcomes to one result record. Keys are those of vLLM's ``bench serve``, with SGLang's names
beside them.

TTFT: request sent to first token. TPOT: (last token - first token) / (tokens - 1), one value a
request. ITL: time between two consecutive chunks, one value a gap. E2E: request sent to last token.
Milliseconds in the record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glowplug.entrypoints.bench.load.backends import Outcome

SCHEMA_VERSION = 1
METRICS = ("ttft", "tpot", "itl", "e2el")

Record = dict[str, Any]


def summarize(values: Sequence[float], name: str, percentiles: Sequence[float]) -> dict[str, float]:
    """mean, median, std, max and percentiles of seconds, as ``{mean_<name>_ms: ...}``; zeros when
    there are none.
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
    """``["ttft:200", "tpot:50"]`` -> milliseconds by metric. ValueError for an unknown metric or a
    bad number.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in {"ttft", "tpot", "e2el"}:
            raise ValueError(f"goodput knows ttft, tpot and e2el, not {name!r}")
        limits[name] = float(value)
    return limits


def is_good(outcome: Outcome, limits: dict[str, float]) -> bool:
    measured = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return outcome.ok and all(measured[name] * 1e3 <= limit for name, limit in limits.items())


@dataclass(frozen=True)
class Peaks:
    """Most output tokens in any second of the run, and most requests in flight at once."""

    tokens_per_s: float
    concurrent: int


def peaks(outcomes: Sequence[Outcome]) -> Peaks:
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
    """The measured part of a record. Failed requests count in ``failed`` and nowhere else."""
    done = [outcome for outcome in outcomes if outcome.ok]
    inputs = sum(o.prompt_tokens for o in done)
    outputs = sum(o.output_tokens for o in done)
    top = peaks(outcomes)
    record: Record = {
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
        "max_output_tokens_per_s": top.tokens_per_s,
        "max_concurrent_requests": top.concurrent,
        "concurrency": sum(o.latency for o in done) / duration,
    }
    record |= summarize([o.ttft for o in done], "ttft", percentiles)
    record |= summarize([o.tpot for o in done if o.output_tokens > 1], "tpot", percentiles)
    record |= summarize([gap for o in done for gap in o.itls], "itl", percentiles)
    record |= summarize([o.latency for o in done], "e2el", percentiles)
    return with_aliases(record)


def with_aliases(record: Record) -> Record:
    """SGLang's names for the same values."""
    record["total_throughput"] = record["total_token_throughput"]
    for key in [key for key in record if key.endswith("_e2el_ms")]:
        record[key.replace("_e2el_ms", "_e2e_latency_ms")] = record[key]
    mean_tpot = record["mean_tpot_ms"]
    record["per_user_throughput"] = 1e3 / mean_tpot if mean_tpot else math.nan
    return record


def details(outcomes: Sequence[Outcome]) -> Record:
    """Per-request lists, for ``--output-details``. Times in seconds."""
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }

"""Names and bucket edges of the metrics.

Our names are vLLM's with another prefix; ``compat_names.py`` has those of other engines.
"""

from __future__ import annotations

from collections.abc import Callable

from glowplug.core.step.draft_counts import Acceptance
from glowplug.core.step.messages import Stats

TTFT_EDGES = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
ITL_EDGES = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
LATENCY_EDGES = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
LENGTH_EDGES = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10000,
    20000,
    50000,
    100000,
    200000,
)
N_EDGES = (1, 2, 5, 10, 20, 50, 128)


def pool_usage(stats: Stats) -> float:
    """Return the share of the KV pool's pages that running sequences hold, 0 to 1.

    Cached pages that can be evicted count as free.
    """
    if not stats.pages_total:
        return 0.0
    return 1.0 - (stats.pages_free + stats.pages_evictable) / stats.pages_total


def hit_rate(stats: Stats) -> float:
    """Return the prefix cache's hit rate since start: tokens found / prompt tokens looked up."""
    return stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens)


def per_busy_second(tokens: int, busy: float) -> float:
    """Return tokens per second of ``busy``, the seconds in which steps ran; 0.0 for 0 seconds."""
    return tokens / busy if busy else 0.0


def _verify_steps(stats: Stats) -> int:
    return Acceptance(stats.drafts).verify_steps


def _accept_length(stats: Stats) -> float:
    """Return the mean tokens that a verify step of a sequence gains, since start; 1.0 without."""
    return Acceptance(stats.drafts).length or 1.0


def _accept_rate(stats: Stats) -> float:
    """Return the share of drafts accepted since start; 0.0 without a draft."""
    return Acceptance(stats.drafts).rate or 0.0


def _drafts_by_position(stats: Stats) -> list[tuple[str, float]]:
    """Return the verify steps whose drafts reached each position, numbered from 0."""
    return [(str(at), count) for at, count in enumerate(Acceptance(stats.drafts).proposed_at)]


def _accepted_by_position(stats: Stats) -> list[tuple[str, float]]:
    """Return the verify steps that accepted the draft at each position, numbered from 0."""
    return [(str(at), count) for at, count in enumerate(Acceptance(stats.drafts).accepted_at)]


def _steps_by_shape(stats: Stats) -> list[tuple[str, float]]:
    return [(counts.shape, counts.engine_steps) for counts in stats.drafts]


#: (name, kind, help, value) of each series that the engine counts
STATS_SERIES: tuple[tuple[str, str, str, Callable[[Stats], float]], ...] = (
    ("num_requests_running", "gauge", "Sequences running.", lambda s: s.running),
    ("num_requests_waiting", "gauge", "Sequences waiting.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "gauge", "Share of the KV pool in use, 0 to 1.", pool_usage),
    (
        "kv_used_tokens",
        "gauge",
        "KV slots in use (one per token).",
        lambda s: (s.pages_total - s.pages_free - s.pages_evictable) * s.page_size,
    ),
    (
        "kv_available_tokens",
        "gauge",
        "KV slots that are free.",
        lambda s: s.pages_free * s.page_size,
    ),
    (
        "kv_evictable_tokens",
        "gauge",
        "KV slots held by the prefix cache only.",
        lambda s: s.pages_evictable * s.page_size,
    ),
    (
        "max_total_num_tokens",
        "gauge",
        "KV slots of the pool.",
        lambda s: s.pages_total * s.page_size,
    ),
    (
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_query_tokens,
    ),
    (
        "prefix_cache_hits_total",
        "counter",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_hit_tokens,
    ),
    (
        "cache_hit_rate",
        "gauge",
        "Share of the looked-up prompt tokens found in the prefix cache, since start.",
        hit_rate,
    ),
    (
        "prefix_cache_lookups_total",
        "counter",
        "Look-ups in the prefix cache, one per admission.",
        lambda s: s.prefix_queries,
    ),
    (
        "prefix_cache_lookup_hits_total",
        "counter",
        "Look-ups that found a prefix.",
        lambda s: s.prefix_hits,
    ),
    ("kv_tier_pages", "gauge", "Pages in the prefix cache's tier.", lambda s: s.tier_pages),
    (
        "kv_tier_pages_max",
        "gauge",
        "Pages that the prefix cache's tier can hold.",
        lambda s: s.tier_pages_total,
    ),
    (
        "kv_tier_hits_total",
        "counter",
        "Admissions that brought pages back from the prefix cache's tier.",
        lambda s: s.tier_hits,
    ),
    (
        "kv_tier_hit_tokens_total",
        "counter",
        "Prompt tokens brought back from the prefix cache's tier.",
        lambda s: s.tier_hit_tokens,
    ),
    (
        "kv_tier_pages_out_total",
        "counter",
        "Pages copied to the prefix cache's tier.",
        lambda s: s.tier_pages_out,
    ),
    (
        "kv_tier_pages_back_total",
        "counter",
        "Pages copied back from the prefix cache's tier.",
        lambda s: s.tier_pages_back,
    ),
    (
        "kv_tier_bytes_out_total",
        "counter",
        "Bytes copied to the prefix cache's tier, on each rank.",
        lambda s: s.tier_bytes_out,
    ),
    (
        "kv_tier_bytes_back_total",
        "counter",
        "Bytes copied back from the prefix cache's tier, on each rank.",
        lambda s: s.tier_bytes_back,
    ),
    (
        "num_preemptions_total",
        "counter",
        "Preemptions: running sequences that lost their KV pages.",
        lambda s: s.preemptions,
    ),
    ("num_aborted_requests_total", "counter", "Sequences aborted.", lambda s: s.aborted),
    (
        "prompt_tokens_per_second",
        "gauge",
        "Prompt tokens per second of busy time, since start.",
        lambda s: per_busy_second(s.prompt_tokens, s.busy_seconds),
    ),
    (
        "generation_tokens_per_second",
        "gauge",
        "Output tokens per second of busy time, since start.",
        lambda s: per_busy_second(s.output_tokens, s.busy_seconds),
    ),
    (
        "engine_busy_seconds_total",
        "counter",
        "Time in which steps ran, in any group.",
        lambda s: s.busy_seconds,
    ),
    ("engine_steps_total", "counter", "Steps of the engine.", lambda s: s.steps),
    ("engine_step_seconds_total", "counter", "Host time in steps.", lambda s: s.step_seconds),
    (
        "engine_bubble_seconds_total",
        "counter",
        "Time in which the device waited for the host.",
        lambda s: s.bubble_seconds,
    ),
    (
        "spec_decode_num_drafts_total",
        "counter",
        "Verify steps of sequences: steps in which a sequence decodes with drafts.",
        _verify_steps,
    ),
    (
        "spec_decode_num_draft_tokens_total",
        "counter",
        "Tokens drafted.",
        lambda s: s.drafted_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Drafted tokens accepted.",
        lambda s: s.accepted_tokens,
    ),
    (
        "spec_accept_length",
        "gauge",
        "Mean tokens per verify step of a sequence, since start.",
        _accept_length,
    ),
    ("spec_accept_rate", "gauge", "Share of drafted tokens accepted, since start.", _accept_rate),
    (
        "spec_acceptance_falls_total",
        "counter",
        "Times that the acceptance of drafts fell far below that of the start.",
        lambda s: s.acceptance_falls,
    ),
    (
        "grammar_masked_steps_total",
        "counter",
        "Steps with a mask of a grammar.",
        lambda s: s.masked_steps,
    ),
    (
        "grammar_mask_waits_total",
        "counter",
        "Masked steps in which the device waited for the mask.",
        lambda s: s.mask_waits,
    ),
    (
        "grammar_mask_seconds_total",
        "counter",
        "Host time spent on masks.",
        lambda s: s.mask_seconds,
    ),
    (
        "grammar_mask_wait_seconds_total",
        "counter",
        "Time between the end of the model's pass and the masks, on the device.",
        lambda s: s.mask_wait_seconds,
    ),
)

#: (name, help, label, (value of the label, value of the series)) of counters with a label
LABELLED_SERIES: tuple[tuple[str, str, str, Callable[[Stats], list[tuple[str, float]]]], ...] = (
    (
        "spec_decode_num_drafts_per_pos_total",
        "Verify steps of sequences whose drafts reach the position.",
        "position",
        _drafts_by_position,
    ),
    (
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Drafted tokens accepted, by position.",
        "position",
        _accepted_by_position,
    ),
    (
        "spec_decode_steps_total",
        "Steps with decoding sequences, by shape of the drafts (steps/topk/draft_tokens).",
        "shape",
        _steps_by_shape,
    ),
)

#: series that are also exported for each data-parallel group, as ``group_...``
BY_GROUP = frozenset(
    {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_hit_rate"}
)

"""Metrics under the names of vLLM (V1) and SGLang.

A name is exported only if the series means the same there and here: same events, same unit. Names
are those of ``vllm/v1/metrics/loggers.py``, ``vllm/v1/spec_decode/metrics.py`` and
``sglang/srt/metrics/collector.py``. A counter has the suffix ``_total``, which their client library
adds.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}


class PublishedSeries(NamedTuple):
    """A series under another engine's name.

    Attributes:
        name: the name there, without the prefix.
        ours: our name of the same series, without the prefix.
        labels: labels that the series has there beside ``model_name`` and its own.
    """

    name: str
    ours: str
    labels: dict[str, str]


def _vllm(ours: str, name: str = "") -> PublishedSeries:
    return PublishedSeries(name or ours, ours, {"engine": "0"})


def _scheduler(name: str, ours: str) -> PublishedSeries:
    """Return a series of SGLang's scheduler, with the labels of its rank."""
    return PublishedSeries(name, ours, SCHEDULER)


def _tokenizer(name: str, ours: str = "") -> PublishedSeries:
    """Return a series of SGLang's tokenizer manager, which has no label of a rank."""
    return PublishedSeries(name, ours or name, {})


#: prefix -> the series that this engine exports under its names
COMPAT: dict[str, tuple[PublishedSeries, ...]] = {
    "vllm": (
        *map(
            _vllm,
            (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "prefix_cache_queries_total",
                "prefix_cache_hits_total",
                "num_preemptions_total",
                "prompt_tokens_total",
                "generation_tokens_total",
                "request_success_total",
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_inference_time_seconds",
                "spec_decode_num_drafts_total",
                "spec_decode_num_draft_tokens_total",
                "spec_decode_num_accepted_tokens_total",
                "spec_decode_num_accepted_tokens_per_pos_total",
                "request_prompt_tokens",
                "request_generation_tokens",
                "request_params_n",
                "request_params_max_tokens",
            ),
        ),
        # names that vLLM has replaced, which many dashboards still have
        _vllm("inter_token_latency_seconds", "time_per_output_token_seconds"),
        _vllm("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        _vllm("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        _vllm("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    ),
    "sglang": (
        _scheduler("num_running_reqs", "num_requests_running"),
        _scheduler("num_queue_reqs", "num_requests_waiting"),
        _scheduler("num_used_tokens", "kv_used_tokens"),
        _scheduler("token_usage", "kv_cache_usage_perc"),
        _scheduler("max_total_num_tokens", "max_total_num_tokens"),
        _scheduler("num_retracted_requests_total", "num_preemptions_total"),
        _scheduler("queue_time_seconds", "request_queue_time_seconds"),
        _tokenizer("prompt_tokens_total"),
        _tokenizer("generation_tokens_total"),
        _tokenizer("cached_tokens_total"),
        _tokenizer("num_requests_total", "num_sequences_total"),
        _tokenizer("num_aborted_requests_total"),
        _tokenizer("time_to_first_token_seconds"),
        _tokenizer("inter_token_latency_seconds"),
        _tokenizer("e2e_request_latency_seconds"),
        _tokenizer("prompt_tokens_histogram", "request_prompt_tokens"),
        _tokenizer("generation_tokens_histogram", "request_generation_tokens"),
        _tokenizer("spec_verify_calls_total", "spec_decode_num_drafts_total"),
    ),
}

_INTERVAL = "there the mean of the last log interval, here since the start: use {} over a window"
_UNMEASURED = "not measured"

#: prefix -> published name -> why this engine does not export it
ABSENT: dict[str, dict[str, str]] = {
    "vllm": {
        "iteration_tokens_total": "steps are counted, not sampled: `engine_steps_total` and the "
        "token counters give the mean",
        "request_max_num_generation_tokens": "the longest of a request's choices; here each choice "
        "is one value of `request_generation_tokens`",
        "time_per_prefill_token_request_seconds": "`request_prefill_time_seconds` and "
        "`request_prompt_tokens` give the mean",
        "cache_config_info": "`/server_info` has the plan; most of its labels are vLLM's options",
        "lora_requests_info": "no adapters",
        "num_requests_swapped": "preempted sequences are recomputed, nothing is swapped",
        "cpu_cache_usage_perc": "the KV cache is on the device only",
    },
    "sglang": {
        "gen_throughput": _INTERVAL.format("`generation_tokens_total` per busy second"),
        "cache_hit_rate": _INTERVAL.format(
            "`prefix_cache_hits_total` per `prefix_cache_queries_total`"
        ),
        "spec_accept_length": _INTERVAL.format(
            "`spec_decode_num_accepted_tokens_total` per `spec_decode_num_drafts_total`"
        ),
        "spec_accept_rate": _INTERVAL.format(
            "`spec_decode_num_accepted_tokens_total` per `spec_decode_num_draft_tokens_total`"
        ),
        "num_retracted_reqs": "a gauge of the last step: use `num_retracted_requests_total`",
        "num_retractions": _UNMEASURED,
        "num_so_requests_total": "`grammar_masked_steps_total` counts steps, not requests",
        "num_grammar_queue_reqs": "grammars are compiled before a request is queued",
        "per_stage_req_latency_seconds": "the phases are histograms of their own, `request_..`",
        "decode_sum_seq_lens": _UNMEASURED,
        "utilization": "SGLang's own estimate of the best load",
        "realtime_tokens_total": "use `prompt_tokens_total` and `generation_tokens_total`",
        "gpu_execution_seconds_total": "`engine_busy_seconds_total` is the host's clock",
        "cuda_graph_passes_total": _UNMEASURED,
        "engine_startup_time": "`/server_info` has the seconds of each start-up phase",
        "swa_token_usage": "no sliding-window layers",
        "mamba_usage": "no state-space layers",
        "num_running_reqs_offline_batch": "no offline class of requests",
        "num_prefill_prealloc_queue_reqs": "prefill and decode run in one engine",
        "kv_transfer_speed_gb_s": "prefill and decode run in one engine",
    },
}

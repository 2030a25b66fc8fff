"""Every engine flag: its names, the configuration field it sets, and how its value is converted.

Names follow the DeepSeek recipes published for other engines, so that such a command works with
only the program's name changed. A flag sets its field even if no plugin registers the component;
the plan then refuses the component by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Convert = Callable[[str], Any]


@dataclass(frozen=True)
class Flag:
    """A flag and the configuration field it sets.

    Attributes:
        names: spellings; underscores count as hyphens.
        path: dotted field; ``parallel[tensor].size`` is a field of the list item with that ``use``.
        help: description for ``--help``.
        convert: conversion of the text on the command line; None for a switch.
        value: value that a switch sets.
        also: further fields that the flag sets, by path.
        values: this engine's value by another engine's name for it.
        many: whether the flag takes several values.
    """

    names: tuple[str, ...]
    path: str
    help: str
    convert: Convert | None = str
    value: Any = True
    also: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    many: bool = False


def byte_count(text: str) -> int:
    """Parse a number of bytes such as "1000", "25G" or "1.5g".

    Capital letters are powers of 1024, small letters powers of 1000.

    Raises:
        ValueError: the text has another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    number, unit = match.groups()
    base = 1024.0 if unit.isupper() else 1000.0
    power = " kmgt".index(unit.lower() or " ")
    return round(float(number) * float(base**power))


def text_list(text: str) -> list[str]:
    """Parse a JSON list of strings.

    Raises:
        ValueError: the text is not one.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(text)
    return found


DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}
KV_DTYPES = {**DTYPES, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
#: NOTE: published DeepSeek commands call drafting with the NextN layer EAGLE
ALGORITHMS = {
    "NEXTN": "nextn",
    "EAGLE": "nextn",
    "eagle": "nextn",
    "MTP": "nextn",
    "DEEPSEEK_MTP": "nextn",
    "mtp": "nextn",
    "deepseek_mtp": "nextn",
    "EAGLE3": "eagle3",
    "NGRAM": "ngram",
}
POLICIES = {"lpm": "longest_prefix", "longest-prefix": "longest_prefix"}
EXECUTORS = {"mp": "multiprocess", "uni": "inline", "external_launcher": "torchrun"}
FORMATS = {"dummy": "random", "safetensors": "safetensors"}


def switch(names: str, path: str, value: Any, help: str, **more: Any) -> Flag:
    """Return a flag without a value. ``names``: its spellings, separated by blanks."""
    return Flag(tuple(names.split()), path, help, convert=None, value=value, **more)


FLAGS: tuple[Flag, ...] = (
    # model and numbers
    Flag(
        ("--model", "--model-path"),
        "model",
        'folder, file, id of a downloaded hub model, or "embedded"',
    ),
    Flag(
        ("--tokenizer-path", "--tokenizer"),
        "tokenizer",
        'tokenizer folder, hub id or "embedded"; default: the tokenizer of the model',
    ),
    Flag(
        ("--chat-template",),
        "chat_template",
        "Jinja file, or the template itself; default: the template of the model",
    ),
    switch(
        "--skip-tokenizer-init",
        "skip_tokenizer",
        True,
        "load no tokenizer: requests and answers hold token ids only",
    ),
    Flag(("--dtype",), "dtype", "compute dtype: auto, float32, bfloat16, float16", values=DTYPES),
    Flag(("--device",), "device", "auto, cpu or cuda"),
    Flag(("--random-seed", "--seed"), "seed", "seed of requests without one", int),
    Flag(
        ("--context-length", "--max-model-len"),
        "context_length",
        "maximum sequence length in tokens",
        int,
    ),
    Flag(("--revision",), "revision", "accepted; nothing is downloaded, the local files are read"),
    switch(
        "--trust-remote-code",
        "trust_remote_code",
        True,
        "accepted; code from a model folder is never run",
    ),
    Flag(
        ("--load-format",),
        "weights.use",
        "weight source: auto, safetensors, dummy (random), or a plugin's name",
        values=FORMATS,
    ),
    Flag(
        ("--quantization",),
        "quantization.use",
        "quantization scheme; default: that of the checkpoint",
    ),
    # attention and KV cache
    Flag(
        ("--attention-backend",),
        "attention.use",
        "attention backend; fa3, flashinfer, triton and torch name the library's backend for "
        "the model's kind of attention",
    ),
    Flag(("--kv-cache-dtype",), "attention.kv_dtype", "dtype of the KV cache", values=KV_DTYPES),
    Flag(("--page-size", "--block-size"), "attention.page_size", "tokens per KV page", int),
    switch(
        "--disable-mla",
        "attention.use",
        "torch_mla",
        "attention without weight absorption: the naive reference",
        also={"attention.absorb": False},
    ),
    switch(
        "--enable-flashinfer-mla",
        "attention.use",
        "flashinfer_mla",
        "FlashInfer's latent attention",
    ),
    switch(
        "--enable-prefix-caching",
        "cache.use",
        "radix",
        "share KV pages of common prefixes (the default)",
    ),
    switch(
        "--disable-radix-cache --no-enable-prefix-caching",
        "cache.use",
        "none",
        "disable the prefix cache",
    ),
    # parallelism
    Flag(
        ("--tp-size", "--tp", "--tensor-parallel-size"),
        "parallel[tensor].size",
        "number of tensor-parallel ranks",
        int,
    ),
    Flag(
        ("--ep-size", "--ep", "--expert-parallel-size"),
        "parallel[ep_moe].size",
        "number of expert-parallel ranks",
        int,
    ),
    switch(
        "--enable-ep-moe --enable-expert-parallel",
        "parallel[ep_moe].use",
        "ep_moe",
        "enable expert parallelism",
    ),
    Flag(
        (
            "--dp-size",
            "--dp",
            "--data-parallel-size",
            "--attn-dp-size",
            "--attention-data-parallel-size",
        ),
        "parallel[dp_attention].size",
        "number of data-parallel groups",
        int,
    ),
    switch(
        "--enable-dp-attention",
        "parallel[dp_attention].use",
        "dp_attention",
        "enable data-parallel attention",
    ),
    Flag(
        ("--dist-timeout", "--distributed-timeout-seconds"),
        "collectives.timeout",
        "seconds after which a collective that hangs ends the engine",
        float,
    ),
    Flag(("--nnodes",), "executor.hosts", "number of hosts of the engine", int),
    Flag(("--node-rank",), "executor.host_rank", "number of this host, from 0", int),
    Flag(
        ("--dist-init-addr", "--nccl-init-addr"),
        "executor.address",
        "host:port at which the hosts meet",
    ),
    Flag(
        ("--distributed-executor-backend",),
        "executor.use",
        "executor: multiprocess (mp), torchrun, ray",
        values=EXECUTORS,
    ),
    # speculation
    Flag(
        ("--speculative-algorithm", "--speculative-algo", "--spec-method"),
        "speculative.use",
        "draft algorithm: nextn (EAGLE is the same), ...",
        values=ALGORITHMS,
    ),
    Flag(
        (
            "--speculative-draft-model-path",
            "--speculative-draft",
            "--speculative-draft-model",
            "--spec-model",
            "--speculative-model",
        ),
        "speculative.draft_model",
        "folder of the draft model",
    ),
    Flag(
        ("--speculative-num-steps", "--spec-tokens", "--num-speculative-tokens"),
        "speculative.steps",
        "draft steps: tokens drafted one after another",
        int,
    ),
    Flag(("--speculative-eagle-topk",), "speculative.topk", "branches per drafted token", int),
    Flag(
        ("--speculative-num-draft-tokens",),
        "speculative.draft_tokens",
        "tokens verified per step",
        int,
    ),
    # graphs
    switch("--disable-cuda-graph --enforce-eager", "graphs.use", "eager", "run every step eagerly"),
    Flag(
        ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
        "graphs.batch_sizes",
        "batch sizes to capture",
        int,
        also={"graphs.use": "cuda_graph"},
        many=True,
    ),
    Flag(
        ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        "graphs.max_batch",
        "largest batch size to capture",
        int,
        also={"graphs.use": "cuda_graph"},
    ),
    switch(
        "--enable-torch-compile",
        "ops.use",
        "torch_compile",
        "compile the small kernels of small steps with torch.compile",
    ),
    Flag(("--torch-compile-max-bs",), "ops.max_batch", "largest batch size to compile", int),
    switch(
        "--enable-piecewise-cuda-graph --enforce-piecewise-cuda-graph",
        "graphs.prefill",
        True,
        "capture piecewise graphs of small prefill steps (default on one rank)",
        also={"graphs.use": "cuda_graph"},
    ),
    switch(
        "--disable-piecewise-cuda-graph --disable-prefill-cuda-graph",
        "graphs.prefill",
        False,
        "run every prefill step eagerly",
    ),
    Flag(
        ("--piecewise-cuda-graph-tokens",),
        "graphs.prefill_tokens",
        "token counts of prefill steps to capture",
        int,
        also={"graphs.use": "cuda_graph"},
        many=True,
    ),
    Flag(
        ("--piecewise-cuda-graph-max-tokens",),
        "graphs.max_prefill_tokens",
        "largest token count of prefill steps to capture",
        int,
        also={"graphs.use": "cuda_graph"},
    ),
    # scheduling and memory
    Flag(
        ("--max-running-requests", "--max-num-seqs"),
        "scheduler.max_running_requests",
        "maximum number of running sequences",
        int,
    ),
    Flag(
        ("--max-queued-requests", "--max-num-queued-reqs"),
        "scheduler.max_queued_requests",
        "maximum number of waiting sequences; further requests are answered 429",
        int,
    ),
    Flag(
        ("--chunked-prefill-size",),
        "scheduler.chunk_size",
        "maximum number of prompt tokens per step",
        int,
    ),
    switch(
        "--enable-mixed-chunk",
        "scheduler.mixed",
        True,
        "mix prefill and decode in a step (the default)",
    ),
    switch(
        "--enable-overlap-schedule --async-scheduling",
        "scheduler.overlap",
        True,
        "start a step before the results of the last one are read (the default on a device)",
    ),
    switch(
        "--disable-overlap-schedule --no-async-scheduling",
        "scheduler.overlap",
        False,
        "read the results of a step before the next one starts",
    ),
    Flag(
        ("--schedule-policy", "--scheduling-policy"),
        "policy.use",
        "order of requests: fcfs, priority, lpm (longest_prefix)",
        values=POLICIES,
    ),
    Flag(
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "memory.fraction",
        "share of the device's memory for the engine; default: sized by measurement",
        float,
    ),
    Flag(("--max-total-tokens",), "memory.kv_tokens", "size of the KV pool in tokens", int),
    Flag(
        ("--kv-cache-memory-bytes",),
        "memory.kv_bytes",
        "size of the KV pool on each rank in bytes, such as 25G",
        byte_count,
    ),
    # sampling
    Flag(
        ("--sampling-backend",),
        "sampling.use",
        "sampler: torch (pytorch), triton",
        values={"pytorch": "torch"},
    ),
    # server
    Flag(("--host",), "server.host", "address to listen on (default 127.0.0.1)"),
    Flag(("--port",), "server.port", "port (default 30000)", int),
    Flag(("--api-key",), "server.api_key", "bearer token that clients must send"),
    Flag(("--admin-api-key",), "server.admin_api_key", "bearer token for the admin routes"),
    Flag(("--served-model-name",), "server.served_model_name", "name of the model in /v1/models"),
    Flag(
        ("--shutdown-timeout",),
        "server.drain_timeout",
        "seconds that running requests may take to finish after SIGTERM",
        float,
    ),
    Flag(
        ("--allowed-origins",),
        "server.cors_origins",
        "JSON list of origins that browsers may send requests from (CORS)",
        text_list,
    ),
    Flag(("--stream-interval",), "server.stream_interval", "tokens per event of a stream", int),
    Flag(
        ("--reasoning-parser",),
        "outputs[*].use",
        "parser that separates the reasoning from the answer: deepseek-r1",
    ),
    Flag(("--tool-call-parser",), "outputs[*].use", "refused: tool calls are not supported yet"),
    Flag(("--log-level",), "log.level", "debug, info, warning, error"),
    Flag(("--log-format",), "log.format", "human or json"),
    switch("--disable-log-stats", "log.stats_interval", 0.0, "do not log statistics"),
    switch(
        "--log-requests --enable-log-requests",
        "log.requests",
        True,
        "log each request (the default)",
    ),
    switch(
        "--disable-log-requests --no-enable-log-requests",
        "log.requests",
        False,
        "do not log each request",
    ),
    Flag(
        ("--watchdog-timeout",),
        "executor.watchdog",
        "seconds without a heartbeat before a rank counts as hung",
        float,
    ),
    switch(
        "--enable-tokenizer-info-endpoint",
        "server.tokenizer_info",
        True,
        "serve /tokenizer_info (the default)",
    ),
    switch(
        "--no-enable-tokenizer-info-endpoint",
        "server.tokenizer_info",
        False,
        "do not serve /tokenizer_info",
    ),
    switch("--enable-metrics", "metrics.enabled", True, "serve Prometheus metrics (the default)"),
)

#: switches of other engines for behaviour that is always on here -> that behaviour; accepted and
#: recorded as without effect
ALWAYS_ON: dict[str, str] = {
    "--enable-chunked-prefill": (
        "prompts are always computed in chunks of at most --chunked-prefill-size tokens"
    ),
    "--enable-cache-report": "usage always counts cached tokens",
    "--enable-prompt-tokens-details": "usage always counts cached tokens",
    "--enable-request-id-headers": "answers always have the header X-Request-Id",
    "--disable-custom-all-reduce": "ranks communicate only by NCCL or gloo",
}

#: flag -> (another flag, whether giving (True) or omitting (False) it makes the first one
#: ineffective, why)
NO_EFFECT: dict[str, tuple[str, bool, str]] = {
    "--cuda-graph-bs": ("--disable-cuda-graph", True, "graphs are off"),
    "--cuda-graph-max-bs": ("--disable-cuda-graph", True, "graphs are off"),
    "--piecewise-cuda-graph-tokens": (
        "--disable-piecewise-cuda-graph",
        True,
        "prefill steps run eagerly",
    ),
    "--piecewise-cuda-graph-max-tokens": (
        "--disable-piecewise-cuda-graph",
        True,
        "prefill steps run eagerly",
    ),
    "--torch-compile-max-bs": ("--enable-torch-compile", False, "compilation is off"),
}

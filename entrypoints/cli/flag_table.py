"""Every engine flag: its names, the configuration field it sets, and what its value means there.

Names follow the DeepSeek recipes published for other engines, so that such a command works with
only the program's name changed. A flag whose component no plugin registers sets its field all the
same: the plan then refuses it, by name.
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
    """Attributes:
    names: spellings, the first is the one in ``--help``; underscores count as hyphens.
    path: dotted field; ``parallel[tensor].size`` is the field of the list item with that ``use``.
    convert: from the text on the command line; None for a switch.
    also: further fields it sets, by path.
    value: what a switch sets.
    values: other engines' words for a value.
    many: takes several values.
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
    """Bytes from "1000", "25G" or "1.5g": capital letters count in powers of 1024, small ones in
    powers of 1000.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if match is None:
        raise ValueError(text)
    number, unit = match.groups()
    base = 1024.0 if unit.isupper() else 1000.0
    power = " kmgt".index(unit.lower() or " ")
    return round(float(number) * float(base**power))


def text_list(text: str) -> list[str]:
    """A JSON list of texts."""
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
#: NOTE: published DeepSeek commands say EAGLE for what the NextN layer does
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
    """A flag without a value. ``names``: its spellings, separated by blanks."""
    return Flag(tuple(names.split()), path, help, convert=None, value=value, **more)


FLAGS: tuple[Flag, ...] = (
    # model and numbers
    Flag(("--model", "--model-path"), "model", 'folder, file, downloaded hub id, or "embedded"'),
    Flag(
        ("--tokenizer-path", "--tokenizer"),
        "tokenizer",
        'folder of the tokenizer, hub id or "embedded", when it is not the model\'s',
    ),
    Flag(
        ("--chat-template",),
        "chat_template",
        "Jinja file, or the template itself, when it is not the model's",
    ),
    switch("--skip-tokenizer-init", "skip_tokenizer", True, "token ids in and out only"),
    Flag(("--dtype",), "dtype", "compute dtype: auto, float32, bfloat16, float16", values=DTYPES),
    Flag(("--device",), "device", "auto, cpu or cuda"),
    Flag(("--random-seed", "--seed"), "seed", "seed of requests that bring none", int),
    Flag(
        ("--context-length", "--max-model-len"), "context_length", "longest sequence in tokens", int
    ),
    Flag(("--revision",), "revision", "accepted; the model is read where it is"),
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
        "quantization scheme; leave it out for what the checkpoint has",
    ),
    # attention and KV cache
    Flag(
        ("--attention-backend",),
        "attention.use",
        "attention backend by name; fa3, flashinfer, triton "
        "and torch: the one for this model's kind of attention",
    ),
    Flag(("--kv-cache-dtype",), "attention.kv_dtype", "dtype of the KV cache", values=KV_DTYPES),
    Flag(("--page-size", "--block-size"), "attention.page_size", "tokens a KV page", int),
    switch(
        "--disable-mla",
        "attention.use",
        "torch_mla",
        "no weight absorption: the naive reference",
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
        "requests share the pages of prefixes (the default)",
    ),
    switch(
        "--disable-radix-cache --no-enable-prefix-caching", "cache.use", "none", "no prefix cache"
    ),
    # parallelism
    Flag(
        ("--tp-size", "--tp", "--tensor-parallel-size"),
        "parallel[tensor].size",
        "tensor parallel ranks",
        int,
    ),
    Flag(
        ("--ep-size", "--ep", "--expert-parallel-size"),
        "parallel[ep_moe].size",
        "expert parallel ranks",
        int,
    ),
    switch(
        "--enable-ep-moe --enable-expert-parallel",
        "parallel[ep_moe].use",
        "ep_moe",
        "expert parallelism",
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
        "data parallel groups",
        int,
    ),
    switch(
        "--enable-dp-attention",
        "parallel[dp_attention].use",
        "dp_attention",
        "data parallel attention",
    ),
    Flag(
        ("--dist-timeout", "--distributed-timeout-seconds"),
        "collectives.timeout",
        "seconds before a collective that hangs ends the engine",
        float,
    ),
    Flag(("--nnodes",), "executor.hosts", "hosts of one engine", int),
    Flag(("--node-rank",), "executor.host_rank", "which of them this is", int),
    Flag(("--dist-init-addr", "--nccl-init-addr"), "executor.address", "host:port where they meet"),
    Flag(
        ("--distributed-executor-backend",),
        "executor.use",
        "multiprocess (mp), torchrun, ray",
        values=EXECUTORS,
    ),
    # speculation
    Flag(
        ("--speculative-algorithm", "--speculative-algo", "--spec-method"),
        "speculative.use",
        "nextn (EAGLE means the same), ...",
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
        "folder of the draft",
    ),
    Flag(
        ("--speculative-num-steps", "--spec-tokens", "--num-speculative-tokens"),
        "speculative.steps",
        "tokens drafted one after the other",
        int,
    ),
    Flag(("--speculative-eagle-topk",), "speculative.topk", "branches of each drafted token", int),
    Flag(
        ("--speculative-num-draft-tokens",),
        "speculative.draft_tokens",
        "tokens verified a step",
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
        "--enable-torch-compile", "ops.use", "torch_compile", "compile what is left of small steps"
    ),
    Flag(("--torch-compile-max-bs",), "ops.max_batch", "largest batch size to compile", int),
    switch(
        "--enable-piecewise-cuda-graph --enforce-piecewise-cuda-graph",
        "graphs.prefill",
        True,
        "replay small steps with prompts in them (on by default on one rank)",
        also={"graphs.use": "cuda_graph"},
    ),
    switch(
        "--disable-piecewise-cuda-graph --disable-prefill-cuda-graph",
        "graphs.prefill",
        False,
        "run every step with a prompt in it eagerly",
    ),
    Flag(
        ("--piecewise-cuda-graph-tokens",),
        "graphs.prefill_tokens",
        "tokens in such steps to capture",
        int,
        also={"graphs.use": "cuda_graph"},
        many=True,
    ),
    Flag(
        ("--piecewise-cuda-graph-max-tokens",),
        "graphs.max_prefill_tokens",
        "the largest of them",
        int,
        also={"graphs.use": "cuda_graph"},
    ),
    # scheduling and memory
    Flag(
        ("--max-running-requests", "--max-num-seqs"),
        "scheduler.max_running_requests",
        "sequences in flight",
        int,
    ),
    Flag(
        ("--max-queued-requests", "--max-num-queued-reqs"),
        "scheduler.max_queued_requests",
        "waiting sequences, one more is answered 429",
        int,
    ),
    Flag(("--chunked-prefill-size",), "scheduler.chunk_size", "most prompt tokens a step", int),
    switch(
        "--enable-mixed-chunk",
        "scheduler.mixed",
        True,
        "prompts and decoding rows share steps (the default)",
    ),
    switch(
        "--enable-overlap-schedule --async-scheduling",
        "scheduler.overlap",
        True,
        "start each step before the last one is read (the default on a device)",
    ),
    switch(
        "--disable-overlap-schedule --no-async-scheduling",
        "scheduler.overlap",
        False,
        "read each step before the next one starts",
    ),
    Flag(
        ("--schedule-policy", "--scheduling-policy"),
        "policy.use",
        "fcfs, priority, lpm (longest_prefix)",
        values=POLICIES,
    ),
    Flag(
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        "memory.fraction",
        "share of the device for weights and KV cache; the plan measures when it is left out",
        float,
    ),
    Flag(("--max-total-tokens",), "memory.kv_tokens", "tokens in the KV pool", int),
    Flag(
        ("--kv-cache-memory-bytes",),
        "memory.kv_bytes",
        "bytes of the KV pool on each rank, such as 25G",
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
    Flag(("--admin-api-key",), "server.admin_api_key", "bearer token of the admin routes"),
    Flag(("--served-model-name",), "server.served_model_name", "name of the model in /v1/models"),
    Flag(
        ("--shutdown-timeout",),
        "server.drain_timeout",
        "seconds running requests get after SIGTERM",
        float,
    ),
    Flag(
        ("--allowed-origins",),
        "server.cors_origins",
        "JSON list of origins that browsers may call from",
        text_list,
    ),
    Flag(("--stream-interval",), "server.stream_interval", "tokens in each event of a stream", int),
    Flag(("--reasoning-parser",), "outputs[*].use", "separate the reasoning: deepseek-r1"),
    Flag(("--tool-call-parser",), "outputs[*].use", "refused: answers carry no tool calls yet"),
    Flag(("--log-level",), "log.level", "debug, info, warning, error"),
    Flag(("--log-format",), "log.format", "human or json"),
    switch("--disable-log-stats", "log.stats_interval", 0.0, "no statistics lines in the log"),
    switch(
        "--log-requests --enable-log-requests",
        "log.requests",
        True,
        "a line for each request (on by default)",
    ),
    switch(
        "--disable-log-requests --no-enable-log-requests",
        "log.requests",
        False,
        "no line for each request",
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
        "serve /tokenizer_info (on by default)",
    ),
    switch(
        "--no-enable-tokenizer-info-endpoint", "server.tokenizer_info", False, "do not serve it"
    ),
    switch("--enable-metrics", "metrics.enabled", True, "Prometheus metrics (on by default)"),
)

#: other engines' switches for what is always so here, and how: accepted, recorded as without effect
ALWAYS: dict[str, str] = {
    "--enable-chunked-prefill": "prompts are always computed in chunks, of --chunked-prefill-size tokens at most",
    "--enable-cache-report": "usage always counts cached tokens",
    "--enable-prompt-tokens-details": "usage always counts cached tokens",
    "--enable-request-id-headers": "answers always carry X-Request-Id",
    "--disable-custom-all-reduce": "ranks exchange through NCCL or gloo alone",
}

#: a flag without effect -> (the flag that makes it so, is it by being given?, why)
MOOT: dict[str, tuple[str, bool, str]] = {
    "--cuda-graph-bs": ("--disable-cuda-graph", True, "graphs are off"),
    "--cuda-graph-max-bs": ("--disable-cuda-graph", True, "graphs are off"),
    "--piecewise-cuda-graph-tokens": (
        "--disable-piecewise-cuda-graph",
        True,
        "such steps run eagerly",
    ),
    "--piecewise-cuda-graph-max-tokens": (
        "--disable-piecewise-cuda-graph",
        True,
        "such steps run eagerly",
    ),
    "--torch-compile-max-bs": ("--enable-torch-compile", False, "compilation is off"),
}

"""Flags of the model, attention, ranks, speculation, graphs, scheduling, memory and sampling.

Names follow the DeepSeek recipes published for other engines, so that such a command works with
only the program's name changed. A flag may choose a component that no plugin registers; the plan
then refuses the component by name.
"""

from __future__ import annotations

from glowplug.entrypoints.cli.flags.flag import Flag, byte_count, count_or_auto, switch
from glowplug.entrypoints.cli.flags.speculative import (
    BY_FOLDER,
    CONFIG_FLAG,
    speculative_config,
)

DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
}
KV_DTYPES = {**DTYPES, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
#: NOTE: published DeepSeek commands use the name EAGLE for drafting with the NextN layer; with the
#: folder of an EAGLE head it means ``eagle`` (``speculative.resolve_folder``)
ALGORITHMS = {
    "NEXTN": "nextn",
    "EAGLE": "nextn",
    "MTP": "nextn",
    "DEEPSEEK_MTP": "nextn",
    "mtp": "nextn",
    "deepseek_mtp": "nextn",
    "EAGLE3": "eagle",
    "eagle3": "eagle",
    "NGRAM": "ngram",
    "STANDALONE": "standalone",
    BY_FOLDER: "standalone",
}
POLICIES = {"lpm": "longest_prefix", "longest-prefix": "longest_prefix"}
EXECUTORS = {"mp": "multiprocess", "uni": "inline", "external_launcher": "torchrun"}
FORMATS = {"dummy": "random", "safetensors": "safetensors"}

ENGINE_FLAGS: tuple[Flag, ...] = (
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
    Flag(("--revision",), "revision", "branch, tag or commit of a downloaded hub id"),
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
        "quantization scheme; fp8: block FP8, as stored or quantised while loading; default: that "
        "of the checkpoint",
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
        ("--tp-size", "--tp", "--tensor-parallel-size", "-tp"),
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
        ("--ep-num-redundant-experts", "--num-redundant-experts"),
        "parallel[ep_moe].redundant_experts",
        "number of copies of experts in each layer beside its routed experts",
        int,
    ),
    Flag(
        ("--init-expert-location",),
        "parallel[ep_moe].placement",
        "file with a recorded load of experts, by which they are placed; trivial: by number",
        values={"trivial": None},
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
        "number of data-parallel groups; auto: by the measured table of this card",
        count_or_auto,
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
        "draft algorithm: nextn, eagle (EAGLE: by the draft's folder), ngram, standalone, ...",
        values=ALGORITHMS,
    ),
    Flag(
        (CONFIG_FLAG, "-sc"),
        "speculative",
        "speculation as a JSON object: method, model, num_speculative_tokens, ...",
        speculative_config,
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
    Flag(
        ("--speculative-ngram-max-match-window-size", "--ngram-prompt-lookup-max"),
        "speculative.prompt_lookup_max",
        "most of a row's last tokens that ngram looks for in its earlier text",
        int,
    ),
    Flag(
        ("--speculative-ngram-min-match-window-size", "--ngram-prompt-lookup-min"),
        "speculative.prompt_lookup_min",
        "fewest of a row's last tokens that ngram looks for in its earlier text",
        int,
    ),
    Flag(
        ("--speculative-token-map",),
        "speculative.draft_vocabulary",
        "file of the token ids that drafts choose from, or the number of frequent ones to count",
    ),
    # graphs
    switch("--disable-cuda-graph --enforce-eager", "graphs.use", "eager", "run every step eagerly"),
    Flag(
        ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
        "graphs.batch_sizes",
        "batch sizes of the whole engine to capture",
        int,
        also={"graphs.use": "cuda_graph"},
        many=True,
    ),
    Flag(
        ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        "graphs.max_batch",
        "largest batch size of the whole engine to capture",
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
    switch(
        "--disable-draft-extend-cuda-graph",
        "graphs.draft_extend",
        False,
        "run the draft model's pass over the tokens of a step eagerly",
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
        "maximum number of running sequences of the whole engine",
        int,
    ),
    Flag(
        ("--max-queued-requests", "--max-num-queued-reqs"),
        "scheduler.max_queued_requests",
        "maximum number of waiting sequences of the whole engine; further ones are answered 429",
        int,
    ),
    Flag(
        ("--chunked-prefill-size",),
        "scheduler.chunk_size",
        "maximum number of prompt tokens per step of the whole engine",
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
        ("--mem-fraction-static",),
        "memory.static_fraction",
        "share of the device's memory for weights and KV cache; smaller values leave more for "
        "steps and graphs; default: the KV cache is sized by measurement",
        float,
    ),
    Flag(
        ("--gpu-memory-utilization",),
        "memory.fraction",
        "share of the device's memory for the whole engine; default: 0.98 on a GPU",
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
    Flag(
        ("--grammar-backend",),
        "grammar.use",
        "library for structured output: llguidance, xgrammar, none",
    ),
)

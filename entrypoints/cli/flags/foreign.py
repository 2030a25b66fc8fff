"""Flags of SGLang and vLLM that this engine does not have, and their alternatives.

Imported for error messages only. The names, without leading dashes, are those of SGLang 0.3.6 to
0.5.23 and vLLM 0.6.3 to 0.33.0 that are missing from ``table.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from glowplug.entrypoints.cli.flags.foreign_sglang import SGLANG
from glowplug.entrypoints.cli.flags.foreign_vllm import VLLM
from glowplug.entrypoints.cli.flags.table import ALWAYS_ON

#: (pattern to search for in a flag's name, the alternative); the first match counts
ALTERNATIVES: tuple[tuple[str, str], ...] = (
    (
        r"^max-(num-batched-tokens|prefill-tokens)$",
        "--chunked-prefill-size limits the prompt tokens of a step",
    ),
    (r"^swap-space$", "leave it out: preempted sequences are recomputed"),
    (
        r"offload|hicache|hierarchical-cache",
        "weights and cache stay on the devices; --tp-size spreads them over several",
    ),
    (r"^num-gpu-blocks-override$", "--max-total-tokens sets the size of the KV pool in tokens"),
    (
        r"^(pp-|pipeline-parallel)",
        "--tp-size, --ep-size and --enable-dp-attention spread a model over devices",
    ),
    (
        r"^(cudagraph-capture-sizes|cuda-graph-sizes)$",
        "--cuda-graph-bs sets the batch sizes to capture",
    ),
    (
        r"^max-cudagraph-capture-size$",
        "--cuda-graph-max-bs sets the largest batch size to capture",
    ),
    (
        r"^cuda-graph-(max-)?bs-prefill$",
        "use --piecewise-cuda-graph-tokens and --piecewise-cuda-graph-max-tokens",
    ),
    (
        r"^(compilation-config|optimization-level)$",
        "use --enable-torch-compile and --cuda-graph-bs",
    ),
    (
        r"^speculative-ngram-",
        "use --speculative-num-draft-tokens, --speculative-eagle-topk and "
        "--speculative-ngram-max-match-window-size",
    ),
    (r"lora|prompt-adapter", "merge the adapter into the checkpoint"),
    (
        r"(^|-)(mm|asr|media|image|video)(-|$)|multimodal|^language-|^encoder-",
        "the models take text only",
    ),
    (r"tool", "tool calls are not supported yet"),
    (
        r"guided|grammar|structured-outputs|constrained|jump-forward|outlines",
        "use --grammar-backend and the section grammar",
    ),
    (
        r"disagg|kv-transfer|kv-events|pdlb|pd-role|pdmux|ec-transfer",
        "one engine runs both prefill and decode",
    ),
    (r"^(task|runner|convert|is-embedding)$|pooler", "the models generate text"),
    (
        r"^(decode|prefill)-attention-backend$|^attention-config$|^disable-flashinfer$",
        "use --attention-backend NAME",
    ),
    (r"^(fp8-gemm|linear)-backend$", "use --set quantization.gemm=NAME"),
    (r"^moe-(runner-)?backend$", "use --set quantization.experts=NAME"),
    (
        r"^(all2all|moe-a2a)-backend$|^enable-deepep-moe$",
        'set exchange = NAME in the [[parallel]] section of "ep_moe"',
    ),
    (
        r"eplb|^expert-distribution-recorder",
        "record the load (GET /expert_load), then use --init-expert-location FILE and "
        "--ep-num-redundant-experts N",
    ),
    (r"^(master-addr|master-port|nccl-port)$", "use --dist-init-addr HOST:PORT"),
    (r"^(use-ray|worker-use-ray)$", "use --distributed-executor-backend ray"),
    (r"^(base-gpu-id|gpu-id-step|device-ids)$", "CUDA_VISIBLE_DEVICES selects the devices"),
    (r"^data-parallel-", "all --dp-size groups share one server"),
    (
        r"^(download-dir|code-revision|tokenizer-revision|hf-token)$",
        "nothing is downloaded: use --model FOLDER, or run hf download first",
    ),
    (
        r"^(hf-overrides|json-model-override-args|rope-scaling|rope-theta)$",
        "edit config.json in the model folder",
    ),
    (
        r"generation-config|^sampling-defaults$|^preferred-sampling-params$",
        "set the sampling parameters in requests",
    ),
    (r"^(uvicorn-log-level|log-level-http)$", "use --log-level"),
    (r"^decode-log-interval$", "use --set log.stats_interval=SECONDS"),
    (r"^(tokenizer-worker-num|renderer-num-workers)$", "use --set server.tokenizer_threads=N"),
    (r"^soft-watchdog-timeout$", "use --watchdog-timeout SECONDS"),
    (
        r"^(ssl-|root-path$|fastapi-root-path$|uds$|enable-http2)",
        "run a proxy in front of the server",
    ),
    (r"^middleware$", "write a plugin with the hook extend_app"),
    (r"^(reasoning|tool)-parser-plugin$", "use --plugin MODULE"),
    (r"^enable-reasoning$", "use --reasoning-parser NAME"),
    (r"^(completion-template|hf-chat-template-name)$", "use --chat-template FILE"),
    (r"^default-chat-template-kwargs$", "set chat_template_kwargs in requests"),
    (r"^trust-request-chat-template$", "use --chat-template FILE: requests cannot have a template"),
    (r"^return-tokens-as-token-ids$", "set return_tokens_as_token_ids in requests"),
    (
        r"force-include-usage$|default-include-usage$",
        "set stream_options.include_usage in requests",
    ),
    (
        r"^enable-priority-scheduling$",
        "use --schedule-policy priority, in which the smallest number comes first",
    ),
    (r"^radix-eviction-policy$", "leave it out: the least recently used leaves are evicted first"),
)

#: flags of both SGLang and vLLM
BOTH = frozenset(
    """
    allowed-media-domains cpu-offload-gb dcp-comm-backend decode-context-parallel-size
    default-chat-template-kwargs download-dir enable-eplb enable-lora
    enable-mamba-cache-stochastic-rounding enable-mfu-metrics enable-return-routed-experts
    enable-ssl-refresh grpc-port kv-events-config language-model-only lora-target-modules
    mamba-backend mamba-cache-philox-rounds max-lora-rank model-impl model-loader-extra-config
    offload-group-size offload-num-in-group offload-prefetch-step otlp-traces-endpoint
    pipeline-parallel-size quantization-param-path ssl-ca-certs ssl-certfile ssl-keyfile
    tokenizer-mode tool-server trust-request-chat-template watermark-config
""".split()
)


def unsupported(name: str, known: Collection[str]) -> str:
    """Return why this flag of SGLang or vLLM is refused, and an alternative; "" for other flags.

    Args:
        name: the flag with its dashes; vLLM's form ``--flag.key`` is also accepted.
        known: flags that the command has.
    """
    bare = name.partition(".")[0].removeprefix("--")
    positive = bare.removeprefix("no-")
    if positive != bare and f"--{positive}" in known:
        return f"unknown flag {name}: " + ALWAYS_ON.get(f"--{positive}", f"leave --{positive} out")
    names = {bare, positive}
    owners = [
        owner
        for owner, flags in (("SGLang", SGLANG | BOTH), ("vLLM", VLLM | BOTH))
        if names & flags
    ]
    if not owners or not name.startswith("--"):
        return ""
    instead = next(
        (text for pattern, text in ALTERNATIVES if re.search(pattern, positive)), "leave it out"
    )
    return f"{name} is a flag of {' and '.join(owners)} that glowplug does not support; {instead}"

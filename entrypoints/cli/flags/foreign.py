"""Flags of SGLang and vLLM that this engine does not have, and their alternatives.

Imported for error messages only. The names, without leading dashes, are those of SGLang 0.3.6 to
0.5.23 and vLLM 0.6.3 to 0.33.0 that are missing from ``flag_table.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from glowplug.entrypoints.cli.flags.engine_table import ALWAYS_ON

#: (pattern that is searched in a name, the alternative); the first match counts
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
    (r"^speculative-config$", "use --speculative-algorithm NEXTN --speculative-num-steps N"),
    (r"lora|prompt-adapter", "merge the adapter into the checkpoint"),
    (
        r"(^|-)(mm|asr|media|image|video)(-|$)|multimodal|^language-|^encoder-",
        "the models take text only",
    ),
    (r"tool", "tool calls are not supported yet"),
    (
        r"guided|grammar|structured-outputs|constrained|jump-forward|outlines",
        "requests for JSON output are refused",
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
    (r"^reasoning-parser-plugin$", "use --plugin MODULE"),
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

#: flags that both engines have
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

SGLANG = frozenset(
    """
    abort-on-priority-when-disabled allow-auto-truncate asr-max-buffer-seconds
    asr-max-concurrent-sessions attention-context-parallel-size attn-cp-size base-gpu-id
    batch-notify-size bf16-gemm-backend boundary-reduction bucket-e2e-request-latency
    bucket-inter-token-latency bucket-time-to-first-token c128-page-size
    checkpoint-engine-wait-weights-before-ready collect-tokens-histogram completion-template
    constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt
    constrained-json-whitespace-pattern context-bucket cp-strategy crash-dump-folder
    cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-prefill cuda-graph-config
    cuda-graph-max-bs-prefill cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context
    custom-sigquit-handler custom-weight-loader dcp-replicate-q-proj dcp-size debug-cuda-graph
    debug-tensor-dump-inject debug-tensor-dump-input-file debug-tensor-dump-layers
    debug-tensor-dump-output-folder debug-tensor-dump-prefill-only decode-attention-backend
    decode-log-interval decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints
    decoupled-spec-rank decoupled-spec-role decrypted-config-file decrypted-draft-config-file
    deepep-config deepep-dispatcher-output-dtype deepep-mode deepep-v2-mode default-priority-value
    delete-ckpt-after-loading detokenizer-worker-num disable-aiter-allreduce-fusion-in-decode
    disable-aiter-allreduce-fusion-in-prefill disable-attn-tp-gather disable-chunked-prefix-cache
    disable-cuda-graph-padding disable-decode-cuda-graph disable-disk-cache
    disable-fast-image-processor disable-flashinfer disable-flashinfer-autotune
    disable-flashinfer-cutlass-moe-fp4-allgather disable-flashinfer-sampling
    disable-hicache-numa-detect disable-hybrid-swa-memory disable-jump-forward disable-nan-detection
    disable-outlines-disk-cache disable-overlap-cg-plan disable-priority-preemption
    disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port
    disaggregation-decode-allocation-policy disaggregation-decode-dp
    disaggregation-decode-enable-fake-auto disaggregation-decode-enable-offload-kvcache
    disaggregation-decode-enable-radix-cache disaggregation-decode-extra-slots
    disaggregation-decode-host-receive-threshold disaggregation-decode-polling-interval
    disaggregation-decode-retraction-backup disaggregation-decode-tp
    disaggregation-enable-kv-checksum disaggregation-ib-device disaggregation-mode
    disaggregation-prefill-pp disaggregation-transfer-backend dllm-algorithm dllm-algorithm-config
    dllm-fdfo ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num
    ds-sparse-decode-threshold dsa-decode-backend dsa-paged-mqa-logits-backend dsa-prefill-backend
    dsa-topk-backend dsa-triton-union dsv4-attn-backend dsv4-prefill-backend dwdp-size
    dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout elastic-ep-backend
    elastic-ep-initial-size elastic-ep-join-mode elastic-ep-join-rank-offset
    elastic-ep-scale-timeout enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion
    enable-amd-monokernel enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process
    enable-cp-decode-attn-tp enable-cudagraph-gc enable-custom-logit-processor
    enable-decoder-swa-bounded-replay enable-deepep-moe enable-deepseek-v4-fp4-indexer
    enable-dense-mlp-attn-tp enable-deterministic-inference enable-double-sparsity
    enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-draft-weights-cpu-backup
    enable-dsa-cache-layer-split enable-dsa-fused-indexer enable-dynamic-batch-tokenizer
    enable-dynamic-chunking enable-elastic-expert-backup enable-encoder-swa-bounded-replay
    enable-expert-distribution-metrics enable-flashinfer-allreduce-fusion
    enable-flashinfer-cutlass-moe enable-flashinfer-moe enable-flashinfer-mxfp4-moe
    enable-flashinfer-trtllm-moe enable-flexkv enable-forward-pass-metrics enable-fp32-lm-head
    enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope enable-hicache
    enable-hierarchical-cache enable-hisparse enable-http-worker-reuseport enable-http2
    enable-int8-mamba-checkpoint enable-kv-cache-sharding enable-layernorm-sp
    enable-layerwise-nvtx-marker enable-lean-attention enable-linear-replayssm
    enable-linear-replayssm-spec enable-linker-mla-dedup enable-lmcache enable-lora-overlap-loading
    enable-megamoe-for-layernorm-sp enable-memory-saver enable-metrics-for-all-schedulers enable-mis
    enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal
    enable-nan-detection enable-nccl-nvls enable-nsa-prefill-context-parallel
    enable-nvidia-megakernel enable-p2p-check enable-page-major-kv-layout enable-paged-experts
    enable-pd-role-switch enable-pdmux enable-precise-embedding-interpolation enable-prefill-cp
    enable-prefill-delayer enable-prefix-mm-cache enable-priority-scheduling
    enable-profile-cuda-graph enable-quant-communications enable-request-time-stats-logging
    enable-response-store enable-return-aux-hidden-states enable-return-hidden-states
    enable-return-indexer-topk enable-scattered-sconv enable-session-radix-cache
    enable-shared-experts-attn-tp enable-single-batch-overlap enable-streaming-session
    enable-strict-thinking enable-symm-mem enable-tf32-matmul enable-tokenizer-batch-encode
    enable-torch-compile-debug-mode enable-torch-symm-mem enable-tp-lm-head-all-to-all enable-trace
    enable-triton-kernel-moe enable-two-batch-overlap enable-unified-cache-external-linker
    enable-unified-memory enable-w4a4-mxfp4-megamoe enable-waterfill enable-watermark
    enable-weights-cpu-backup encoder-bootstrap-port encoder-only encoder-register-urls
    encoder-transfer-backend encoder-urls enforce-disable-flashinfer-allreduce-fusion
    enforce-shared-experts-fusion engine-info-bootstrap-port ep-dispatch-algorithm
    ep-num-redundant-experts eplb-algorithm eplb-min-rebalancing-utilization-threshold
    eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-balancedness-report-mode
    expert-distribution-recorder-buffer-size expert-distribution-recorder-mode
    experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels
    fastapi-root-path file-storage-path file-storage-pth flashinfer-a2a-dispatch-type
    flashinfer-allreduce-fusion-backend flashinfer-autotune-skip-ops flashinfer-mla-disable-ragged
    flashinfer-mxfp4-moe-precision flexkv-config-file forward-hooks forward-pass-metrics-ipc-name
    forward-pass-metrics-worker-id fp4-gemm-backend fp8-gemm-backend fuseep-mode gated-launch-port
    gc-threshold gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend
    grpc-http-sidecar-port grpc-mode grpc-response-timeout-secs hf-chat-template-name
    hicache-host-memory-fraction hicache-host-memory-mode hicache-io-backend hicache-mem-layout
    hicache-ratio hicache-size hicache-storage-backend hicache-storage-backend-extra-config
    hicache-storage-prefetch-policy hicache-storage-prefetch-retry-max-attempts
    hicache-storage-prefetch-retry-poll-interval hicache-write-policy
    hierarchical-sparse-attention-extra-config hisparse-config http2-initial-connection-window-size
    http2-max-concurrent-streams hybrid-kvcache-ratio image-processor-backend impl
    incremental-streaming-output init-expert-location int8-mamba-ckpt-size is-embedding
    json-model-override-args keep-mm-feature-on-device kt-cpuinfer kt-max-deferred-experts-per-token
    kt-method kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-canary kv-canary-real-data
    kv-canary-sweep-interval language-only limit-mm-data-per-request linear-attn-backend
    linear-attn-decode-backend linear-attn-prefill-backend linear-attn-verify-backend
    linear-replayssm-cache-len lmcache-config-file load-balance-method load-publish-endpoint
    load-snapshot-publish-interval log-level-http log-requests-format log-requests-level
    log-requests-target lora-backend lora-drain-wait-threshold lora-eviction-policy lora-paths
    lora-strict-loading lora-use-virtual-experts mamba-full-memory-ratio mamba-max-states-per-path
    mamba-radix-cache-strategy mamba-scheduler-strategy mamba-ssm-dtype mamba-track-interval
    max-ep-size max-loaded-loras max-lora-chunk-size max-loras-per-batch max-mamba-cache-size
    max-micro-batch-size max-prefill-tokens media-url-max-file-size-mb min-free-slots-delay
    mlx-enable-sampling mm-attention-backend mm-enable-dp-encoder mm-feature-transport
    mm-global-cache-backend mm-io-worker-num mm-max-concurrent-calls mm-per-request-timeout
    mm-preprocess-cache-size-mb mm-process-config mm-processor-worker-num model-checksum
    model-config-parser modelexpress-config modelopt-checkpoint-restore-path
    modelopt-checkpoint-save-path modelopt-export-path modelopt-quant moe-a2a-backend
    moe-data-parallel-size moe-dense-tp-size moe-dp-size moe-runner-backend monokernel-backend
    mooncake-ib-device msprobe-dump-config multi-item-scoring-delimiter nccl-port nsa-decode-backend
    nsa-prefill-backend nsa-prefill-cp-mode num-continuous-decode-steps num-reserved-decode-tokens
    numa-node offload-mode optimistic-prefill-attempts otlp-service-name paged-experts-num-resident
    pdlb-url pdmux-config-path piecewise-cuda-graph-compiler ple-offload-backend ple-offload-dir
    ple-offload-embedding pp-async-batch-depth pp-max-micro-batch-size pp-size pre-warm-nccl
    preferred-sampling-params prefill-attention-backend prefill-decode-interval
    prefill-decode-interval-min-bs prefill-delayer-forward-passes-buckets
    prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes prefill-delayer-queue-min-ratio
    prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets
    prefill-kv-cache-dequant-dtype prefill-max-requests prefill-only-disable-kv-cache
    prefill-round-robin-balance priority-scheduling-preemption-threshold prompt-tokens-buckets
    qsa-indexer-dtype quantize-and-serve radix-cache-backend radix-eviction-policy
    radix-eviction-policy-config remote-instance-weight-loader-backend
    remote-instance-weight-loader-seed-instance-ip
    remote-instance-weight-loader-seed-instance-service-port
    remote-instance-weight-loader-send-weights-group-ports
    remote-instance-weight-loader-start-seed-via-transfer-engine retraction-policy
    return-aux-hidden-state-layer-ids return-hidden-states-mode return-input-ids return-output-ids
    rl-on-policy-target rl-quant-profile sampling-defaults sampling-mask-max-tokens
    schedule-conservativeness schedule-low-priority-values-first scheduler-recv-interval
    shared-experts-tp-size show-time-cost sidecar sidecar-args skip-server-warmup sleep-on-idle
    sm-group-num smg-grpc-mode smg-http-sidecar-port soft-watchdog-timeout spec-trace-dir
    speculative-accept-threshold-acc speculative-accept-threshold-single speculative-adaptive
    speculative-adaptive-config speculative-attention-mode speculative-dflash-block-size
    speculative-domino-candidate-pool-size speculative-draft-attention-backend
    speculative-draft-kv-cache-dtype speculative-draft-load-format
    speculative-draft-model-quantization speculative-draft-model-revision
    speculative-draft-sink-size speculative-draft-window-size speculative-dsa-topk-backend
    speculative-dspark-align-verify-tokens-to-graph-tier speculative-dspark-block-size
    speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path
    speculative-enable-w4a4-mxfp4-megamoe speculative-moe-a2a-backend speculative-moe-runner-backend
    speculative-ngram-branch-length speculative-ngram-capacity
    speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path
    speculative-ngram-external-sam-budget speculative-ngram-match-type
    speculative-ngram-max-bfs-breadth speculative-ngram-max-match-window-size
    speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth
    speculative-ngram-min-match-window-size speculative-token-map speculative-use-block-verification
    speculative-use-rejection-sampling ssl-keyfile-password startup-weight-load-mode stream-output
    stream-response-default-include-usage strip-thinking-cache swa-full-tokens-ratio
    swa-prefix-tails tbo-token-distribution-threshold tokenizer-backend
    tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header
    tokenizer-worker-num torchao-config trace-modules triton-attention-num-kv-splits
    triton-attention-reduce-in-fp32 triton-attention-split-tile-size trust-mm-content-hashes
    unified-cache-external-linker-backend unified-cache-external-linker-config uno-lora-path use-ray
    uvicorn-access-log-exclude-prefixes warmups weight-cache-mode weight-cache-socket
    weight-cache-timeout weight-loader-disable-mmap weight-loader-drop-cache-after-load
    weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads weight-version
""".split()
)

VLLM = frozenset(
    """
    additional-config aggregate-engine-logging all2all-backend allow-credentials
    allow-deprecated-quantization allowed-headers allowed-local-media-path allowed-methods
    anthropic-disabled-thinking-effort api-server-count attention-config aux-output-config
    calculate-kv-scales chat-template-content-format code-revision cohere-format
    cohere-is-reasoning-model collect-detailed-traces compilation-config config-format convert
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-params cuda-graph-sizes
    cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address
    data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
    data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port
    data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-kv-cache-interleave-size
    dcp-q-replicate default-mm-loras device-ids device-memory-utilization diffusion-config
    disable-access-log-for-endpoints disable-async-output-proc disable-cascade-attn
    disable-chunked-mm-input disable-fastapi-docs disable-frontend-multiprocessing
    disable-hybrid-kv-cache-manager disable-logprobs-during-spec-decoding
    disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization disable-sliding-window
    disable-uvicorn-access-log dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-sync-interval ec-manager-config ec-transfer-config
    elastic-ep-max-dp-size enable-auto-tool-choice enable-batch-sharded-sampling
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter
    enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
    enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas
    enable-log-outputs enable-logging-iteration-details enable-lora-bias
    enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-multimodal-encoder-data-parallel enable-nccl-comm-suspend
    enable-offline-docs enable-per-request-metrics enable-prompt-adapter enable-prompt-embeds
    enable-reasoning enable-scale-out enable-server-load-tracking enable-shm-tensor-arena
    enable-sleep-mode enable-tower-connector-lora enable-trace-replay engram-config eplb-config
    eplb-log-balancedness eplb-step-interval eplb-window-size exclude-tools-when-tool-choice-none
    expert-placement-strategy fail-on-environ-validation fault-tolerance-config fingerprint-mode
    fingerprint-value fully-sharded-loras gdn-prefill-backend generation-config grpc
    guided-decoding-backend guided-decoding-disable-additional-properties
    guided-decoding-disable-any-whitespace guided-decoding-disable-fallback h11-max-header-count
    h11-max-incomplete-event-size headless hf-config-path hf-overrides hf-token ignore-patterns
    interleave-mm-strings io-processor-plugin ir-op-priority jit-monitor-mode jit-monitor-verbose
    kda-decode-backend kda-prefill-backend kernel-config kv-cache-dtype-skip-layers kv-cache-metrics
    kv-cache-metrics-sample kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill
    kv-transfer-config limit-mm-per-prompt linear-backend log-config-file log-error-stack
    logging-config logits-processor-pattern logits-processors logprobs-mode
    long-lora-scaling-factors long-prefill-token-threshold long-prefill-token-threshold-adaptive
    lora-dtype lora-extra-vocab-size lora-modules mamba-block-size mamba-cache-dtype
    mamba-cache-mode mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port
    max-context-len-to-capture max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs
    max-long-partial-prefills max-lora-cls-labels max-loras max-num-active-seqs
    max-num-batched-tokens max-num-partial-prefills max-num-queued-tokens max-num-scheduled-tokens
    max-parallel-loading-workers max-prompt-adapter-token max-prompt-adapters max-seq-len-to-capture
    media-io-kwargs middleware mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb
    mm-processor-cache-gb mm-processor-cache-type mm-processor-device mm-processor-kwargs
    mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides moe-backend monokernel
    multi-step-stream-outputs ngram-prompt-lookup-max ngram-prompt-lookup-min
    num-gpu-blocks-override num-lookahead-slots num-redundant-experts num-scheduler-steps numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-params optimization-level
    override-attention-dtype override-generation-config override-neuron-config
    override-pooler-config per-request-spec-decode-metrics performance-mode pooler-config
    preemption-mode prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
    prompt-adapters pt-load-map-location qlora-adapter-name-or-path quantization-config
    ray-workers-use-nsight reasoning-config reasoning-effort-map reasoning-parser-plugin
    renderer-num-workers replayssm-buffer-len response-role return-sampling-mask
    return-tokens-as-token-ids root-path rope-scaling rope-theta runner safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
    scheduler-delay-factor scheduler-reserve-full-isl show-hidden-metrics-for-version
    skip-mm-profiling sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names
    sparse-indexer-topk-backend spec-decoding-acceptance-method specialize-active-lora
    speculative-config speculative-disable-by-batch-size speculative-disable-mqa-scorer
    speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model-quantization
    sse-keep-alive-interval ssl-cert-reqs ssl-ciphers structured-outputs-config swa-bounded-replay
    swap-space task tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type
    tokenizer-revision tokens-only tool-parser-plugin tool-strict-level trust-request-mm-kwargs
    typical-acceptance-sampler-posterior-alpha typical-acceptance-sampler-posterior-threshold
    ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load use-v2-block-manager
    uvicorn-log-level video-pruning-method video-pruning-rate watchdog-config watermark
    weight-transfer-config worker-cls worker-extension-cls worker-use-ray
""".split()
)


def unsupported(name: str, known: Collection[str]) -> str:
    """Return why a flag of SGLang or vLLM is refused, with the alternative; "" for other flags.

    Args:
        name: the flag with its dashes; in vLLM a key of the flag may follow after a dot.
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

"""Flags of vLLM alone, versions 0.6.3 to 0.33.0, that this engine does not have."""

from __future__ import annotations

#: names without leading dashes
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
    elastic-ep-max-dp-size enable-batch-sharded-sampling
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter
    enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
    enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas
    enable-log-outputs enable-logging-iteration-details enable-lora-bias
    enable-mamba-shared-prefix-checkpoint enable-mixed-moe-lora-format enable-mm-embeds
    enable-moe-shared-loras enable-multimodal-encoder-data-parallel enable-nccl-comm-suspend
    enable-offline-docs enable-per-request-metrics enable-prompt-adapter enable-prompt-embeds
    enable-reasoning enable-scale-out enable-server-load-tracking enable-shm-tensor-arena
    enable-sleep-mode enable-tower-connector-lora enable-trace-replay engram-config eplb-config
    eplb-log-balancedness eplb-step-interval eplb-window-size
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
    multi-step-stream-outputs
    num-gpu-blocks-override num-lookahead-slots num-scheduler-steps numa-bind
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
    speculative-disable-by-batch-size speculative-disable-mqa-scorer
    speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model-quantization
    sse-keep-alive-interval ssl-cert-reqs ssl-ciphers structured-outputs-config swa-bounded-replay
    swap-space task tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type
    tokenizer-revision tokens-only tool-strict-level trust-request-mm-kwargs
    typical-acceptance-sampler-posterior-alpha typical-acceptance-sampler-posterior-threshold
    ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load use-v2-block-manager
    uvicorn-log-level video-pruning-method video-pruning-rate watchdog-config watermark
    weight-transfer-config worker-cls worker-extension-cls worker-use-ray
""".split()
)

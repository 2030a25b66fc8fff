"""Flags of SGLang alone, versions 0.3.6 to 0.5.23, that this engine does not have."""

from __future__ import annotations

#: names without leading dashes
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
    eplb-algorithm eplb-min-rebalancing-utilization-threshold
    eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-balancedness-report-mode
    expert-distribution-recorder-buffer-size expert-distribution-recorder-mode
    experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels
    fastapi-root-path file-storage-path file-storage-pth flashinfer-a2a-dispatch-type
    flashinfer-allreduce-fusion-backend flashinfer-autotune-skip-ops flashinfer-mla-disable-ragged
    flashinfer-mxfp4-moe-precision flexkv-config-file forward-hooks forward-pass-metrics-ipc-name
    forward-pass-metrics-worker-id fp4-gemm-backend fp8-gemm-backend fuseep-mode gated-launch-port
    gc-threshold gc-warning-threshold-secs generation-tokens-buckets gpu-id-step
    grpc-http-sidecar-port grpc-mode grpc-response-timeout-secs hf-chat-template-name
    hicache-host-memory-fraction hicache-host-memory-mode hicache-io-backend hicache-mem-layout
    hicache-ratio hicache-size hicache-storage-backend hicache-storage-backend-extra-config
    hicache-storage-prefetch-policy hicache-storage-prefetch-retry-max-attempts
    hicache-storage-prefetch-retry-poll-interval hicache-write-policy
    hierarchical-sparse-attention-extra-config hisparse-config http2-initial-connection-window-size
    http2-max-concurrent-streams hybrid-kvcache-ratio image-processor-backend impl
    incremental-streaming-output int8-mamba-ckpt-size is-embedding
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
    speculative-ngram-max-bfs-breadth
    speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth
    speculative-use-block-verification
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

"""Option bases, one a slot, and the fixed sections. A plugin subclasses its slot's base and narrows
``use``.

Fields here are the ones the generic passes read whatever the plugin; a plugin adds its own. Plan
zone: no torch. "None" always means: let the plan decide, and say why in a Decision.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.component import OPERATIONAL, CheckContext, Options
from glowplug.core.plugin.offers import QuantizationOffers


class Section(BaseModel):
    """Base of the sections that no plugin fills."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the fields that change nothing in this plan, each with the reason; see
        ``Options.without_effect``.
        """
        return {}


class StepDefaults(NamedTuple):
    """Defaults of one kind of device.

    Attributes:
        running: sequences in flight.
        chunk: prompt tokens a step.
        page: tokens a page.
    """

    running: int
    chunk: int
    page: int


DEVICE_DEFAULTS = {"cpu": StepDefaults(64, 1024, 16), "cuda": StepDefaults(256, 8192, 64)}


class AttentionOptions(Options):
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="dtype of the KV cache; auto is the compute dtype"
    )
    page_size: int | None = Field(
        None, ge=1, le=1024, description="tokens a KV page; None: the plan decides"
    )
    kv_error: float | None = Field(
        0.2,
        gt=0,
        description="most that an 8-bit KV cache may change logits, measured at start-up on random prompts, "
        "median divergence in nats; beyond it start is refused; None: only measured",
        json_schema_extra=OPERATIONAL,
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        kept = context.values["kv_dtype"]
        return (
            {"kv_error": f"a KV cache in {kept} is not measured"} if DTYPE_BYTES[kept] > 1 else {}
        )


class QuantizationOptions(Options):
    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Libraries named for products that do not run."""
        products = self.provider_fields()
        device = context.values["device"]
        (scheme,) = context.chosen["quantization"]
        assert isinstance(scheme.offers, QuantizationOffers)
        if self.dequantizes(device, scheme.offers):
            return dict.fromkeys(products, "weights are dequantised while they load")
        if context.facts.model.n_routed_experts:
            return {}
        return {
            name: "the model has no routed experts"
            for name, product in products.items()
            if product == "experts"
        }

    def dequantizes(self, device: str, offers: QuantizationOffers) -> bool:
        """Are quantized weights kept in the compute dtype on ``device``?"""
        return device in offers.dequantizes

    def split_block(self, device: str, offers: QuantizationOffers, model: ModelFacts) -> int:
        """Channels of ``model``'s weights that ranks must not cut apart on ``device``; 1: none."""
        return (
            max(offers.block_shape)
            if offers.block_shape and not self.dequantizes(device, offers)
            else 1
        )


class ParallelOptions(Options):
    size: int = Field(1, ge=1, description="ranks this strategy spans")


class CollectivesOptions(Options):
    timeout: float = Field(
        600.0,
        gt=0,
        description="seconds before a collective that does not finish ends the engine",
        json_schema_extra=OPERATIONAL,
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return {"timeout": "one rank waits for no other"} if context.values["ranks"] == 1 else {}


class SpeculativeOptions(Options):
    def width(self) -> int:
        """Tokens a decoding row computes a step: 1 plus what is drafted. Algorithms that draft
        override it.
        """
        return 1

    def lookahead(self) -> int:
        """Tokens behind a step's own whose cache entries the draft writes, so that rows need pages
        for them.
        """
        return 0

    def draft_folder(self) -> str | None:
        """Folder of the draft model; None: it comes with the target, or there is none."""
        return None


class SchedulerOptions(Options):
    max_running_requests: int | None = Field(
        None, ge=1, le=65536, description="sequences in flight; None: from memory"
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="waiting sequences; one more is answered 429"
    )
    chunk_size: int | None = Field(
        None, ge=1, description="most prompt tokens a step; None: the plan decides"
    )
    overlap: bool | None = Field(
        None,
        description="launch the next step before the last one is read; None: where a device computes by itself",
    )
    last_layer: Literal["auto", "all", "sampled"] = Field(
        "auto",
        description="tokens of a step that go through the last layer; of prompts only those sampled from, on a "
        "device by itself: their keys are cached all the same",
    )


class PolicyOptions(Options):
    pass


class GraphOptions(Options):
    """What every graph runner's options answer."""

    prefill: bool | None = Field(
        None,
        description="replay small steps with prompts in them, attention apart; None: "
        "where steps are captured on one rank",
    )

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Batch sizes to capture where ``rows`` sequences may run, ascending; none without capture."""
        return ()

    def token_counts(self, tokens: int) -> tuple[int, ...]:
        """Numbers of tokens for which to capture the model's pass in steps with prompts in them,
        ascending, where such a step has ``tokens`` at most; none without capture."""
        return ()


class CacheOptions(Options):
    pass


class SamplingOptions(Options):
    pass


class OutputOptions(Options):
    pass


class WeightOptions(Options):
    pass


class ExecutorOptions(Options):
    hosts: int | None = Field(
        None, ge=1, description="equal hosts sharing the ranks; None: as few as hold them"
    )
    oversubscribe: bool = Field(
        False, description="on a CPU: more ranks than cores, which then wait for one another"
    )
    start_timeout: float = Field(
        1800.0, gt=0, description="seconds a rank may take to become ready"
    )
    watchdog: float = Field(
        300.0, gt=0, description="seconds without a heartbeat before a rank counts as hung"
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        each = -(-context.values["ranks"] // context.values["hosts"])
        if context.values["device"] != "cpu":
            return {"oversubscribe": "ranks on CUDA devices have one each"}
        return (
            {"oversubscribe": "each rank has a core"}
            if each <= context.facts.hardware.cpu_cores
            else {}
        )


class OpsOptions(Options):
    pass


#: slot name -> base of its components' options (slots that are not here take plain ``Options``)
OPTION_BASES: dict[str, type[Options]] = {
    "attention": AttentionOptions,
    "quantization": QuantizationOptions,
    "parallel": ParallelOptions,
    "collectives": CollectivesOptions,
    "speculative": SpeculativeOptions,
    "scheduler": SchedulerOptions,
    "policy": PolicyOptions,
    "graphs": GraphOptions,
    "cache": CacheOptions,
    "sampling": SamplingOptions,
    "outputs": OutputOptions,
    "weights": WeightOptions,
    "executor": ExecutorOptions,
    "ops": OpsOptions,
}


class MemoryOptions(Section):
    """Overrides of the measured memory plan; normally all unset."""

    kv_tokens: int | None = Field(None, ge=1, description="tokens in the KV pool")
    kv_bytes: int | None = Field(None, ge=1, description="bytes of the KV pool on each rank")
    fraction: float | None = Field(
        None, gt=0, lt=1, description="share of the device for weights and KV (override)"
    )
    reserve_bytes: int = Field(0, ge=0, description="bytes to leave untouched beyond the budget")
    growing_segments: Literal["auto", True, False] = Field(
        "auto",
        description="CUDA: torch's allocator grows its segments (expandable_segments), so that steps and "
        "graphs take less and the KV cache more; auto: on for one rank, off for several, which "
        "were not run with it; PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, where set, stands "
        "instead",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = {"kv_bytes": "memory.kv_tokens decides"} if self.kv_tokens is not None else {}
        if context.values["device"] != "cuda":
            found["growing_segments"] = "segments are those of a CUDA device"
        return found


class ServerOptions(Section):
    host: str = Field(
        "127.0.0.1", description="address the HTTP listener binds; nothing else listens"
    )
    port: int = Field(30000, ge=0, le=65535, description="0: a free one")
    api_key: str | None = Field(
        None, min_length=1, description="required from clients as a bearer token"
    )
    admin_api_key: str | None = Field(
        None, min_length=1, description="required for admin routes; None: api_key opens them"
    )
    served_model_name: str | None = Field(
        None, description="name in /v1/models; None: the model as configured"
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, description="a longer request body is answered 413"
    )
    max_prompt_bytes: int | None = Field(
        None, ge=1, description="None: 16 bytes a token of context"
    )
    max_choices: int = Field(512, ge=1, description="most n x prompts in one request")
    request_timeout: float = Field(0.0, ge=0, description="seconds; 0: none")
    queue_timeout: float = Field(0.0, ge=0, description="seconds a request may wait; 0: none")
    stall_timeout: float = Field(
        30.0, gt=0, description="seconds without reading after which a client is dropped"
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds running requests get after SIGTERM"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins browsers may call from; none by default"
    )
    open_routes: tuple[str, ...] = Field(
        ("/health", "/ready", "/metrics"), description="routes that need no key"
    )
    default_max_tokens: int | None = Field(
        None, ge=1, description="None: what the context leaves (chat), 16 (completions)"
    )
    emit_reasoning_alias: bool = Field(
        True, description="also emit reasoning_content under the name reasoning"
    )
    stream_interval: int = Field(
        1, ge=1, description="tokens in each event of a stream, behind the first"
    )
    tokenizer_info: bool = Field(
        True, description="serve /tokenizer_info: special tokens and the chat template"
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="threads for templates and tokenization"
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = {}
        if context.config.skip_tokenizer:
            found = dict.fromkeys(
                ("tokenizer_threads", "max_prompt_bytes"), "requests bring token ids alone"
            )
        if self.api_key is None and self.admin_api_key is None:
            found["open_routes"] = "every route is open without a key"
        return found


class LogOptions(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe level shown"
    )
    format: Literal["human", "json"] = Field("human", description="json: one object a line")
    stats_interval: float = Field(
        10.0, ge=0, description="seconds between statistics lines; 0: none"
    )
    requests: bool = Field(
        True, description="a line for each HTTP request; prompts never appear in it"
    )


class MetricsOptions(Section):
    enabled: bool = Field(True, description="serve /metrics")
    compat: tuple[Literal["vllm", "sglang"], ...] = Field(
        (), description="also export core series under these names"
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        return {} if self.enabled else {"compat": "metrics.enabled is false"}

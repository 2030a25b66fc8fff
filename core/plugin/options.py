"""Base classes of component options, one per slot, and the fixed sections of the configuration.

A component's options subclass the base of its slot, narrow ``use`` and add fields of their own. The
fields of a base are common to all components of the slot, because the planning passes read them.
None always means that the plan decides the value and gives the reason in a Decision. Plan zone: no
torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.component import OPERATIONAL, CheckContext, Options
from glowplug.core.plugin.grammar_options import GrammarOptions
from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.plugin.speculative_options import SpeculativeOptions


class Section(BaseModel):
    """Base of the sections that do not belong to a slot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the fields that change nothing in this plan, each with its reason.

        See ``Options.without_effect``.
        """
        return {}


class StepDefaults(NamedTuple):
    """Default sizes for one device type.

    Attributes:
        running: most running sequences.
        chunk: most prompt tokens per step.
        page: tokens per page.
    """

    running: int
    chunk: int
    page: int


DEVICE_DEFAULTS = {"cpu": StepDefaults(64, 1024, 16), "cuda": StepDefaults(256, 8192, 64)}


class AttentionOptions(Options):
    """Options common to all attention backends."""

    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="dtype of the KV cache; auto: the compute dtype"
    )
    page_size: int | None = Field(
        None, ge=1, le=1024, description="tokens per KV page; None: the plan decides"
    )
    kv_error: float | None = Field(
        0.2,
        gt=0,
        description="largest change of the logits by an 8-bit KV cache: median divergence in nats, "
        "measured at start-up on random prompts; the engine does not start beyond it; "
        "None: only measured",
        json_schema_extra=OPERATIONAL,
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        kept = context.values.kv_dtype
        if DTYPE_BYTES.get(kept) == 1:
            return {}
        return {"kv_error": f"a KV cache in {kept} is not measured"}


class QuantizationOptions(Options):
    """Options common to all quantization schemes."""

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the fields that choose a library for GEMMs that do not run in this plan."""
        products = self.provider_fields()
        device = context.values.device
        (scheme,) = context.of(QuantizationOffers)
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
        """Return whether quantized weights are loaded in the compute dtype on ``device``."""
        return device in offers.dequantizes

    def split_block(self, device: str, offers: QuantizationOffers, model: ModelFacts) -> int:
        """Return the number of neighbouring channels of weights that must stay on one rank.

        Ranks can split a weight at multiples of this number only. It is 1 where weights can be
        split anywhere on ``device``.
        """
        return (
            max(offers.block_shape)
            if offers.block_shape and not self.dequantizes(device, offers)
            else 1
        )


class ParallelOptions(Options):
    """Options common to all parallelism strategies."""

    size: int = Field(1, ge=1, description="ranks that this strategy spans")


class CollectivesOptions(Options):
    """Options common to all collective backends."""

    timeout: float = Field(
        600.0,
        gt=0,
        description="seconds after which a collective that does not finish, a start without "
        "progress and the wait for another host end the engine",
        json_schema_extra=OPERATIONAL,
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        watched = any(getattr(one.offers, "ranks", 0) for one in context.chosen.get("executor", ()))
        alone = context.values.ranks == 1 and not watched
        return {"timeout": "one rank has no others to wait for"} if alone else {}


class SchedulerOptions(Options):
    """Options common to all schedulers."""

    max_running_requests: int | None = Field(
        None, ge=1, le=65536, description="most running sequences of the engine; None: from memory"
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="most waiting sequences of the engine; more are answered 429"
    )
    chunk_size: int | None = Field(
        None, ge=1, description="most prompt tokens of a step of the engine; None: the plan decides"
    )
    overlap: bool | None = Field(
        None,
        description="launch the next step before the results of the last one are read; "
        "None: on a device, unless a component waits for it",
    )
    last_layer: Literal["auto", "all", "sampled"] = Field(
        "auto",
        description="tokens of a step that go through the last layer; sampled: of prompts only "
        "those sampled from, while the keys of all are cached; auto: sampled on a device",
    )


class PolicyOptions(Options):
    """Options common to all scheduling policies."""


class GraphOptions(Options):
    """Options common to all graph runners, and the shapes that a runner captures."""

    prefill: bool | None = Field(
        None,
        description="replay graphs in small steps that contain prompts, except for attention; "
        "None: if steps are captured",
    )
    draft_extend: bool = Field(
        True,
        description="include the draft model's pass over a step's tokens (draft extend) in the "
        "graphs: in those of decode steps, and one graph for each token count of small prefill "
        "steps; false: this pass runs eagerly",
    )

    def sizes(self, rows: int, groups: int = 1) -> tuple[int, ...]:
        """Return the batch sizes to capture in ascending order; () without capture.

        ``rows``: most running sequences of a dp group. Given batch sizes are divided by ``groups``.
        """
        return ()

    def token_counts(self, tokens: int, ranks: int = 1) -> tuple[int, ...]:
        """Return the token counts to capture for steps that contain prompts, in ascending order.

        The result is () if such steps are not captured.

        Args:
            tokens: most tokens of such a step.
            ranks: number of ranks that share the step's work.
        """
        return ()


class CacheOptions(Options):
    """Options common to all prefix caches."""


class SamplingOptions(Options):
    """Options common to all samplers."""


class OutputOptions(Options):
    """Options common to all output parsers."""


class WeightOptions(Options):
    """Options common to all weight sources."""


class ExecutorOptions(Options):
    """Options common to all executors."""

    hosts: int | None = Field(
        None, ge=1, description="equal hosts that share the ranks; None: as few as can hold them"
    )
    oversubscribe: bool = Field(
        False, description="allow more ranks than cores on a CPU; ranks then wait for one another"
    )
    start_timeout: float | None = Field(
        None, gt=0, description="seconds until every rank is ready; None: see collectives.timeout"
    )
    watchdog: float = Field(
        300.0, gt=0, description="seconds without a heartbeat after which a rank counts as hung"
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        each = -(-context.values.ranks // context.values.hosts)
        if context.values.device != "cpu":
            return {"oversubscribe": "each rank has a CUDA device of its own"}
        return (
            {"oversubscribe": "each rank has a core"}
            if each <= context.facts.hardware.cpu_cores
            else {}
        )


class OpsOptions(Options):
    """Options common to all tables of kernels."""


#: slot name -> base class of its components' options; other slots use ``Options``
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
    "grammar": GrammarOptions,
    "outputs": OutputOptions,
    "weights": WeightOptions,
    "executor": ExecutorOptions,
    "ops": OpsOptions,
}


class MemoryOptions(Section):
    """Overrides of the memory plan; normally none is set."""

    kv_tokens: int | None = Field(None, ge=1, description="tokens in each dp group's KV pool")
    kv_bytes: int | None = Field(None, ge=1, description="bytes of the KV pool on each rank")
    fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the device's memory that everything together may take; null: 98% on "
        "a GPU",
    )
    static_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the device's memory for weights and KV cache, whose size follows; "
        "steps and graphs have the rest; null: the KV cache has what is left",
    )
    reserve_bytes: int = Field(0, ge=0, description="bytes to leave free beside the budget")
    growing_segments: Literal["auto", True, False] = Field(
        "auto",
        description="CUDA: use torch's expandable_segments, so that steps and graphs take less "
        "memory and the KV cache gets more; auto: on, but off with collectives that open other "
        "ranks' tensors by CUDA IPC handles; PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF takes "
        "precedence if set",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        sizes = ("kv_tokens", "kv_bytes", "static_fraction")  # the first that is given decides
        given = [name for name in sizes if getattr(self, name) is not None]
        found = dict.fromkeys(given[1:], f"memory.{given[0]} decides" if given else "")
        if context.values.device != "cuda":
            found["growing_segments"] = "only allocators of CUDA devices have segments"
        return found


class ServerOptions(Section):
    """Options of the HTTP server."""

    host: str = Field(
        "127.0.0.1", description="address that the HTTP server binds; nothing else listens"
    )
    port: int = Field(30000, ge=0, le=65535, description="port of the HTTP server; 0: a free one")
    api_key: str | None = Field(
        None, min_length=1, description="bearer token that clients must send"
    )
    admin_api_key: str | None = Field(
        None, min_length=1, description="bearer token for admin routes; None: api_key opens them"
    )
    served_model_name: str | None = Field(
        None, description="name in /v1/models; None: the model as configured"
    )
    max_body_bytes: int = Field(
        32 << 20, ge=1024, description="a longer request body is answered 413"
    )
    max_prompt_bytes: int | None = Field(
        None, ge=1, description="longest prompt in bytes; None: 16 per token of context_length"
    )
    max_choices: int = Field(512, ge=1, description="most choices (n x prompts) in one request")
    request_timeout: float = Field(0.0, ge=0, description="seconds a request may take; 0: no limit")
    queue_timeout: float = Field(
        0.0, ge=0, description="seconds a request may wait in the queue; 0: no limit"
    )
    stall_timeout: float = Field(
        30.0, gt=0, description="seconds after which a client that reads nothing is disconnected"
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds that running requests may still take after SIGTERM"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins from which browsers may send requests; none by default"
    )
    open_routes: tuple[str, ...] = Field(
        ("/health", "/ready", "/metrics"), description="routes that need no key"
    )
    page: bool = Field(
        True, description="serve a page with status and chat at /; it needs no key to load"
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="max_tokens of requests that give none; None: the rest of the context (chat), "
        "16 (completions), 128 (/generate)",
    )
    emit_reasoning_alias: bool = Field(
        True, description="send reasoning_content also under the name reasoning"
    )
    stream_interval: int = Field(
        1, ge=1, description="tokens in each event of a stream after the first"
    )
    stored_responses: int = Field(1000, ge=0, description="most stored responses; 0: none")
    stored_response_bytes: int = Field(256 << 20, ge=1024, description="their most bytes")
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
                ("tokenizer_threads", "max_prompt_bytes"), "requests contain token ids only"
            )
        if self.api_key is None and self.admin_api_key is None:
            found["open_routes"] = "no key is set, so every route is open"
        if not self.stored_responses:
            found["stored_response_bytes"] = "no response is kept"
        return found

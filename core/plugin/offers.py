"""Offers: the capabilities that components declare, one frozen dataclass per slot.

Checks decide whether a combination runs by offers alone, never by a component's name. To describe a
new incompatibility, add a field here and a check that reads it. Plan zone: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.core.facts.inventory import Inventory
from glowplug.core.facts.kv_layout import KVEntries
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import Normalise
from glowplug.core.facts.stored_formats import Leaves, OnlineWeight, Stored
from glowplug.core.facts.weight_classes import LAYER_PREFIX
from glowplug.core.plugin.byte_costs import (
    AttentionStep,
    DecodingRows,
    ExchangeSizes,
    ExpertsStep,
    MemoryUse,
)
from glowplug.core.plugin.modes import (
    DEVICES as DEVICES,
    EVERY_MODE_EAGER as EVERY_MODE_EAGER,
    EVERY_MODE_GRAPH as EVERY_MODE_GRAPH,
    FLOAT_DTYPES as FLOAT_DTYPES,
    HOST_MEMORY as HOST_MEMORY,
    AutoSize,
    Capture as Capture,
    Mode as Mode,
    Offers as Offers,
    Tier as Tier,
)


@dataclass(frozen=True)
class AttentionOffers(Offers):
    """Capabilities of an attention backend.

    Attributes:
        kinds: attention kinds: "mla" (latent cache), "mha" (per-head cache: MHA, GQA and MQA).
        kv_dtypes: KV cache dtypes it reads, such as "bfloat16" and "fp8_e4m3".
        page_sizes: page sizes in tokens; empty for any.
        tree: it reads tree masks in verify steps; otherwise causal chains only.
        max_width: most query tokens per row in decode and verify steps; 0: any number.
        first_key: it observes ``Batch.first_key``.
        kv_entries: function from a ``KVContext`` to the tensors that layers cache for each token.
            The plan counts the cache's bytes from them, and a start whose ``kv_layout()`` returns
            other ones is stopped. None: the usual entries of the model's kind.
        work: function from a prefill step to its peak device memory in bytes, including the output,
            but not the queries and the new cache entries; None: the byte budget estimates it.
        reserves: function from the largest decode step to the bytes that its ``reserve`` allocates
            on a device beside the KV cache; None for 0 bytes.
        short_keys: most keys of a short row; 0 if decoding is the same for all rows.
        short_rows: function from the number of heads on a rank to the batch sizes, in rows of one
            token, at which a faster kernel decodes batches of short rows only.
        measured: function from a ``CheckContext`` to the measured time of decoding or None, by
            which "auto" orders backends.
    """

    kinds: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = FLOAT_DTYPES
    page_sizes: frozenset[int] = frozenset()
    tree: bool = False
    max_width: int = 0
    first_key: bool = False
    kv_entries: KVEntries | None = None
    work: Callable[[AttentionStep], int] | None = None
    reserves: Callable[[DecodingRows], int] | None = None
    short_keys: int = 0
    short_rows: Callable[[int], range] | None = None
    measured: Callable[[Any], float | None] | None = None


@dataclass(frozen=True)
class QuantizationOffers(Offers):
    """Capabilities of a quantization scheme.

    Attributes:
        reads: values of ``quantization_config.quant_method`` it loads; "none" stands for an
            unquantized checkpoint.
        stored: function from a ``StoredWeight`` (facts, module, rows, columns) to the tensors that
            a checkpoint of these methods stores for it: last part of the name -> dtype and shape;
            None for one tensor in the model's dtype.
        leaves: names of these tensors, with the bytes of their elements after loading; or a
            function from facts and module path to them, if modules differ.
        online: it can also quantize an unquantized checkpoint while loading.
        online_bytes: bytes of an element of a weight quantized while loading, without scales; or a
            function from an ``OnlineWeight`` to the bytes of the whole weight after loading. It is
            not called for embeddings, the head and routers, which stay in the compute dtype.
        block_shape: (rows, columns) of a weight block with one scale, or None.
        dequantizes: device types on which quantized weights are loaded in the compute dtype.
        cast_bytes: bytes of an activation element as its GEMMs read it on a device; 0 for the
            compute dtype.
        fused_shared: the device can compute the shared expert fused, as further routed experts.
        places_experts: its experts are those of ``ExpertsShape.numbers``; False: it reads ``first``
            and ``count`` alone.
        experts_work: function from an ``ExpertsStep`` to the device memory of the routed experts;
            None if they hold only rows in the compute dtype.
        peak_tokens: function from the scheme's options to token counts. Steps with so many
            tokens may need more memory for routed experts than larger steps, which run other
            kernels.
        aliases: other values of ``use`` that select it.
    """

    reads: frozenset[str] = frozenset()
    stored: Stored | None = None
    leaves: Leaves = ()
    online: bool = False
    online_bytes: int | Callable[[OnlineWeight], float] = 1
    block_shape: tuple[int, int] | None = None
    dequantizes: frozenset[str] = frozenset()
    cast_bytes: float = 0.0
    fused_shared: bool = False
    places_experts: bool = False
    experts_work: Callable[[ExpertsStep], MemoryUse] | None = None
    peak_tokens: Callable[[Any], tuple[int, ...]] | None = None
    aliases: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ParallelOffers(Offers):
    """Capabilities of a parallelism strategy.

    Attributes:
        axes: mesh axes it defines ("tp", "dp", "ep"), each of the size in its option ``size``.
        ranks: it can span more than one rank.
        idle_steps: a rank may have no tokens while others run a step, so all components of a step
            must support ``Mode.IDLE``.
        exchanges: tokens move between ranks, so a layer may compute other tokens than the rank's
            own, and their number differs between steps. False if all ranks compute all tokens of a
            step. A function receives the strategy's options and the mesh.
        buffer_bytes: function from the largest exchanges to the bytes that they reserve on a
            device, with collectives that have ``expert_rows``; None for none.
        expert_copies: function from the strategy's options to the number of copies of experts that
            each layer has beside its routed experts, if ranks may hold other than consecutive
            experts (``held_experts``), else None; None for a strategy that never does this.
        auto_size: how its option ``size`` is decided if that may be "auto"; None if it may not.
    """

    axes: frozenset[str] = frozenset()
    ranks: bool = False
    idle_steps: bool = False
    exchanges: bool | Callable[[Any, Mapping[str, int]], bool] = True
    buffer_bytes: Callable[[ExchangeSizes], int] | None = None
    expert_copies: Callable[[Any], int | None] | None = None
    auto_size: AutoSize | None = None


@dataclass(frozen=True)
class SpeculativeOffers(Offers):
    """Capabilities and needs of a speculative algorithm.

    Attributes:
        drafts: it drafts tokens; False: plain decoding, of width 1.
        tree: its drafted tokens form a tree, so verify steps need tree masks.
        nextn_layer: it needs a multi-token-prediction layer, of the checkpoint or a draft folder.
        eagle_head: it needs an EAGLE head, in a draft folder.
        whole_model: it needs a whole model, in a draft folder, with its own KV cache.
        first_key: its draft's cache has no entry for the first position, so attention must observe
            ``Batch.first_key``.
        simulates: its drafts are verified by ``core.speculation.verify``, or it applies
            ``Batch.simulated`` itself.
        reserves: function from the largest decode step to the bytes that its ``reserve`` allocates
            beside the KV cache and the states of pages; None for 0 bytes.
        adapts: its methods follow ``Batch.draft_shape`` of each step, also without drafts.
        foresees: it sets ``Accepted.next_drafts``, and it ``adapts``.
    """

    adapts: bool = False
    foresees: bool = False
    drafts: bool = False
    tree: bool = False
    nextn_layer: bool = False
    eagle_head: bool = False
    whole_model: bool = False
    first_key: bool = False
    simulates: bool = False
    reserves: Callable[[DecodingRows], int] | None = None


@dataclass(frozen=True)
class SchedulerOffers(Offers):
    """Capabilities of a scheduler.

    Attributes:
        adapts: it is a ``protocols.AdaptiveScheduler``.
        restores: it restores the pages that a match has in a tier (``TieredCache.restore``).
    """

    adapts: bool = False
    restores: bool = False


@dataclass(frozen=True)
class CacheOffers(Offers):
    """Capabilities of a prefix cache.

    Attributes:
        shares: requests may share pages.
        tier: it is a ``protocols.TieredCache``, with this tier unless its option is 0.
    """

    shares: bool = True
    tier: Tier | None = None


@dataclass(frozen=True)
class GraphOffers(Offers):
    """Capabilities of a graph runner.

    Attributes:
        captures: modes whose steps it captures; in these modes every component that takes part in
            steps must offer ``Capture.GRAPH``.
    """

    captures: frozenset[Mode] = frozenset()


@dataclass(frozen=True)
class SamplerOffers(Offers):
    """Capabilities of a sampler. Every sampler must support every field of ``SamplingParams``.

    Attributes:
        state_bytes: most bytes kept on a device for each row and token of the vocabulary.
        scratch_rows: function from the number of sampled rows in a step to the most memory that
            sampling takes on a device, in rows of float32 logits; None for none.
    """

    state_bytes: float = 0.0
    scratch_rows: Callable[[int], int] | None = None


@dataclass(frozen=True)
class GrammarOffers(Offers):
    """Capabilities of a library for structured output.

    Attributes:
        kinds_of_grammar: kinds of ``GrammarSpec`` that it compiles.
    """

    kinds_of_grammar: frozenset[str] = frozenset()


#: kinds of ``Piece`` that answers can have beside "content"; parsers of other kinds are refused
CARRIED_KINDS = frozenset({"reasoning", "tool_call"})


@dataclass(frozen=True)
class OutputOffers(Offers):
    """Capabilities of an output parser.

    Attributes:
        aliases: other values of ``use`` that select it.
        kinds: kinds of ``Piece`` that it produces beside "content": "reasoning", "tool_call".
    """

    aliases: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset({"reasoning"})


@dataclass(frozen=True)
class WeightOffers(Offers):
    """Capabilities of a weight source.

    Attributes:
        formats: file formats it opens ("safetensors", "gguf"); "synthetic" needs no file.
    """

    formats: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ExecutorOffers(Offers):
    """Capabilities of an executor.

    Attributes:
        ranks: it can run more than one rank.
        hosts: it can run ranks on more than one host.
    """

    ranks: bool = False
    hosts: bool = False


@dataclass(frozen=True)
class ModelOffers(Offers):
    """Capabilities of a model family.

    Attributes:
        architectures: values of ``architectures`` in config.json that it builds.
        kind: attention kind of its layers, "mla" or "mha".
        nextn: it can build a multi-token-prediction layer.
        draft_architectures: architectures of folders that hold only such a layer; they serve as
            draft models and are refused as models.
        eagle_architectures: architectures of EAGLE heads that it builds.
        features: its models return hidden states of chosen layers (``protocols.KeepsFeatures``).
        sampled_last_layer: its last layer can run for a part of a step's tokens
            (``protocols.SampledLastLayer``).
        inventory: function from the facts to the model's tensors and sizes. It must accept facts
            whose config.json lacks keys: a check refuses these later. None for the inventory of a
            family with the same factory; without one, bytes come from tensor headers alone, and
            the model runs on one rank.
        eagle_inventory: the same for EAGLE heads.
        normalise: function that returns config.json with the defaults of keys that it may lack.
        layer_prefix: beginning of the names of layers' tensors, which the layer's number follows.
    """

    architectures: frozenset[str] = frozenset()
    kind: str = "mha"
    nextn: bool = False
    draft_architectures: frozenset[str] = frozenset()
    eagle_architectures: frozenset[str] = frozenset()
    features: bool = False
    sampled_last_layer: bool = False
    inventory: Callable[[ModelFacts], Inventory] | None = None
    eagle_inventory: Callable[[ModelFacts], Inventory] | None = None
    normalise: Normalise | None = None
    layer_prefix: str = LAYER_PREFIX


@dataclass(frozen=True)
class OpsOffers(Offers):
    """Capabilities of a table of elementwise and routing kernels.

    Attributes:
        ops: names of the entries that it provides; those that a model's layers call must be there.
        adds_parts: its norms can add up partial results: the rows of a token's experts, which then
            stay separate until the next layer, and the partial sums of other GEMMs.
    """

    ops: frozenset[str] = frozenset()
    adds_parts: bool = False


@dataclass(frozen=True)
class CollectiveOffers(Offers):
    """Capabilities of a collective backend ("local" for one rank, gloo, nccl).

    Attributes:
        ranks: it can connect more than one rank.
        expandable_segments: it works with expandable segments of torch's allocator (virtual
            memory). False if ranks open the tensors of others by CUDA IPC handles, which this
            memory does not have.
        sums_in_norm: sums over the ranks are computed by the next norm, and so are the sums of
            ``Parts`` before them.
        buffer_bytes: function from the largest exchanges to the bytes of its buffers; or None.
        library_bytes: the same for what its library (NCCL) allocates, an estimate.
        expert_rows: it has the method ``expert_rows``, through which tokens go only to the ranks of
            their experts.
        table_writer: ``"package.module:function"`` that writes the table of a record of ``bench
            kernels --collectives`` and returns its path or None. "": none.
    """

    ranks: bool = False
    expandable_segments: bool = False
    sums_in_norm: bool = False
    buffer_bytes: Callable[[ExchangeSizes], int] | None = None
    library_bytes: Callable[[ExchangeSizes], int] | None = None
    expert_rows: bool = False
    table_writer: str = ""


@dataclass(frozen=True)
class PolicyOffers(Offers):
    """Capabilities of a scheduling policy.

    Attributes:
        uses_prefix: its order depends on the prefix cache.
        request_fields: ``"package.module:Class"`` of a pydantic model of the fields that it reads
            from a request's ``ext``; "" for none. The front checks them before it takes a request.
    """

    uses_prefix: bool = False
    request_fields: str = ""

"""The vocabulary of capabilities: what a component says it offers, so that no code ever asks who it
is.

Plan zone: imports without torch. Every offer is a frozen dataclass, one per slot family. A
combination is judged by these words only; to teach the engine a new incompatibility, add a word
here and a check that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

from glowplug.core.plugin.byte_costs import AttentionStep, DecodingRows, ExpertsStep, Work


class Mode(StrEnum):
    """What a step computes. Graph capture and attention support are declared per mode."""

    PREFILL = "prefill"  #: chunks of prompts, possibly mixed with decoding rows
    DECODE = "decode"  #: one token a row
    VERIFY = "verify"  #: the speculative width of tokens a row
    DRAFT_DECODE = "draft_decode"  #: a draft's passes of one token a row
    DRAFT_EXTEND = (
        "draft_extend"  #: a draft's pass over the tokens of a step, which it may attend to later
    )
    IDLE = "idle"  #: no token of its own; takes part in collectives only


class Capture(IntEnum):
    """How a component may run in a mode. ``NO < EAGER < GRAPH``."""

    NO = 0  #: not at all
    EAGER = 1  #: yes, but it syncs with the host or allocates: no graph capture
    GRAPH = 2  #: yes, and it may be captured


EVERY_MODE_EAGER: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.EAGER)
EVERY_MODE_GRAPH: Mapping[Mode, Capture] = dict.fromkeys(Mode, Capture.GRAPH)

DEVICES = frozenset({"cpu", "cuda"})
FLOAT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class Offers:
    """What every component says, whatever its slot.

    Attributes:
        devices: device types it runs on ("cpu", "cuda").
        compute: CUDA compute capabilities it supports (90 = SM90); empty: any from
            ``least_compute`` on.
        least_compute: the first of them; 0: any.
        dtypes: compute dtypes it supports, by torch name.
        modes: capture level per step mode.
        overlap: its step code never waits for the device, so the next step may be launched before
            this one is read.
    """

    devices: frozenset[str] = DEVICES
    compute: frozenset[int] = frozenset()
    least_compute: int = 0
    dtypes: frozenset[str] = FLOAT_DTYPES
    modes: Mapping[Mode, Capture] = field(default_factory=lambda: dict(EVERY_MODE_GRAPH))
    overlap: bool = True

    def runs_on(self, cards: Iterable[int]) -> bool:
        """Does it support CUDA devices of these compute capabilities? One that is not known (0) is
        not held against it.
        """
        return all(
            (not self.compute or card in self.compute) and not 0 < card < self.least_compute
            for card in cards
        )

    @cached_property
    def runs(self) -> frozenset[Mode]:
        """Modes it runs in at all."""
        return frozenset(mode for mode, level in self.modes.items() if level >= Capture.EAGER)

    @cached_property
    def captures_in(self) -> frozenset[Mode]:
        """Modes in which it may be part of a captured graph."""
        return frozenset(mode for mode, level in self.modes.items() if level >= Capture.GRAPH)


@dataclass(frozen=True)
class AttentionOffers(Offers):
    """Attention backends.

    Attributes:
        kinds: "mla" (latent cache) and/or "mha" (per-head cache; MHA, GQA and MQA).
        kv_dtypes: cache dtypes it reads ("float32", "bfloat16", "float16", "fp8_e4m3").
        page_sizes: tokens a page it accepts; empty: any.
        tree: reads tree masks in verify (False: causal chains only).
        max_width: largest number of query tokens a row in decode/verify; 0: any.
        first_key: honours ``Batch.first_key`` (a draft's cache has no entry for the first
            position).
        work: bytes that a prefill step holds on a device beside its queries and new cache entries,
            the output among them; None: nobody has counted, and the byte budget guesses.
        reserves: bytes that its ``reserve`` takes on a device beside the cache; None: none.
        short_keys: keys up to which a row is short; 0: how long rows may become changes nothing.
        short_rows: (heads of a rank) -> how many rows, of one token each, are decoded otherwise,
            and quicker, where ``Batch.longest`` says that all of them are short.
    """

    kinds: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = FLOAT_DTYPES
    page_sizes: frozenset[int] = frozenset()
    tree: bool = False
    max_width: int = 0
    first_key: bool = False
    work: Callable[[AttentionStep], int] | None = None
    reserves: Callable[[DecodingRows], int] | None = None
    short_keys: int = 0
    short_rows: Callable[[int], range] | None = None


@dataclass(frozen=True)
class QuantizationOffers(Offers):
    """Quantization schemes.

    Attributes:
        reads: values of ``quantization_config.quant_method`` it loads; "none" means an unquantized
            checkpoint.
        online: it can also quantize an unquantized checkpoint while loading.
        online_bytes: what a number then takes, scales left out (the byte budget needs it).
        block_shape: (rows, columns) of a weight block, or None.
        dequantizes: device types on which quantized weights are kept in the compute dtype (the byte
            budget needs it).
        cast_bytes: of a number of activations as its products read them on a device; 0: in the
            compute dtype.
        rides: on a device the shared expert may be computed as further routed ones.
        experts_work: what routed experts hold on a device; None: rows of the compute dtype.
        turns: (the scheme's options) -> numbers of tokens up to which experts hold more than those
            of larger steps may.
    """

    reads: frozenset[str] = frozenset()
    online: bool = False
    online_bytes: int = 1
    block_shape: tuple[int, int] | None = None
    dequantizes: frozenset[str] = frozenset()
    cast_bytes: float = 0.0
    rides: bool = False
    experts_work: Callable[[ExpertsStep], Work] | None = None
    turns: Callable[[Any], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ParallelOffers(Offers):
    """Parallelism strategies.

    Attributes:
        axes: mesh axes it defines ("tp", "dp", "ep").
        ranks: how many ranks it spans is given by its option ``size``; True when more than one is
            possible.
        idle_steps: ranks may have nothing to do while others step (needs IDLE support on the step's
            path).
    """

    axes: frozenset[str] = frozenset()
    ranks: bool = False
    idle_steps: bool = False


@dataclass(frozen=True)
class SpeculativeOffers(Offers):
    """Speculative algorithms.

    Attributes:
        drafts: it proposes tokens (False: the algorithm of width one).
        tree: its proposals form a tree, so verify needs tree masks.
        nextn_layer: it needs a multi-token-prediction layer, the checkpoint's own or one in a draft
            folder.
        first_key: its draft's cache has no entry for the first position, so attention must honour
            ``Batch.first_key``.
    """

    drafts: bool = False
    tree: bool = False
    nextn_layer: bool = False
    first_key: bool = False


@dataclass(frozen=True)
class SchedulerOffers(Offers):
    """Schedulers: what every component says, and no more."""


@dataclass(frozen=True)
class CacheOffers(Offers):
    """Prefix caches. ``shares``: requests may share pages."""

    shares: bool = True


@dataclass(frozen=True)
class GraphOffers(Offers):
    """Graph runners. ``captures``: it records modes, so every component on the step's path must
    offer GRAPH there.
    """

    captures: frozenset[Mode] = frozenset()


@dataclass(frozen=True)
class SamplerOffers(Offers):
    """Samplers. Each honours every field of ``SamplingParams``.

    Attributes:
        state_bytes: what it keeps on a device at most, for each row and token of the vocabulary.
        scratch_rows: rows of float32 logits that it makes in a step of so many on a device, at
            most.
    """

    state_bytes: float = 0.0
    scratch_rows: Callable[[int], int] | None = None


#: kinds of ``Piece`` beside "content" that answers carry; a parser that makes others is refused
CARRIED_KINDS = frozenset({"reasoning"})


@dataclass(frozen=True)
class OutputOffers(Offers):
    """Output parsers.

    Attributes:
        aliases: other names users know it by.
        kinds: kinds of ``Piece`` that it makes beside "content": "reasoning", "tool_call".
    """

    aliases: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset({"reasoning"})


@dataclass(frozen=True)
class WeightOffers(Offers):
    """Weight sources. ``formats``: file formats it opens ("safetensors", "gguf"); "synthetic" needs
    no file.
    """

    formats: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ExecutorOffers(Offers):
    """Executors. ``hosts``/``ranks``: may it span several."""

    ranks: bool = False
    hosts: bool = False


@dataclass(frozen=True)
class ModelOffers(Offers):
    """Model families.

    Attributes:
        architectures: values of config.json's ``architectures`` it builds.
        kind: attention kind its layers need: "mla" or "mha".
        nextn: it can build a multi-token-prediction layer.
        draft_architectures: architectures of folders that hold such a layer alone; they draft and
            are never served.
        sampled_last_layer: its last layer may run for some tokens of a step alone
            (``protocols.SampledLastLayer``).
    """

    architectures: frozenset[str] = frozenset()
    kind: str = "mha"
    nextn: bool = False
    draft_architectures: frozenset[str] = frozenset()
    sampled_last_layer: bool = False


@dataclass(frozen=True)
class OpsOffers(Offers):
    """Elementwise and routing kernels bound on layers. ``ops``: names of the table's entries it
    provides.

    ``adds_parts``: norms add up the rows of a token's experts, which then stay as they are until
    the next layer, and parts of other products.
    """

    ops: frozenset[str] = frozenset()
    adds_parts: bool = False


@dataclass(frozen=True)
class CollectiveOffers(Offers):
    """Collective backends ("local" for one rank, gloo, nccl). ``ranks``: more than one.

    ``growing_segments``: tensors may lie in segments that torch's allocator grows (virtual memory).
    Not where ranks open one another's tensors by CUDA IPC handles, which such memory has none of.
    """

    ranks: bool = False
    growing_segments: bool = False


@dataclass(frozen=True)
class PolicyOffers(Offers):
    """Scheduling policies. ``uses_prefix``: its order depends on the prefix cache."""

    uses_prefix: bool = False

"""Descriptions of steps from which components compute their device memory in bytes. No torch.

Components declare their memory as functions of these descriptions (``AttentionOffers.work``,
``QuantizationOffers.experts_work``) beside the code that allocates it. ``plan/budget/layers.py``
adds up the memory that is held at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glowplug.core.facts.model_facts import Facts

#: Prompts often have round lengths, so token counts divisible by this number are common. Libraries
#: compile kernels for each token count, so warm-up runs these counts.
ROUND_TOKENS = 512

NUMBER_BYTES = 4  #: bytes of a float32 or int32 number

#: tokens gained without drafts whose entries a draft model writes together
PENDING_TOKENS = 512


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of a part of a layer, in bytes.

    Attributes:
        peak: peak memory beside the inputs.
        result: memory of the results, which are part of ``peak``.
        fragmentation: further memory that torch's allocator takes for large blocks that do not fit
            into freed ones; it counts only without expandable segments.
    """

    peak: int
    result: int
    fragmentation: int = 0


@dataclass(frozen=True)
class ExchangeSizes:
    """The largest exchanges between the ranks of a plan.

    Attributes:
        options: options of the component that exchanges.
        mesh: mesh axis -> size.
        hidden: hidden size of the model.
        experts_per_token: most experts of a token.
        tokens: most tokens of a step: for collectives of all dp groups, for a strategy of a rank.
        card: name of the GPU, by which measured times are found; "" for none.
        dtype: dtype of the activations.
    """

    options: Any
    mesh: Mapping[str, int]
    hidden: int
    experts_per_token: int
    tokens: int
    card: str = ""
    dtype: str = "bfloat16"

    @classmethod
    def of(
        cls, facts: Facts, options: Any, mesh: Mapping[str, int], tokens: int, dtype: str
    ) -> ExchangeSizes:
        """Return the largest exchanges of a component; see the attributes for the arguments."""
        model = facts.model
        devices = facts.hardware.devices
        card = devices[0].name if devices else ""
        experts = model.sizes.experts_per_token
        return cls(options, mesh, model.hidden_size, experts, tokens, card, dtype)


@dataclass(frozen=True)
class AttentionStep:
    """A prefill step in one attention layer on one rank.

    Attributes:
        tokens: number of tokens of the step.
        longest: most tokens of one row of the step.
        cached: number of tokens of the longest row that were cached before the step.
        heads: number of heads on this rank.
        all_heads: number of heads on all ranks.
        key: size of a head's query or key, in elements.
        value: size of a head's value, in elements.
        entry: size of a token's cache entry, in elements, if all heads share it; 0 if each head has
            an entry of its own.
        element: bytes of an element.
    """

    tokens: int
    longest: int
    cached: int
    heads: int
    all_heads: int
    key: int
    value: int
    entry: int
    element: int


@dataclass(frozen=True)
class DecodingRows:
    """The largest decode step of a rank.

    Attributes:
        rows: number of rows of the sequence table, plus one for padding rows.
        positions: most positions of a row.
        page_size: tokens per page.
        width: number of tokens of a row in the step.
        heads: number of heads on this rank.
        drafts: the step is preceded by draft passes, whose cache has no entry for the first
            position (``Batch.first_key``).
        hidden: bytes of a hidden state.
    """

    rows: int
    positions: int
    page_size: int
    width: int
    heads: int
    drafts: bool
    hidden: int = 0

    @property
    def columns(self) -> int:
        """Number of pages of a row."""
        return -(-self.positions // self.page_size)


def token_drafts_bytes(step: DecodingRows) -> int:
    """Return the bytes that ``speculation.token_drafts.TokenDrafts`` reserves.

    These are the tokens and the length of each row, in int32, and for trees three int64 per token
    of a step.
    """
    return step.rows * ((step.positions + 2) * NUMBER_BYTES + 3 * 8 * step.width)


def found_drafts_bytes(step: DecodingRows) -> int:
    """Return the bytes of ``token_drafts_bytes`` and of drafts that are kept between two steps.

    These are the drafts of each row, in int64, and their number, in int32.
    """
    return token_drafts_bytes(step) + step.rows * (8 * (step.width - 1) + NUMBER_BYTES)


def state_drafts_bytes(step: DecodingRows) -> int:
    """Return the bytes that an algorithm reserves whose draft continues the target's hidden states.

    These are a hidden state, a token and a length of each row, and the pending tokens.
    """
    return step.rows * (step.hidden + 12) + PENDING_TOKENS * (step.hidden + 4 * 8)


@dataclass(frozen=True)
class ExpertsStep:
    """The routed experts of one layer on one rank.

    Attributes:
        tokens: number of routed tokens.
        chosen: number of experts of each token, including the ``fused_shared`` ones.
        count: number of experts on this rank, including the ``fused_shared`` ones.
        fused_shared: number of experts, the last of ``chosen`` and ``count``, that are a fused
            shared expert.
        hidden: hidden size of the model.
        inter: intermediate size of an expert.
        element: bytes of an activation element.
        parts: the results of a token's experts may stay separate, because the next norm adds them.
        options: options of the quantization scheme.
        packages: installed distributions, name -> version.
        dtype: torch's name for the dtype of activations.
        card: name of the GPU, as the driver reports it; "" for none.
        compute: compute capability of the GPU, for example 90 for Hopper.
    """

    tokens: int
    chosen: int
    count: int
    fused_shared: int
    hidden: int
    inter: int
    element: int
    parts: bool
    options: Any
    packages: Mapping[str, str]
    dtype: str = ""
    card: str = ""
    compute: int = 0

    @property
    def pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return self.tokens * self.chosen

    @property
    def rows_bytes(self) -> int:
        """Bytes of one result row for each (token, expert) pair."""
        return self.pairs * self.hidden * self.element

    def with_expert_rows(self, peak: int, beside: int) -> MemoryUse:
        """Return the memory use of experts whose last kernel writes one row for each pair.

        Unless ``parts`` is set, the rows of each token are then added up in a tensor of their own.

        Args:
            peak: peak memory in bytes before the last kernel.
            beside: bytes held beside the rows while the last kernel runs.
        """
        out = self.tokens * self.hidden * self.element
        if self.parts:
            return MemoryUse(max(peak, self.rows_bytes + beside), self.rows_bytes)
        return MemoryUse(max(peak, self.rows_bytes + beside, self.rows_bytes + out), out)


def tiled_rows(pairs: int, experts: int, tile: int) -> int:
    """Return the most rows there can be once pairs are sorted by expert and padded to tiles.

    Args:
        pairs: number of (token, expert) pairs.
        experts: number of experts.
        tile: rows per tile.
    """
    return min(pairs, (pairs + experts * (tile - 1)) // tile) * tile


def gated_rows(step: ExpertsStep) -> MemoryUse:
    """Return the memory use of two expert GEMMs in the compute dtype, the first with a fused gate.

    The first GEMM writes rows of the intermediate size, the second rows of the hidden size.
    """
    inner = step.pairs * step.inter * step.element
    return step.with_expert_rows(0, inner)

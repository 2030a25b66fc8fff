"""Steps over chains of drafts on a GPU, with one kernel for many small operations."""

from __future__ import annotations

from torch import Tensor

from glowplug.core.protocols import Sampled, Sampler
from glowplug.core.speculation.verify import verify
from glowplug.core.step.batch import Accepted, Batch
from glowplug.kernels.speculation import chain_places_reference, settle_chains_reference
from glowplug.kernels.speculation.settle_chains_reference import ChainStep, RowStates, Settled
from glowplug.plugins.speculative.shared.drafting import DraftPositions


def place_chains(
    batch: Batch, computed: Tensor, page_size: int, width: int, passes: int
) -> tuple[DraftPositions, ...]:
    """Set the places of the decoding rows' tokens in ``batch``, and return those of draft passes.

    Args:
        batch: The target's step; its decoding rows have chains.
        computed: Number of tokens of each row in the target's cache, int32 [R].
        page_size: Tokens per page.
        width: Number of tokens that a decoding row computes in the step.
        passes: Number of draft passes before the step.
    """
    place = chain_places_reference.place_chains
    if batch.row_ids.is_cuda:
        from glowplug.kernels.speculation.chain_places import place_chains as place
    rows = batch.num_decodes
    made = place(
        batch.row_ids[:rows],
        computed,
        batch.page_table[:rows],
        page_size,
        batch.positions[: rows * width],
        batch.kv_slots[: rows * width],
        batch.kv_lens_device[:rows],
        passes,
    )
    return tuple(
        DraftPositions(*fields, made.query_starts)
        for fields in zip(made.positions, made.kv_slots, made.kv_lens)
    )


def accept_chains(
    logits: Tensor,
    hidden: Tensor,
    batch: Batch,
    sampler: Sampler,
    states: RowStates,
    page_size: int,
    context: int,
) -> tuple[Accepted, Settled]:
    """Verify a step of decoding rows, and store the new states of rows and pages.

    Args:
        logits: [D * W, V].
        hidden: The target's hidden states, [D * W, H].
        batch: The target's step, of decoding rows with chains only.
        sampler: The sampler.
        states: States of rows and pages.
        page_size: Tokens per page.
        context: Most tokens of a row.

    Returns:
        The accepted tokens, and the tokens that the draft's cache lacks.
    """
    settle = settle_chains_reference.settle_chains
    if hidden.is_cuda:
        from glowplug.kernels.speculation.settle_chains import settle_chains as settle

        if batch.simulated is not None:
            from glowplug.kernels.speculation.simulated_chains import simulated_chains

            batch.simulated.chain_draws = simulated_chains
    settled: list[Settled] = []

    def gain(sampled: Sampled, fed: Tensor) -> tuple[Tensor, Tensor]:
        drawn = sampled.tokens.view(fed.shape)
        places = batch.row_ids, batch.positions, batch.kv_slots
        step = ChainStep(fed, drawn, sampled.bad, *places, hidden)
        settled.append(settle(step, states, page_size, context))
        return settled[0].counts, settled[0].bad

    width = batch.positions.numel() // batch.num_rows
    accepted = verify(logits, batch, width, None, sampler, gain)
    return accepted, settled[0]

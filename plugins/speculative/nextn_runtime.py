"""Runtime of the speculative algorithm "nextn"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.graph_pieces import DIRECT, ExtendWork
from glowplug.core.step.to_device import send
from glowplug.plugins.speculative.drafting import (
    DraftPositions,
    NewestTokens,
    UncachedTokens,
    draft_positions,
    newest_tokens,
    next_draft_batch,
    uncached_tokens,
)
from glowplug.plugins.speculative.host_chain import (
    newest_tokens_host,
    next_draft_batch_host,
    page_ends,
    uncached_tokens_host,
    verify_chain_host,
)
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.core.speculation.verify import verify_chain

#: key in ``Batch.extra`` of the hidden states that a NextN layer continues
PREVIOUS_HIDDEN = "previous_hidden"


class NextN:
    """The ``protocols.SpeculativeAlgorithm`` of NextN drafts.

    After each step of the target, the NextN layer writes its cache entries for the tokens of the
    step, shifted by one position. This needs neither attention nor experts. The next step begins
    with the draft passes, of one token per row; the first pass computes each row's newest token.

    State of a row, on the device: its newest token, the target's hidden state of the token before,
    and the number of tokens in the target's cache. State of a page: the target's hidden state of
    its last token, for rows that start after it on a cached prefix. Entries of rejected drafts are
    overwritten before they are read.
    """

    def __init__(self, options: NextNOptions, plan: EnginePlan, worker: Worker) -> None:
        self._steps = options.lookahead()
        self._width = options.width()
        self._page_size = plan.sizes.page_size
        self._context = plan.sizes.context_length
        self._device = torch.device(worker.device)
        self._dtype = worker.dtype
        #: whether this rank must run the passes that any group of ranks needs
        self._grouped = plan.mesh.get("dp", 1) > 1
        self._on_host = self._device.type == "cpu"

    def width(self) -> int:
        return self._width

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        self._attention = context.attention
        self._draft_extend = context.draft_extend
        self._model: Any = family.build_nextn(context, target)
        return self._model

    def reserve(self, limits: Limits) -> None:
        self._last = torch.zeros(limits.rows, dtype=torch.int64, device=self._device)
        self._hidden = torch.zeros(
            limits.rows, limits.hidden, dtype=self._dtype, device=self._device
        )
        # ones, because no sequence is empty
        self._computed = torch.ones(limits.rows, dtype=torch.int32, device=self._device)
        self._page_ends = torch.zeros(
            limits.num_pages, limits.hidden, dtype=self._dtype, device=self._device
        )
        self._draft_extend.work = ExtendWork(self._model.fill, limits.hidden, self._dtype)

    def lengths(self, batch: Batch) -> Tensor | None:
        decodes = batch.num_decodes
        if self._on_host:
            return torch.from_numpy(self._computed.numpy()[batch.rows[:decodes]])
        # NOTE: padding rows of a captured step yield tokens, too; the host's bound keeps their
        # lengths from growing.
        return torch.minimum(
            self._computed[batch.row_ids[:decodes]], batch.kv_lens_device[:decodes] - self._width
        )

    def draft(self, batch: Batch) -> Tensor:
        agreed = batch.agreed if self._grouped else None
        if not (batch.num_decodes if agreed is None else agreed.decodes):
            return self._last.new_empty(0, self._width)
        run = batch.pieces.run
        drafted, hidden, every = run("draft places", partial(self._begin, batch))
        passes: Sequence[DraftPositions | Batch] = every
        for number, at in enumerate(passes, 1):
            step = at if isinstance(at, Batch) else next_draft_batch(batch, number, at, self._width)
            piece = f"draft {number}"
            self._attention.plan_step(step, batch.pieces.key(piece))
            hidden, drafted = run(piece, partial(self._pass, step, drafted, hidden))
        return drafted

    def _begin(
        self, batch: Batch
    ) -> tuple[Tensor, Tensor, tuple[DraftPositions, ...] | tuple[Batch, ...]]:
        """Return the inputs of the first draft pass and the device fields of all passes' batches.

        Returns:
            The rows' newest tokens [D, 1], the hidden states of the tokens before them, and for
            each pass the device fields of its batch; on a CPU the whole batch.
        """
        rows = batch.row_ids[: batch.num_decodes]
        numbers = range(1, self._steps + 1)
        tokens = self._last[rows, None]
        hidden = self._hidden[rows]
        lengths = self.lengths(batch)
        assert lengths is not None, "a chain is wider than one token"
        if self._on_host:
            return (
                tokens,
                hidden,
                tuple(next_draft_batch_host(batch, n, lengths, self._page_size) for n in numbers),
            )
        return (
            tokens,
            hidden,
            tuple(draft_positions(batch, n, lengths, self._page_size) for n in numbers),
        )

    def _pass(self, step: Batch, drafted: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the draft pass ``step``, and append its most likely tokens to ``drafted`` [D, n].

        Returns:
            The hidden states of the pass, and the tokens drafted so far, [D, n + 1].
        """
        step.input_ids = drafted[:, -1]
        step.extra = {PREVIOUS_HIDDEN: hidden}
        hidden = self._model.forward(step.input_ids, step.positions, step)
        return hidden, torch.cat([drafted, self._model.logits(hidden).argmax(-1, keepdim=True)], 1)

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        if self._on_host and batch.num_decodes == batch.num_rows > 0:
            return self._accept_on_host(logits, hidden, batch, sampler)
        ends = None
        if batch.num_decodes < batch.num_rows:
            places = np.flatnonzero(batch.samples[batch.num_decodes :]) + batch.num_decodes
            ends = send([places.astype(np.int64)], self._device)[0]
        accepted = verify_chain(logits, batch, self._width, ends, sampler)
        self._keep_page_ends(batch, hidden)
        self._remember(batch, newest_tokens(batch, accepted, ends), hidden)
        self._fill(batch, uncached_tokens(batch, accepted.tokens, self._page_size), hidden)
        return accepted

    def _accept_on_host(
        self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler
    ) -> Accepted:
        """Accept tokens for decode rows whose tensors the host can read.

        Unlike :meth:`accept`, this method stores no cache entries at offsets that no row accepted.
        """
        accepted = verify_chain_host(logits, batch, self._width, sampler)
        places, pages = page_ends(batch, self._page_size)
        if places:
            self._page_ends[pages] = hidden[places].to(self._dtype)
        self._remember(batch, newest_tokens_host(batch, accepted), hidden)
        keep = self._width if self._grouped else int(accepted.counts.max())
        if keep > 1:
            self._fill(batch, uncached_tokens_host(batch, accepted, self._page_size, keep), hidden)
        return accepted

    def _keep_page_ends(self, batch: Batch, hidden: Tensor) -> None:
        """Store the target's hidden states of the tokens that end a page.

        All other states are written to the scratch page's entry.
        """
        pages = batch.kv_slots.div(self._page_size, rounding_mode="floor")
        pages = pages.masked_fill_(batch.positions % self._page_size != self._page_size - 1, 0)
        self._page_ends.index_copy_(0, pages, hidden.to(self._dtype))

    def _fill(self, batch: Batch, lacking: UncachedTokens, hidden: Tensor) -> None:
        """Write the entries of the tokens ``lacking`` to the draft's cache.

        ``hidden``: the target's hidden states, [T, hidden].
        """
        if lacking.pages is not None:
            hidden = torch.cat([hidden, self._page_ends[lacking.pages].to(hidden.dtype)])
        tokens = lacking.input_ids, lacking.positions, lacking.kv_slots
        if batch.pieces is DIRECT and batch.prompt_logprobs is None:
            self._draft_extend.call(*tokens, hidden, lacking.source)
        else:  # part of a captured piece, or ``hidden`` is still needed for logprobs
            self._model.fill(*tokens, hidden[lacking.source])

    def _remember(self, batch: Batch, newest: NewestTokens, hidden: Tensor) -> None:
        """Store each row's newest token, hidden state and length for its next drafts."""
        rows = batch.row_ids if newest.places is None else batch.row_ids[newest.places]
        self._last[rows] = newest.tokens
        self._hidden[rows] = hidden[newest.source].to(self._dtype)
        # NOTE: a row launched once more after its end may exceed the context length; its result is
        # dropped, but its positions must stay within the rope table and the page table.
        self._computed[rows] = newest.lengths.clamp(max=self._context).int()

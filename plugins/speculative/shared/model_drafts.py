"""Drafts by a layer or head that continues the target's hidden states: NextN, EAGLE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.verify import verify
from glowplug.core.speculation.verify_host import verify_chain_host
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Accepted, Batch
from glowplug.core.step.graph_pieces import DIRECT, ExtendWork
from glowplug.kernels.speculation.settle_chains_reference import RowStates
from glowplug.plugins.speculative.knobs import KnobOptions
from glowplug.plugins.speculative.shared.draft_passes import DraftPasses
from glowplug.plugins.speculative.shared.drafting import (
    FIRST_KEY,
    NewestTokens,
    UncachedTokens,
    draft_positions,
    newest_tokens,
    uncached_tokens,
)
from glowplug.plugins.speculative.shared.fused_chains import accept_chains
from glowplug.plugins.speculative.shared.host_chain import newest_tokens_host, uncached_tokens_host
from glowplug.plugins.speculative.shared.own_cache import OwnCache
from glowplug.plugins.speculative.shared.page_ends import PageEnds
from glowplug.plugins.speculative.shared.pending_tokens import PendingTokens


class ModelDrafts(DraftPasses):
    """The base of speculative algorithms whose draft model continues hidden states of the target.

    After each step of the target, the draft model writes its cache entries for the tokens of the
    step, shifted by one position. This needs neither attention nor experts. The next step begins
    with the draft passes.

    Further state of a row, on the device: the target's hidden state of the token before its newest.
    State of a page: the target's hidden state of its last token, for rows that start after it on a
    cached prefix.

    Subclasses define :meth:`build_draft`.
    """

    first_key = FIRST_KEY

    def __init__(self, options: KnobOptions, plan: EnginePlan, worker: Worker) -> None:
        super().__init__(options, plan, worker)
        if plan.draft_choices:
            self._own_cache = OwnCache()

    def build_draft(self, context: BuildContext, family: ModelFamily, target: Model) -> Any:
        """Return the draft model, with weights not yet loaded.

        Besides ``protocols.Model``, it has ``fill(input_ids, positions, kv_slots, previous)``,
        which writes cache entries without attention. Its ``forward`` reads the hidden states that
        it continues from ``batch.extra[PREVIOUS_HIDDEN]`` and returns those that the next pass
        continues.
        """
        raise NotImplementedError

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        self._draft_extend = context.draft_extend
        draft: Model = self._of_context(context, self.build_draft(context, family, target))
        return draft

    def reserve(self, limits: Limits) -> None:
        super().reserve(limits)
        self._hidden = torch.zeros(
            limits.rows, limits.hidden, dtype=self._dtype, device=self._device
        )
        self._page_ends = PageEnds(
            limits.num_pages, limits.hidden, self._page_size, self._dtype, self._device
        )
        self._draft_extend.work = ExtendWork(self._model.fill, limits.hidden, self._dtype)
        self._draft_extend.after = self._extend
        self._pending: PendingTokens | None = None
        # ranks that fill for other groups do so in every step
        if not self._grouped and not all(shape.steps for shape in self._shapes):
            self._pending = PendingTokens(limits.hidden, self._dtype, self._device)

    def page_states(self) -> Mapping[str, Tensor]:
        """Return the target's hidden states at the ends of pages, and a KV pool of the draft's own.

        See ``protocols.PageStates``.
        """
        cached = {} if self._own_cache is None else self._own_cache.page_states()
        return {"page ends": self._page_ends.states, **cached}

    # ---- drafts ----------------------------------------------------------------------------------

    def _states(self, rows: Tensor) -> Tensor | None:
        return self._hidden[rows]

    def draft(self, batch: Batch) -> Tensor:
        pending = self._pending
        keeps = self._keeps(batch)
        if pending is not None and pending.due(batch, keeps):
            self._draft_extend.call(*pending.entries())
            pending.clear()
        tokens = super().draft(batch)
        if pending is not None and keeps:
            pending.count(batch)
        return tokens

    def _keeps(self, batch: Batch) -> bool:
        """Return whether the entries of the newest tokens of ``batch`` are written later."""
        pauses = batch.num_decodes == batch.num_rows > 0 and not self._shape_of(batch).steps
        return pauses and self._pending is not None and self._pending.fit(batch.num_rows)

    def _pause(self, batch: Batch) -> Tensor:
        """Write or keep the draft's entries of the newest tokens, and return the tokens, [D, 1].

        The first draft pass would write the entries; without them, later drafts would attend to
        stale ones.
        """
        rows = batch.row_ids[: batch.num_decodes]
        tokens = self._last[rows]
        if self._on_host:
            at = draft_positions(batch, 1, self.known_lengths(batch), self._page_size)
            positions, kv_slots = at.positions, at.kv_slots
        else:
            self._place(batch)
            positions, kv_slots = batch.positions[: len(rows)], batch.kv_slots[: len(rows)]
        if self._keeps(batch):
            assert self._pending is not None
            self._pending.keep(rows, self._last, self._hidden, positions, kv_slots)
        else:
            self._model.fill(tokens, positions, kv_slots, self._hidden[rows])
        return tokens[:, None]

    def _forward(self, step: Batch, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """Run the draft model on ``step`` and return its hidden states."""
        step.input_ids = tokens
        step.extra = {PREVIOUS_HIDDEN: hidden}
        result: Tensor = self._model.forward(step.input_ids, step.positions, step)
        return result

    # ---- acceptance ------------------------------------------------------------------------------

    def _accepted(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        chains = batch.tree is None and batch.num_decodes == batch.num_rows > 0
        if self._on_host and chains:
            return self._accept_on_host(logits, hidden, batch, sampler)
        apart = self._draft_extend.apart and batch.pieces is not DIRECT
        # NOTE: the fused kernels return the uncached tokens only within the captured piece, so
        # ``_extend`` could not run after it
        if chains and not apart:
            return self._accept_chains(logits, hidden, batch, sampler)
        ends = self._ends(batch)
        shape = self._shape_of(batch)
        accepted = verify(logits, batch, shape.tokens, ends, sampler)
        self._page_ends.keep(batch, accepted, hidden)
        self._remember(batch, newest_tokens(batch, accepted, ends), hidden)
        if not apart:
            self._extend(batch, accepted, hidden)
        return accepted

    def _extend(self, batch: Batch, accepted: Accepted, hidden: Tensor) -> None:
        """Write the draft's cache entries of the step's tokens. ``hidden``: as in ``accept``."""
        steps = self._shape_of(batch).steps
        # a group without tokens still takes part in the exchanges of the others
        if steps or self._grouped or batch.num_decodes < batch.num_rows:
            lacking = uncached_tokens(batch, accepted, steps, self._page_size)
            self._fill(batch, lacking, hidden)

    def _accept_chains(
        self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler
    ) -> Accepted:
        """Accept chains for decode rows on a GPU."""
        states = RowStates(self._last, self._hidden, self._computed, self._page_ends.states)
        accepted, lacking = accept_chains(
            logits, hidden, batch, sampler, states, self._page_size, self._context
        )
        if len(lacking.tokens) or self._grouped:
            # not ``_draft_extend``, which is for eager steps: most of these are captured
            self._model.fill(lacking.tokens, lacking.positions, lacking.kv_slots, lacking.hidden)
        return accepted

    def _accept_on_host(
        self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler
    ) -> Accepted:
        """Accept chains for decode rows whose tensors the host can read.

        Unlike :meth:`accept`, this method stores no cache entries at offsets that no row accepted.
        """
        width = self._shape_of(batch).tokens
        accepted = verify_chain_host(logits, batch, width, sampler)
        self._page_ends.keep_on_host(batch, hidden)
        self._remember(batch, newest_tokens_host(batch, accepted), hidden)
        keep = width if self._grouped else int(accepted.counts.max())
        if keep > 1:
            self._fill(batch, uncached_tokens_host(batch, accepted, self._page_size, keep), hidden)
        return accepted

    def _fill(self, batch: Batch, lacking: UncachedTokens, hidden: Tensor) -> None:
        """Write the entries of the tokens ``lacking`` to the draft's cache.

        ``hidden``: the target's hidden states, [T, hidden].
        """
        if lacking.pages is not None:
            hidden = torch.cat([hidden, self._page_ends.states[lacking.pages].to(hidden.dtype)])
        tokens = lacking.input_ids, lacking.positions, lacking.kv_slots
        if batch.pieces is DIRECT and batch.prompt_logprobs is None:
            self._draft_extend.call(*tokens, hidden, lacking.source)
        else:  # part of a captured piece, or ``hidden`` is still needed for logprobs
            self._model.fill(*tokens, hidden[lacking.source])

    def _remember(self, batch: Batch, newest: NewestTokens, hidden: Tensor) -> None:
        """Store each row's newest token, length and hidden state for its next drafts."""
        self._hidden[self._store_newest(batch, newest)] = hidden[newest.source].to(self._dtype)

"""Drafts by a layer or head that continues the target's hidden states: NextN, EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.tree_growth import Growth, first_growth, grown_tree, next_growth
from glowplug.core.speculation.verify import verify
from glowplug.core.speculation.verify_host import verify_chain_host
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Accepted, Batch
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.step.graph_pieces import DIRECT, ExtendWork
from glowplug.core.step.to_device import send
from glowplug.plugins.speculative.drafting import (
    DraftPositions,
    NewestTokens,
    UncachedTokens,
    draft_positions,
    newest_tokens,
    next_draft_batch,
    repeated_padding,
    uncached_tokens,
)
from glowplug.plugins.speculative.host_chain import (
    newest_tokens_host,
    next_draft_batch_host,
    uncached_tokens_host,
)
from glowplug.plugins.speculative.page_ends import PageEnds


class ModelDrafts:
    """The base of speculative algorithms whose draft model continues hidden states of the target.

    After each step of the target, the draft model writes its cache entries for the tokens of the
    step, shifted by one position. This needs neither attention nor experts. The next step begins
    with the draft passes. The first one computes each row's newest token, the others one draft of
    a chain or the frontier of a tree.

    State of a row, on the device: its newest token, the target's hidden state of the token before,
    and the number of tokens in the target's cache. State of a page: the target's hidden state of
    its last token, for rows that start after it on a cached prefix. Entries of rejected drafts are
    overwritten before they are read.

    Subclasses define :meth:`build_draft`.
    """

    def __init__(self, options: SpeculativeOptions, plan: EnginePlan, worker: Worker) -> None:
        self._options = options
        self._shape = plan.sizes.draft_shape
        self._page_size = plan.sizes.page_size
        self._context = plan.sizes.context_length
        self._device = torch.device(worker.device)
        self._dtype = worker.dtype
        #: whether this rank must run the passes that any group of ranks needs
        self._grouped = plan.mesh.get("dp", 1) > 1
        self._on_host = self._device.type == "cpu"

    def width(self) -> int:
        return self._shape.tokens

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
        self._attention = context.attention
        self._draft_extend = context.draft_extend
        draft: Model = self.build_draft(context, family, target)
        self._model: Any = draft
        return draft

    def reserve(self, limits: Limits) -> None:
        self._last = torch.zeros(limits.rows, dtype=torch.int64, device=self._device)
        self._hidden = torch.zeros(
            limits.rows, limits.hidden, dtype=self._dtype, device=self._device
        )
        # ones, because no sequence is empty
        self._computed = torch.ones(limits.rows, dtype=torch.int32, device=self._device)
        self._page_ends = PageEnds(
            limits.num_pages, limits.hidden, self._page_size, self._dtype, self._device
        )
        self._draft_extend.work = ExtendWork(self._model.fill, limits.hidden, self._dtype)
        self._draft_extend.after = self._extend

    def _shape_of(self, batch: Batch) -> DraftShape:
        """Return the size of the drafts of the decode rows of ``batch``."""
        return batch.draft_shape or self._shape

    def lengths(self, batch: Batch) -> Tensor | None:
        decodes = batch.num_decodes
        if self._on_host:
            return torch.from_numpy(self._computed.numpy()[batch.rows[:decodes]])
        # NOTE: padding rows of a captured step yield tokens, too; the host's bound keeps their
        # lengths from growing.
        return torch.minimum(
            self._computed[batch.row_ids[:decodes]],
            batch.kv_lens_device[:decodes] - self._shape_of(batch).tokens,
        )

    # ---- drafts ----------------------------------------------------------------------------------

    def draft(self, batch: Batch) -> Tensor:
        shape = self._shape_of(batch)
        batch.tree = None
        agreed = batch.agreed if self._grouped else None
        if not (batch.num_decodes if agreed is None else agreed.decodes):
            return self._last.new_empty(0, shape.tokens)
        run = batch.pieces.run
        if not shape.steps:
            return run("no drafts", partial(self._pause, batch))
        begun = run("draft places", partial(self._begin, batch))
        if shape.is_tree:
            tokens, batch.tree = self._draft_tree(batch, *begun)
            return tokens
        return self._draft_chain(batch, *begun)

    def _pause(self, batch: Batch) -> Tensor:
        """Write the draft's cache entries of the newest tokens, and return these tokens, [D, 1].

        The first draft pass would write the entries; without them, later drafts would attend to
        stale ones.
        """
        rows = batch.row_ids[: batch.num_decodes]
        tokens = self._last[rows]
        lengths = self.lengths(batch)
        assert lengths is not None, "a drafting algorithm keeps lengths on the device"
        at = draft_positions(batch, 1, lengths, self._page_size)
        self._model.fill(tokens, at.positions, at.kv_slots, self._hidden[rows])
        return tokens[:, None]

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Return the inputs of the first draft pass and the device fields of all passes' batches.

        Returns:
            The rows' newest tokens [D, 1], the hidden states of the tokens before them, and for
            each pass the device fields of its batch; for a chain on a CPU the whole batch.
        """
        rows = batch.row_ids[: batch.num_decodes]
        shape = self._shape_of(batch)
        numbers = range(1, shape.steps + 1)
        tokens = self._last[rows, None]
        hidden = self._hidden[rows]
        lengths = self.lengths(batch)
        assert lengths is not None, "a drafting algorithm keeps lengths on the device"
        size = self._page_size
        if self._on_host and not shape.is_tree:
            passes = tuple(next_draft_batch_host(batch, n, lengths, size) for n in numbers)
            return tokens, hidden, passes
        places = tuple(draft_positions(batch, n, lengths, size, shape.topk) for n in numbers)
        return tokens, hidden, places

    def _draft_chain(
        self,
        batch: Batch,
        drafted: Tensor,
        hidden: Tensor,
        passes: Sequence[DraftPositions | Batch],
    ) -> Tensor:
        """Return the newest tokens and the drafts of each row, [D, W].

        Args:
            batch: The target's step.
            drafted: The rows' newest tokens, [D, 1].
            hidden: Hidden states of the tokens before them.
            passes: Batch of each pass, or its device fields.
        """
        width = self._shape_of(batch).tokens
        for number, at in enumerate(passes, 1):
            step = at if isinstance(at, Batch) else next_draft_batch(batch, number, at, width)
            piece = f"draft {number}"
            self._attention.plan_step(step, batch.pieces.key(piece))
            hidden, drafted = batch.pieces.run(
                piece, partial(self._chain_pass, step, drafted, hidden)
            )
        return drafted

    def _chain_pass(self, step: Batch, drafted: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the draft pass ``step``, and append its most likely tokens to ``drafted`` [D, n].

        Returns:
            The hidden states of the pass, and the tokens drafted so far, [D, n + 1].
        """
        hidden = self._forward(step, drafted[:, -1], hidden)
        best = self.target_ids(self.draft_logits(hidden).argmax(-1, keepdim=True))
        return hidden, torch.cat([drafted, best], 1)

    def _draft_tree(
        self, batch: Batch, newest: Tensor, hidden: Tensor, passes: Sequence[DraftPositions]
    ) -> tuple[Tensor, DraftTree]:
        """Return the tokens of each row's verify step, [D, W], and their trees.

        Arguments as in :meth:`_draft_chain`.
        """
        shape = self._shape_of(batch)
        growth: Growth | None = None
        tree: tuple[Tensor, DraftTree] | None = None
        for number, at in enumerate(passes, 1):
            step = next_draft_batch(batch, number, at, shape.tokens, shape.topk)
            if growth is not None:
                step.tree_mask = growth.seen
                step.tree_span = 1 + (number - 1) * shape.topk
            piece = f"draft {number}"
            self._attention.plan_step(step, batch.pieces.key(piece))
            work = partial(self._tree_pass, step, number, shape, newest, hidden, growth)
            hidden, growth, tree = batch.pieces.run(piece, work)
        assert tree is not None, "the last pass returns the trees"
        return tree

    def _tree_pass(
        self,
        step: Batch,
        number: int,
        shape: DraftShape,
        newest: Tensor,
        hidden: Tensor,
        growth: Growth | None,
    ) -> tuple[Tensor, Growth, tuple[Tensor, DraftTree] | None]:
        """Run draft pass ``number`` over the newest tokens, or over the frontier of ``growth``.

        Returns:
            The hidden states of the pass, the growth, and after the last pass the verify step's
            tokens and trees.
        """
        if growth is None:
            hidden = self._forward(step, newest[:, 0], hidden)
            grown = first_growth(newest[:, 0], *self._likely(hidden, shape.topk))
        else:
            step.padding = repeated_padding(step.draft_padding, shape.topk)
            hidden = hidden[growth.parent_places]
            hidden = self._forward(step, growth.frontier_tokens.view(-1), hidden)
            grown = next_growth(growth, number, *self._likely(hidden, shape.topk))
        tree = grown_tree(grown, shape) if number == shape.steps else None
        return hidden, grown, tree

    def _forward(self, step: Batch, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Run the draft model on ``step`` and return its hidden states."""
        step.input_ids = tokens
        step.extra = {PREVIOUS_HIDDEN: hidden}
        result: Tensor = self._model.forward(step.input_ids, step.positions, step)
        return result

    def _likely(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` most likely tokens after hidden states [N, hidden].

        Returns:
            Token ids int64 [N, count], and their log-probabilities float32 [N, count].
        """
        logits = self.draft_logits(hidden)
        best = logits.topk(count, -1)
        return self.target_ids(best.indices), best.values - logits.logsumexp(-1, keepdim=True)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens that drafts choose from, float32 [N, C].

        ``hidden``: hidden states of a draft pass, [N, hidden].
        """
        logits: Tensor = self._model.logits(hidden)
        return logits

    def target_ids(self, ids: Tensor) -> Tensor:
        """Return the target's ids of indices into ``draft_logits``; equal by default."""
        return ids

    # ---- acceptance ------------------------------------------------------------------------------

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        chain = batch.tree is None
        if self._on_host and chain and batch.num_decodes == batch.num_rows > 0:
            return self._accept_on_host(logits, hidden, batch, sampler)
        ends = None
        if batch.num_decodes < batch.num_rows:
            places = np.flatnonzero(batch.samples[batch.num_decodes :]) + batch.num_decodes
            ends = send([places.astype(np.int64)], self._device)[0]
        shape = self._shape_of(batch)
        accepted = verify(logits, batch, shape.tokens, ends, sampler)
        self._page_ends.keep(batch, accepted, hidden)
        self._remember(batch, newest_tokens(batch, accepted, ends), hidden)
        if batch.pieces is DIRECT or not self._draft_extend.apart:
            self._extend(batch, accepted, hidden)
        return accepted

    def _extend(self, batch: Batch, accepted: Accepted, hidden: Tensor) -> None:
        """Write the draft's cache entries of the step's tokens."""
        steps = self._shape_of(batch).steps
        # a group without tokens still takes part in the exchanges of the others
        if steps or self._grouped or batch.num_decodes < batch.num_rows:
            lacking = uncached_tokens(batch, accepted, steps, self._page_size)
            self._fill(batch, lacking, hidden)

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
        """Store each row's newest token, hidden state and length for its next drafts."""
        rows = batch.row_ids if newest.places is None else batch.row_ids[newest.places]
        self._last[rows] = newest.tokens
        self._hidden[rows] = hidden[newest.source].to(self._dtype)
        # NOTE: a row launched once more after its end may exceed the context length; its result is
        # dropped, but its positions must stay within the rope table and the page table.
        self._computed[rows] = newest.lengths.clamp(max=self._context).int()

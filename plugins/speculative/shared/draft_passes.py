"""The passes of a draft model that drafts chains and trees before a step of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import (
    AttentionBackend,
    Collectives,
    Limits,
    Sampler,
    Worker,
)
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.places import place_tokens
from glowplug.core.speculation.tree_growth import Growth, first_growth, grown_tree, next_growth
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.step.graph_pieces import DIRECT, GraphPieces
from glowplug.core.step.to_device import send
from glowplug.plugins.speculative.knobs import KnobOptions
from glowplug.plugins.speculative.shared.draft_head import DraftHead
from glowplug.plugins.speculative.shared.drafting import (
    DraftPositions,
    NewestTokens,
    draft_positions,
    next_draft_batch,
    repeated_padding,
)
from glowplug.plugins.speculative.shared.frequent_tokens import FrequentTokens, check_head
from glowplug.plugins.speculative.shared.fused_chains import place_chains
from glowplug.plugins.speculative.shared.host_chain import next_draft_batch_host
from glowplug.plugins.speculative.shared.own_cache import OwnCache


class DraftPasses(DraftHead):
    """The base of speculative algorithms with a draft model.

    A step begins with the draft passes. The first one computes each row's newest token, the others
    one draft of a chain or the frontier of a tree. State of a row, on the device:
    its newest token, and the number of tokens in the target's cache. Entries of rejected drafts in
    the draft's cache are overwritten before they are read.

    With a draft vocabulary, the drafts choose from its tokens by a head over these alone.

    Subclasses define :meth:`_forward`, :meth:`_pause` and :meth:`_accepted`, and set ``_model`` and
    ``_attention``.
    """

    passes_rows = True
    first_key = 0  #: first position with an entry in the draft's cache (``Batch.first_key``)
    _attention: AttentionBackend  #: its attention
    _collectives: Collectives  #: those of its head
    _own_cache: OwnCache | None = None  #: its KV pool, if attention is its own

    def __init__(self, options: KnobOptions, plan: EnginePlan, worker: Worker) -> None:
        self._options = options
        self._leads = worker.rank == 0
        self._frequent = None
        self._shape = plan.sizes.draft_shape
        self._shapes = plan.sizes.draft_shapes
        self._page_size = plan.sizes.page_size
        self._context = plan.sizes.context_length
        self._device = torch.device(worker.device)
        self._dtype = worker.dtype
        #: whether this rank must run the passes that any group of ranks needs
        self._grouped = plan.mesh.get("dp", 1) > 1
        self._on_host = self._device.type == "cpu"

    def width(self) -> int:
        return self._shape.tokens

    def reserve(self, limits: Limits) -> None:
        if self._own_cache is not None:
            self._own_cache.reserve(limits)
        self._last = torch.zeros(limits.rows, dtype=torch.int64, device=self._device)
        # no sequence is empty
        self._computed = torch.ones(limits.rows, dtype=torch.int32, device=self._device)
        self._arrived = torch.zeros(limits.rows, dtype=torch.int32, device=self._device)
        vocabulary = self._options.draft_vocabulary
        if vocabulary is not None:
            spare = limits.rows - 1
            self._frequent = FrequentTokens(
                self._model.head, vocabulary, self._collectives, self._leads, spare
            )

    def _of_context(self, context: BuildContext, draft: Any) -> Any:
        """Set what the draft uses of its build context, and return the draft model.

        Raises:
            GlowplugError: a draft vocabulary is given, and the model has no head that is core's.
        """
        self._attention = context.attention
        if self._own_cache is not None:
            self._own_cache.bind(context)
        self._collectives = context.collectives
        self._model = draft
        if self._options.draft_vocabulary is not None:
            check_head(draft)
        return draft

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

    def known_lengths(self, batch: Batch) -> Tensor:
        """Return ``lengths``, which an algorithm with drafts always has."""
        lengths = self.lengths(batch)
        assert lengths is not None, "a drafting algorithm keeps lengths on the device"
        return lengths

    # ---- drafts ----------------------------------------------------------------------------------

    def draft(self, batch: Batch) -> Tensor:
        if self._frequent is not None:
            self._frequent.step()
        shape = self._shape_of(batch)
        batch.tree = None
        agreed = batch.agreed if self._grouped else None
        if not (batch.num_decodes if agreed is None else agreed.decodes):
            return self._last.new_empty(0, shape.tokens)
        if self._in_one_piece():
            name = "drafts" if shape.steps else "no drafts"
            tokens, batch.tree = batch.pieces.run(name, partial(self._placed_round, batch))
            batch.placed = not self._on_host
        else:
            tokens, batch.tree = self._round(batch, batch.pieces)
            batch.placed = not (self._on_host or shape.is_tree)
        return tokens

    def _in_one_piece(self) -> bool:
        """Return whether the passes of a round are one piece, and so one graph.

        They are if the draft's attention plans them without the host; else each pass is a piece.
        """
        plans: Callable[[int], bool] | None = getattr(self._attention, "plans_on_device", None)
        return plans is not None and plans(self.first_key)

    def _placed_round(self, batch: Batch) -> tuple[Tensor, DraftTree | None]:
        """Run a round and set the places of its tokens; the result is that of :meth:`_round`."""
        tokens, batch.tree = self._round(batch, DIRECT)
        if batch.tree is not None and not self._on_host:
            place_tokens(batch, self.known_lengths(batch), self._page_size)
        return tokens, batch.tree

    def _round(self, batch: Batch, pieces: GraphPieces) -> tuple[Tensor, DraftTree | None]:
        """Return the tokens of each row's verify step, [D, W], and their trees.

        ``pieces``: runs the parts of the round.
        """
        shape = self._shape_of(batch)
        if not shape.steps:
            return pieces.run("no drafts", partial(self._pause, batch)), None
        begun = pieces.run("draft places", partial(self._begin, batch))
        if shape.is_tree:
            return self._draft_tree(batch, pieces, *begun)
        return self._draft_chain(batch, pieces, *begun), None

    def _pause(self, batch: Batch) -> Tensor:
        """Return the newest tokens of a step without drafts, [D, 1], and on a GPU place them."""
        raise NotImplementedError

    def _states(self, rows: Tensor) -> Tensor | None:
        """Return the hidden states that the first pass of ``rows`` continues; None for none."""
        return None

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor | None, tuple[Any, ...]]:
        """Return the inputs of the first draft pass and the device fields of all passes' batches.

        Returns:
            The rows' newest tokens [D, 1], the hidden states of the tokens before them (None if the
            draft continues none), and for each pass the device fields of its batch; for a chain on
            a CPU the whole batch.
        """
        rows = batch.row_ids[: batch.num_decodes]
        shape = self._shape_of(batch)
        numbers = range(1, shape.steps + 1)
        tokens = self._last[rows, None]
        hidden = self._states(rows)
        if not self._on_host and not shape.is_tree:
            return tokens, hidden, self._place(batch)
        lengths = self.known_lengths(batch)
        size = self._page_size
        if not shape.is_tree:
            passes = tuple(next_draft_batch_host(batch, n, lengths, size) for n in numbers)
            return tokens, hidden, passes
        places = tuple(draft_positions(batch, n, lengths, size, shape.topk) for n in numbers)
        return tokens, hidden, places

    def _place(self, batch: Batch) -> tuple[DraftPositions, ...]:
        """Set the places of decode rows with chains on a GPU, and return those of draft passes."""
        shape = self._shape_of(batch)
        sizes = self._page_size, shape.tokens, shape.steps
        return place_chains(batch, self._computed, *sizes)

    def _draft_chain(
        self,
        batch: Batch,
        pieces: GraphPieces,
        drafted: Tensor,
        hidden: Tensor | None,
        passes: Sequence[DraftPositions | Batch],
    ) -> Tensor:
        """Return the newest tokens and the drafts of each row, [D, W].

        Args:
            batch: The target's step.
            pieces: Runs the passes.
            drafted: The rows' newest tokens, [D, 1].
            hidden: Hidden states of the tokens before them.
            passes: Batch of each pass, or its device fields.
        """
        width = self._shape_of(batch).tokens
        for number, at in enumerate(passes, 1):
            step = at if isinstance(at, Batch) else next_draft_batch(batch, number, at, width)
            piece = f"draft {number}"
            self._plan(step, piece)
            hidden, drafted = pieces.run(piece, partial(self._chain_pass, step, drafted, hidden))
        return drafted

    def _plan(self, step: Batch, piece: str) -> None:
        """Let the draft's attention prepare the draft pass ``step`` of the piece ``piece``."""
        step.first_key = self.first_key
        self._attention.plan_step(step, step.pieces.key(piece))

    def _chain_pass(
        self, step: Batch, drafted: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the draft pass ``step``, and append its most likely tokens to ``drafted`` [D, n].

        Returns:
            Hidden states, and the tokens drafted so far, [D, n + 1].
        """
        hidden = self._forward(step, drafted[:, -1], hidden)
        best = self.target_ids(self._most_likely(hidden))
        return hidden, torch.cat([drafted, best[:, None]], 1)

    def _draft_tree(
        self,
        batch: Batch,
        pieces: GraphPieces,
        newest: Tensor,
        hidden: Tensor | None,
        passes: Sequence[DraftPositions],
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
            self._plan(step, piece)
            work = partial(self._tree_pass, step, number, shape, newest, hidden, growth)
            hidden, growth, tree = pieces.run(piece, work)
        assert tree is not None, "the last pass returns the trees"
        return tree

    def _tree_pass(
        self,
        step: Batch,
        number: int,
        shape: DraftShape,
        newest: Tensor,
        hidden: Tensor | None,
        growth: Growth | None,
    ) -> tuple[Tensor, Growth, tuple[Tensor, DraftTree] | None]:
        """Run draft pass ``number`` over the newest tokens, or over the frontier of ``growth``.

        Returns:
            Hidden states, growth, and after the last pass the tokens and trees.
        """
        if growth is None:
            hidden = self._forward(step, newest[:, 0], hidden)
            grown = first_growth(newest[:, 0], *self._likely(hidden, shape.topk))
        else:
            step.padding = repeated_padding(step.draft_padding, shape.topk)
            states = None if hidden is None else hidden[growth.parent_places]
            hidden = self._forward(step, growth.frontier_tokens.view(-1), states)
            grown = next_growth(growth, number, *self._likely(hidden, shape.topk))
        tree = grown_tree(grown, shape) if number == shape.steps else None
        return hidden, grown, tree

    def _forward(self, step: Batch, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """Run the draft model on ``step`` and return its hidden states.

        Args:
            step: The batch of the pass.
            tokens: Its input tokens.
            hidden: Hidden states that the tokens continue; None if the draft continues none.
        """
        raise NotImplementedError

    # ---- acceptance ------------------------------------------------------------------------------

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        accepted = self._accepted(logits, hidden, batch, sampler)
        if self._frequent is not None:
            self._frequent.count(batch, accepted)
        return accepted

    def _accepted(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """Accept drafts and keep what the next ones need; see ``SpeculativeAlgorithm.accept``."""
        raise NotImplementedError

    # ---- state of rows ---------------------------------------------------------------------------

    def _ends(self, batch: Batch) -> Tensor | None:
        """Return the indices of the rows whose prompts ended, int64; None if all rows decode."""
        if batch.num_decodes == batch.num_rows:
            return None
        places = np.flatnonzero(batch.samples[batch.num_decodes :]) + batch.num_decodes
        return send([places.astype(np.int64)], self._device)[0]

    def _store_newest(self, batch: Batch, newest: NewestTokens) -> Tensor:
        """Store each row's newest token and length for its next drafts, and return the rows."""
        rows: Tensor = batch.row_ids if newest.places is None else batch.row_ids[newest.places]
        self._last[rows] = newest.tokens
        # NOTE: a row launched once more after its end may exceed the context length; its result is
        # dropped, but its positions must stay within the rope table and the page table.
        self._computed[rows] = newest.lengths.clamp(max=self._context).int()
        return rows

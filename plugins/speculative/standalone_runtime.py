"""Runtime of the speculative algorithm "standalone"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from glowplug.core.protocols import Model, ModelFamily, Sampler
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.verify import verify
from glowplug.core.speculation.verify_host import verify_chain_host
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.step.graph_pieces import GraphPieces
from glowplug.core.step.to_device import kv_slots_at
from glowplug.plugins.speculative.shared.draft_passes import DraftPasses
from glowplug.plugins.speculative.shared.drafting import (
    DraftPositions,
    draft_batch,
    draft_positions,
    newest_tokens,
    next_draft_batch,
)
from glowplug.plugins.speculative.shared.host_chain import newest_tokens_host, next_draft_batch_host
from glowplug.plugins.speculative.shared.own_cache import OwnCache


class Standalone(DraftPasses):
    """The ``protocols.SpeculativeAlgorithm`` of drafts by a small whole model.

    The draft's KV pool has the pages of the target's, and the same page table and KV slots. After
    each step it holds an entry for every token whose entry the target's pool holds, so pages can be
    shared, kept and given back for both at once:

    - In a step with prompts, the draft computes all tokens of the step after the target has.
    - In a step of decode rows, a last pass stores what the draft passes have not: the last draft of
      a chain, the tokens of a tree at the places where the target stores them, or the newest token
      if nothing is drafted. Entries of a tree's accepted path are then moved as the target's are.
    """

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        self._layers = context.facts.num_layers
        self._own_cache = OwnCache()
        draft: Model = self._of_context(context, family.build(context))
        return draft

    def page_states(self) -> Mapping[str, Tensor]:
        """Return the draft's KV pool; see ``protocols.PageStates``."""
        assert self._own_cache is not None, "draft_model sets it"
        return self._own_cache.page_states()

    # ---- drafts ----------------------------------------------------------------------------------

    def _round(self, batch: Batch, pieces: GraphPieces) -> tuple[Tensor, DraftTree | None]:
        tokens, batch.tree = super()._round(batch, pieces)
        if batch.num_decodes == batch.num_rows > 0:
            self._store_last(batch, pieces, tokens)
        return tokens, batch.tree

    def _pause(self, batch: Batch) -> Tensor:
        if not self._on_host:
            self._place(batch)
        return self._last[batch.row_ids[: batch.num_decodes], None]

    def _forward(self, step: Batch, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        step.input_ids = tokens
        result: Tensor = self._model.forward(step.input_ids, step.positions, step)
        return result

    def _store_last(self, batch: Batch, pieces: GraphPieces, tokens: Tensor) -> None:
        """Run the pass that stores the entries which the draft passes have not stored.

        Args:
            batch: The target's step, of decode rows only.
            pieces: Runs the pass.
            tokens: The tokens of the step, [D, W].
        """
        places = pieces.run("last draft places", partial(self._last_places, batch))
        if isinstance(places, Batch):
            step = places
        elif batch.tree is None:
            shape = self._shape_of(batch)
            step = next_draft_batch(batch, shape.steps + 1, places, shape.tokens)
        else:
            step = self._tree_batch(batch, places)
        piece = "last draft"
        self._plan(step, piece)
        fed = tokens[:, -1] if batch.tree is None else tokens.view(-1)
        pieces.run(piece, partial(self._forward, step, fed, None))

    def _last_places(self, batch: Batch) -> DraftPositions | Batch:
        """Return the device fields of the last pass; for a chain on a CPU the whole batch."""
        lengths = self.known_lengths(batch)
        size = self._page_size
        tree = batch.tree
        if tree is None:
            number = self._shape_of(batch).steps + 1
            if self._on_host:
                return next_draft_batch_host(batch, number, lengths, size)
            return draft_positions(batch, number, lengths, size)
        rows, width = tree.depths.shape
        starts = lengths.long()[:, None]
        places = starts + torch.arange(width, device=lengths.device)
        return DraftPositions(
            (starts + tree.depths).view(-1),
            kv_slots_at(batch.page_table[:rows], places, size).view(-1),
            (lengths + width).int(),
            torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=lengths.device),
        )

    def _tree_batch(self, batch: Batch, places: DraftPositions) -> Batch:
        """Return the batch of the last pass over the tokens of trees."""
        assert batch.tree is not None
        rows, width = batch.tree.depths.shape
        step = draft_batch(batch, batch.kv_lens[:rows], width)
        step.page_table = batch.page_table[:rows]
        step.row_ids = batch.row_ids[:rows]
        step.positions, step.kv_slots, step.kv_lens_device, step.query_starts = places
        step.tree_mask = batch.tree.mask
        return step

    # ---- acceptance ------------------------------------------------------------------------------

    def _accepted(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        width = self._shape_of(batch).tokens
        decoding = batch.num_decodes == batch.num_rows > 0
        if self._on_host and decoding and batch.tree is None:
            accepted = verify_chain_host(logits, batch, width, sampler)
            self._store_newest(batch, newest_tokens_host(batch, accepted))
            return accepted
        ends = self._ends(batch)
        accepted = verify(logits, batch, width, ends, sampler)
        self._store_newest(batch, newest_tokens(batch, accepted, ends))
        if ends is not None:
            self._attention.plan_step(batch, None)
            self._model.forward(batch.input_ids, batch.positions, batch)
        if accepted.path is not None:
            self._keep_path(batch, accepted.path)
        return accepted

    def _keep_path(self, batch: Batch, path: Tensor) -> None:
        """Move the draft's entries of accepted tokens to the places of their positions.

        ``path``: ``Accepted.path``.
        """
        places = batch.kv_slots[: path.numel()].view(path.shape)
        self._attention.move_entries(places.gather(1, path), places, range(self._layers))

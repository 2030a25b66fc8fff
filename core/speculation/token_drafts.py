"""Base of speculative algorithms that draft from a row's own tokens, without a draft model.

R is the number of rows of the sequence table and D that of the decoding rows of a step, each of
which computes W tokens: its newest token and the drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.speculation.places import place_tokens
from glowplug.core.speculation.tree_growth import ancestor_masks
from glowplug.core.speculation.verify import spread, verify
from glowplug.core.speculation.verify_host import verify_chain_host
from glowplug.core.step.batch import Accepted, Batch
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.step.to_device import send


class TokenDrafts(ABC):
    """A ``protocols.SpeculativeAlgorithm`` that keeps every row's tokens on the device.

    A subclass defines ``propose``. Steps overlap, so the newest tokens are known on the device
    only. A row's prompt, and the output of a sequence that continues after a preemption, are copied
    to the device when the sequence joins the row, whether or not its cache entries are computed
    again. Accepted tokens follow in ``accept``.

    Attributes:
        ragged: rows of a step may have fewer drafts than others, or none (``Batch.draft_counts``).
            ``propose`` then fills the places behind a row's drafts with negative numbers: -1, or
            the complement ``~id`` of a valid token id if the places of a tree have to differ.
    """

    ragged: bool = False
    passes_rows = True

    def __init__(self, plan: EnginePlan, worker: Worker) -> None:
        self._shape = plan.sizes.draft_shape
        self._context = plan.sizes.context_length
        self._page_size = plan.sizes.page_size
        self._device = torch.device(worker.device)
        self._on_host = self._device.type == "cpu"
        self._tokens = torch.zeros(0, 0, dtype=torch.int32, device=self._device)

    @abstractmethod
    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        """Return the drafts of the decoding rows, int64 [D, W - 1].

        Each is a valid token id, or if ``ragged`` also negative.

        On a GPU the work is captured in a graph: it must not wait for the device, and may depend on
        ``rows`` and ``lengths`` only through tensors.

        Args:
            tokens: int32 [R, C], the tokens of all rows; what follows a row's tokens is undefined.
            rows: int64 [D], the decoding rows.
            lengths: int64 [D], number of tokens of each of them, the newest one included.
            shape: the size of the drafts in this step.
        """

    def foresee(self, tokens: Tensor, rows: Tensor, lengths: Tensor) -> Tensor | None:
        """Return the number of drafts that rows have for their next steps, int32 [n].

        It is called at the end of each ``accept``, under the conditions of ``propose``. What it
        finds may be kept for the next ``propose``, which then gets the same tokens of these rows.

        Args:
            tokens: int32 [R, C], the tokens of all rows.
            rows: int64 [n], the rows that have gained a token.
            lengths: int64 [n], number of tokens of each of them, the newest one included.

        Returns:
            The numbers, or None (the default) if they are not known before ``propose``. An
            algorithm that returns them offers ``foresees``.
        """
        return None

    def parents(self, shape: DraftShape) -> Seq[int] | None:
        """Return the index of the parent of each of a row's W tokens, 0 for the newest token.

        A parent precedes its children, and the drafts of ``propose`` that have the same parent have
        to differ. None (the default): the drafts are a chain.
        """
        return None

    def width(self) -> int:
        return self._shape.tokens

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        return None

    def reserve(self, limits: Limits) -> None:
        # a row of ``limits.context`` tokens may get one more, whose cache entry is never written
        shape = (limits.rows, limits.context + 1)
        if self._tokens.shape == shape:  # called again, when little memory may be left
            self._tokens.zero_()
        else:
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._device)
        # ones, because no sequence is empty
        self._computed = torch.ones(limits.rows, dtype=torch.int32, device=self._device)
        self._trees: dict[DraftShape, DraftTree | None] = {}

    def lengths(self, batch: Batch) -> Tensor | None:
        decodes = batch.num_decodes
        if self._on_host:
            return torch.from_numpy(self._computed.numpy()[batch.rows[:decodes]])
        # NOTE: padding rows of a captured step yield tokens, too; the host's bound keeps their
        # lengths from growing.
        width = self._shape_of(batch).tokens
        return torch.minimum(
            self._computed[batch.row_ids[:decodes]], batch.kv_lens_device[:decodes] - width
        )

    def draft(self, batch: Batch) -> Tensor:
        self._copy_joined(batch)
        shape = self._shape_of(batch)
        decodes = batch.num_decodes
        batch.tree = None
        batch.draft_counts = None
        if not decodes:
            return self._computed.new_empty(0, shape.tokens, dtype=torch.int64)
        if shape not in self._trees:
            self._trees[shape] = self._tree_of_rows(shape)
        tree = self._trees[shape]
        if tree is not None:
            parts = tree.parents, tree.depths, tree.mask
            batch.tree = DraftTree(*(part[:decodes] for part in parts))
        tokens, batch.draft_counts = batch.pieces.run("draft", partial(self._draft, batch))
        batch.placed = not self._on_host
        return tokens

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        ends = None
        if batch.num_decodes < batch.num_rows:
            places = np.flatnonzero(batch.samples[batch.num_decodes :]) + batch.num_decodes
            ends = send([places.astype(np.int64)], self._device)[0]
        accepted = self._verified(logits, batch, ends, sampler)
        self._keep_decoded(batch, accepted)
        if ends is not None:
            rows = batch.row_ids[ends]
            lengths = batch.kv_lens_device[ends]
            self._tokens[rows, lengths.long()] = accepted.tokens[ends, 0].int()
            self._computed[rows] = lengths.int()
        accepted.next_drafts = self._foreseen(batch, ends)
        return accepted

    def _verified(
        self, logits: Tensor, batch: Batch, ends: Tensor | None, sampler: Sampler
    ) -> Accepted:
        """Return the tokens accepted in a step; arguments as in ``verify``."""
        width = self._shape_of(batch).tokens
        chain = width > 1 and batch.tree is None
        if self._on_host and chain and batch.num_decodes == batch.num_rows > 0:
            return verify_chain_host(logits, batch, width, sampler)
        return verify(logits, batch, width, ends, sampler)

    def _foreseen(self, batch: Batch, ends: Tensor | None) -> Tensor | None:
        """Return ``Accepted.next_drafts`` of a step whose tokens are stored.

        ``ends``: indices in the batch of the rows whose prompts ended, int64; None if all decode.
        """
        gaining = None
        if ends is not None:
            decoding = torch.arange(batch.num_decodes, device=ends.device)
            gaining = torch.cat([decoding, ends])
        rows = batch.row_ids if gaining is None else batch.row_ids[gaining]
        if self._on_host:  # numpy takes less time than torch for a few numbers
            lengths = torch.from_numpy(self._computed.numpy()[rows.numpy()] + np.int64(1))
        else:
            lengths = self._computed[rows].long() + 1
        found = self.foresee(self._tokens, rows, lengths)
        if found is None or gaining is None:
            return found
        return spread(found, gaining, batch.num_rows)

    def _shape_of(self, batch: Batch) -> DraftShape:
        """Return the size of the drafts in the step ``batch``."""
        return batch.draft_shape or self._shape

    def _tree_of_rows(self, shape: DraftShape) -> DraftTree | None:
        """Return the tree of ``parents``, once for each row of the table; None for a chain."""
        parents = self.parents(shape) if shape.tokens > 1 else None
        if parents is None:
            return None
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        rows = len(self._computed)
        held, below = (
            torch.tensor(part, device=self._device).repeat(rows, 1) for part in (parents, depths)
        )
        return DraftTree(held, below, ancestor_masks(held, max(depths)))

    def _copy_joined(self, batch: Batch) -> None:
        """Copy the tokens of the sequences that have entered a row to the device."""
        for sequence in batch.joined:
            if sequence.row >= 0:
                tokens = sequence.all_tokens()
                self._tokens[sequence.row, : len(tokens)] = send([tokens], self._device)[0]

    def _draft(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the newest tokens of the decoding rows and their drafts, and ``draft_counts``.

        The tokens are int64 [D, W]. On a GPU their places are set.
        """
        rows = batch.row_ids[: batch.num_decodes]
        lengths = self.lengths(batch)
        assert lengths is not None, "drafts make a step wider than one token"
        if not self._on_host:
            place_tokens(batch, lengths, self._page_size)
        newest = self._newest(rows, lengths)[:, None]
        shape = self._shape_of(batch)
        if shape.tokens == 1:
            return newest, None
        lengths = lengths.long()
        drafts = self.propose(self._tokens, rows, lengths + 1, shape)
        if not self.ragged:
            return torch.cat([newest, drafts], 1), None
        counts = (drafts >= 0).cumprod(1).sum(1, dtype=torch.int32)
        return torch.cat([newest, drafts.maximum(~drafts)], 1), counts

    def _newest(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return the newest tokens of rows with ``lengths`` cached tokens, int64 [D]."""
        if not self._on_host:
            return self._tokens[rows, lengths.long()].long()
        newest = self._tokens.numpy()[rows.numpy(), lengths.numpy()]
        return torch.from_numpy(newest.astype(np.int64))

    def _keep_decoded(self, batch: Batch, accepted: Accepted) -> None:
        """Store the tokens that the decoding rows gained, and the rows' new lengths.

        NOTE: a row launched once more after its end may exceed the context length; its result is
        dropped, but its positions must stay within the rope table and the page table.
        """
        decodes = batch.num_decodes
        width = self._shape_of(batch).tokens
        if self._on_host:
            self._keep_on_host(batch, accepted, width)
            return
        rows = batch.row_ids[:decodes]
        lengths = batch.positions[: decodes * width : width]
        places = lengths[:, None] + torch.arange(1, width + 1, device=lengths.device)
        self._tokens[rows[:, None], places] = accepted.tokens[:decodes].int()
        kept = lengths + accepted.counts[:decodes]
        self._computed[rows] = kept.clamp(max=self._context).int()

    def _keep_on_host(self, batch: Batch, accepted: Accepted, width: int) -> None:
        """Do the work of ``_keep_decoded`` by numpy, in half of torch's time on a CPU."""
        decodes = batch.num_decodes
        rows = batch.row_ids.numpy()[:decodes]
        lengths = batch.positions.numpy()[: decodes * width : width]
        places = lengths[:, None] + np.arange(1, width + 1)
        self._tokens.numpy()[rows[:, None], places] = accepted.tokens.numpy()[:decodes]
        kept = lengths + accepted.counts.numpy()[:decodes]
        self._computed.numpy()[rows] = np.minimum(kept, self._context)

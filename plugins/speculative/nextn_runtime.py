"""Runtime of the speculative algorithm "nextn"."""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.batch import Accepted, Batch
from glowplug.core.build import BuildContext
from glowplug.core.placement import send
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import Limits, Model, ModelFamily, Sampler, Worker
from glowplug.plugins.speculative.drafting import Pass, extend, one_more
from glowplug.plugins.speculative.host_chain import extend_host, page_ends, verify_chain_host
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.plugins.speculative.verify import verify_chain

PREVIOUS_HIDDEN = "previous_hidden"  #: key of ``Batch.extra`` under which a NextN layer finds what it continues


class NextN:
    """See ``protocols.SpeculativeAlgorithm``. After each step the NextN layer runs over the step's tokens moved on by
    one, which completes its cache and drafts one token; each further draft is a pass of one token a row.

    State of a row, on the device: the last accepted token with the drafts behind it, and how many tokens the target's
    cache holds. State of a page: the target's hidden state of its last token, for rows that start behind it on a cached
    prefix. Entries of refused drafts are written over before anything reads them.
    """

    def __init__(self, options: NextNOptions, plan: EnginePlan, worker: Worker) -> None:
        self._steps, self._width = options.lookahead(), options.width()
        self._page_size, self._context = plan.sizes.page_size, plan.sizes.context_length
        self._device, self._dtype = torch.device(worker.device), worker.dtype
        #: other groups of ranks take part in every pass, whether this one needs it or not
        self._grouped = plan.mesh.get("dp", 1) > 1
        self._on_host = self._device.type == "cpu"

    def width(self) -> int:
        return self._width

    def draft_model(self, context: BuildContext, family: ModelFamily, target: Model) -> Model | None:
        self._attention = context.attention
        self._model = family.build_nextn(context, target)
        return self._model

    def reserve(self, limits: Limits) -> None:
        self._last = torch.zeros(limits.rows, self._width, dtype=torch.int64, device=self._device)
        self._computed = torch.zeros(limits.rows, dtype=torch.int32, device=self._device)
        self._page_ends = torch.zeros(limits.num_pages, limits.hidden, dtype=self._dtype, device=self._device)

    def lengths(self, batch: Batch) -> Tensor | None:
        if self._on_host:
            return torch.from_numpy(self._computed.numpy()[batch.rows[: batch.num_decodes]])
        return self._computed[batch.row_ids[: batch.num_decodes]]

    def draft(self, batch: Batch) -> Tensor:
        if self._on_host:
            return torch.from_numpy(self._last.numpy()[batch.rows[: batch.num_decodes]])
        return self._last[batch.row_ids[: batch.num_decodes]]

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        if self._on_host and batch.num_decodes == batch.num_rows > 0:
            return self._accept_on_host(logits, hidden, batch, sampler)
        ends = None
        if batch.num_decodes < batch.num_rows:
            places = np.flatnonzero(batch.samples[batch.num_decodes :]) + batch.num_decodes
            ends = send([places], self._device)[0].long()
        accepted = verify_chain(logits, batch, self._width, ends, sampler)
        self._keep_page_ends(batch, hidden)
        self._draft_on(batch, accepted, hidden, ends)
        return accepted

    def _accept_on_host(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """The same for decoding rows whose tensors the host can read: refused tokens are not drafted on."""
        rows, width = batch.num_rows, self._width
        accepted = verify_chain_host(logits, batch, width, sampler)
        places, pages = page_ends(batch, self._page_size)
        if places:
            self._page_ends[pages] = hidden[places].to(self._dtype)
        keep = width if self._grouped else int(accepted.counts.max())
        step = extend_host(batch, accepted, self._page_size, keep)
        previous = hidden if keep == width else hidden.view(rows, width, -1)[:, :keep].reshape(rows * keep, -1)
        drafted = self._run(step.batch, step.batch.input_ids, previous)
        drafts = self._chain(batch, drafted[step.newest], step.lengths, None)
        self._last[batch.row_ids] = torch.stack([step.last, *drafts], 1)
        self._computed[batch.row_ids] = step.lengths.clamp(max=self._context).int()
        return accepted

    def _keep_page_ends(self, batch: Batch, hidden: Tensor) -> None:
        """Hidden states of tokens at the end of a page; all others go to the scratch page's."""
        pages = batch.slots.div(self._page_size, rounding_mode="floor")
        pages = pages.masked_fill_(batch.positions % self._page_size != self._page_size - 1, 0)
        self._page_ends.index_copy_(0, pages, hidden.to(self._dtype))

    def _draft_on(self, batch: Batch, accepted: Accepted, hidden: Tensor, ends: Tensor | None) -> None:
        """Complete the draft's cache and leave the next step's tokens in the rows that yielded one."""
        step = extend(batch, accepted.tokens, self._page_size)
        drafted = self._run(step.batch, step.input_ids, self._continued(step, hidden))
        decodes = batch.num_decodes
        counts = accepted.counts[:decodes].long()
        newest = torch.arange(decodes, device=counts.device) * self._width + (counts - 1)
        lengths = batch.positions[: decodes * self._width : self._width] + counts
        places = None
        if ends is not None:
            assert step.ends is not None
            newest = torch.cat([newest, step.ends])
            lengths = torch.cat([lengths, batch.kv_lens_device[ends].long()])
            places = torch.cat([torch.arange(decodes, device=ends.device), ends])
        if not len(newest) and not self._grouped:
            return
        tokens = self._chain(batch, drafted[newest], lengths, places)
        self._remember(batch, accepted, lengths, places, tokens)

    def _continued(self, step: Pass, hidden: Tensor) -> Tensor:
        """The hidden state that each token of the pass continues."""
        if step.source is None:
            return hidden
        assert step.pages is not None
        return torch.cat([hidden, self._page_ends[step.pages].to(hidden.dtype)])[step.source]

    def _chain(self, batch: Batch, hidden: Tensor, lengths: Tensor, places: Tensor | None) -> list[Tensor]:
        """int64 [N] for each draft, from the draft's hidden states [N, hidden] of the rows' newest tokens."""
        drafts = [self._model.logits(hidden).argmax(-1)]
        for number in range(2, self._steps + 1):
            following = one_more(batch, places, number, lengths, self._page_size)
            hidden = self._run(following, drafts[-1], hidden)
            drafts.append(self._model.logits(hidden).argmax(-1))
        return drafts

    def _run(self, batch: Batch, input_ids: Tensor, previous: Tensor) -> Tensor:
        batch.input_ids, batch.extra = input_ids, {PREVIOUS_HIDDEN: previous}
        self._attention.plan_step(batch, None)
        return self._model.forward(input_ids, batch.positions, batch)

    def _remember(self, batch: Batch, accepted: Accepted, lengths: Tensor, places: Tensor | None,
                  drafts: list[Tensor]) -> None:
        rows, tokens, counts = batch.row_ids, accepted.tokens, accepted.counts
        if places is not None:
            rows, tokens, counts = rows[places], tokens[places], counts[places]
        newest = tokens.gather(1, counts.long()[:, None] - 1)
        self._last[rows] = torch.cat([newest, torch.stack(drafts, 1)], 1)
        # NOTE: a row launched once more after its end may pass the context; what it yields is dropped, but its
        # positions must stay within the rope table and the page table.
        self._computed[rows] = lengths.clamp(max=self._context).int()

"""Algorithms for driven runs of the speculative suite: correct ones, and faulty ones to be caught.

Each faulty algorithm has one fault of the kind that its name states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.core.protocols import Limits, Sampled, Sampler, SpeculativeAlgorithm, Worker
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Accepted, Batch
from glowplug.core.step.graph_pieces import DraftExtend
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.scripted_draft import ScriptedDraft, ScriptedModel
from glowplug.core.testing.harness.scripted_drive import ScriptedDrive
from glowplug.core.testing.harness.scripted_target import HIDDEN, PAGE, VOCAB
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.plugins.speculative.nextn_runtime import NextN
from glowplug.plugins.speculative.ngram import NGramOptions
from glowplug.plugins.speculative.ngram_runtime import NGram
from glowplug.plugins.speculative.standalone import StandaloneOptions
from glowplug.plugins.speculative.standalone_runtime import Standalone

STEPS = 3
TREE = DraftShape(STEPS, 3, 7)
Maker = Callable[[Limits], SpeculativeAlgorithm]


def _plan(options: SpeculativeOptions) -> EnginePlan:
    shape = options.draft_shape()
    return bare_plan(
        page_size=PAGE, width=shape.tokens, draft_shape=shape, lookahead=options.lookahead()
    )


def ngram(limits: Limits, kind: type[NGram] = NGram, **options: Any) -> NGram:
    """Return an algorithm of ``kind`` with room for ``limits``."""
    parsed = NGramOptions(**{"steps": STEPS, **options})
    made = kind(parsed, _plan(parsed), Worker())
    made.reserve(limits)
    return made


class UnevenDrafts(NGram):
    """N-gram drafts of which rows keep none to all, by their newest token."""

    ragged = True

    def propose(self, tokens: Tensor, rows: Tensor, lengths: Tensor, shape: DraftShape) -> Tensor:
        drafts = super().propose(tokens, rows, lengths, shape)
        kept = tokens[rows, lengths - 1].long()[:, None] % (drafts.shape[1] + 1)
        return drafts.masked_fill(torch.arange(drafts.shape[1]) >= kept, -1)


def nextn(limits: Limits, kind: type[NextN] = NextN, **options: Any) -> NextN:
    """Return an algorithm of ``kind`` whose draft checks hidden states and cache entries."""
    parsed = NextNOptions(**{"steps": STEPS, **options})
    made = kind(parsed, _plan(parsed), Worker(dtype=torch.float32))
    draft: Any = ScriptedDraft(PREVIOUS_HIDDEN)
    context: Any = SimpleNamespace(attention=draft, draft_extend=DraftExtend(), collectives=None)
    made.draft_model(context, draft, draft)
    made.reserve(limits)
    return made


def standalone(limits: Limits, kind: type[Standalone] = Standalone, **options: Any) -> Standalone:
    """Return an algorithm of ``kind`` whose draft is a whole model that checks its cache."""
    parsed = StandaloneOptions(**{"steps": STEPS, **options})
    made = kind(parsed, _plan(parsed), Worker(dtype=torch.float32))
    draft: Any = ScriptedModel()
    facts = SimpleNamespace(num_layers=1, hidden_size=HIDDEN)
    worker = Worker(dtype=torch.float32)
    context: Any = SimpleNamespace(attention=draft, facts=facts, worker=worker, collectives=None)
    made.draft_model(context, draft, draft)
    made.reserve(limits)
    return made


def on_a_device(drive: ScriptedDrive) -> None:
    """Run the code for a device of its own, whose lengths the host cannot read."""
    algorithm: Any = drive.runner.speculative
    algorithm._on_host = drive.runner._on_host = False


# ---- faulty ones ---------------------------------------------------------------------------------


class Changed:
    """A sampler that changes what ``inner`` is told; ``None``: told the same."""

    def __init__(
        self,
        inner: Sampler,
        rows: Callable[[Tensor], Tensor] | None = None,
        positions: Callable[[Tensor], Tensor] | None = None,
        ahead: Callable[[Tensor], Tensor | None] | None = None,
        observe: bool = True,
    ) -> None:
        self._inner = inner
        self._rows = rows
        self._positions = positions
        self._ahead = ahead
        self._observes = observe

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        return self._inner.sample(
            logits,
            self._rows(rows) if self._rows else rows,
            self._positions(positions) if self._positions else positions,
            self._ahead(ahead) if self._ahead and ahead is not None else ahead,
        )

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        if self._observes:
            self._inner.observe(tokens, counts, rows)


def _tree(kind: type[NGram]) -> Maker:
    return lambda limits: ngram(limits, kind, topk=TREE.topk, draft_tokens=TREE.tokens)


def _told(**changes: Any) -> type[NGram]:
    """Return n-gram drafts whose sampler is told something else."""

    class Told(NGram):
        def accept(
            self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler
        ) -> Accepted:
            changed: Any = Changed(sampler, **changes)
            return super().accept(logits, hidden, batch, changed)

    return Told


class FillersAccepted(UnevenDrafts):
    """Tokens behind a row's drafts are taken for drafts."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        given, batch.draft_counts = batch.draft_counts, None
        accepted = super().accept(logits, hidden, batch, sampler)
        batch.draft_counts = given
        return accepted


class NewestTokenCounted(UnevenDrafts):
    """A row's newest token is counted as one of its drafts."""

    def draft(self, batch: Batch) -> Tensor:
        tokens = super().draft(batch)
        if batch.draft_counts is not None:
            batch.draft_counts = batch.draft_counts + 1
        return tokens


class LongerLengths(NGram):
    def lengths(self, batch: Batch) -> Tensor | None:
        lengths = super().lengths(batch)
        assert lengths is not None
        return torch.where(lengths > 20, lengths + 1, lengths)


class BoundsForLengths(NGram):
    """The host's upper bounds are taken for the lengths."""

    def lengths(self, batch: Batch) -> Tensor | None:
        return torch.from_numpy(batch.kv_lens[: batch.num_decodes] - np.int32(self.width()))


class _Recounted(NGram):
    """N-gram drafts whose counts of accepted tokens are changed before they are used."""

    def recounted(self, drawn: Tensor, fed: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        changed: Any = Changed(sampler, observe=False)
        made = super().accept(logits, hidden, batch, changed)
        sampler.observe(made.tokens, made.counts, batch.row_ids)
        return made

    def _keep_decoded(self, batch: Batch, accepted: Accepted) -> None:
        rows = batch.num_decodes
        fed = batch.input_ids[: batch.decode_tokens].view(rows, self.width())
        counts = self.recounted(accepted.tokens[:rows], fed, accepted.counts[:rows])
        accepted.counts[:rows] = counts.clamp(max=self.width()).int()
        super()._keep_decoded(batch, accepted)


class WrongDraftAccepted(_Recounted):
    def recounted(self, drawn: Tensor, fed: Tensor, counts: Tensor) -> Tensor:
        return counts + (counts == 2)


class CountedAfterRejection(_Recounted):
    def recounted(self, drawn: Tensor, fed: Tensor, counts: Tensor) -> Tensor:
        return (drawn[:, :-1] == fed[:, 1:]).sum(1) + 1


class RightDraftRejected(_Recounted):
    def recounted(self, drawn: Tensor, fed: Tensor, counts: Tensor) -> Tensor:
        return counts - (counts == self.width()).int()


class RowsMixed(NGram):
    """The state of two rows that decode in one step is exchanged."""

    def _keep_decoded(self, batch: Batch, accepted: Accepted) -> None:
        rows = batch.row_ids
        if batch.num_decodes == 2:
            batch.row_ids = torch.cat([rows[:2].flip(0), rows[2:]])
        super()._keep_decoded(batch, accepted)
        batch.row_ids = rows


class KeptOnReentry(NGram):
    """A row's first owner leaves its length to the second."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        before = self._computed.clone()
        made = super().accept(logits, hidden, batch, sampler)
        ended = batch.row_ids[batch.num_decodes :]
        used = ended[before[ended] > 1]
        self._computed[used] = before[used]
        return made


class DraftsOutsideTheVocabulary(NGram):
    def propose(self, tokens: Tensor, rows: Tensor, *rest: Any) -> Tensor:
        drafts = super().propose(tokens, rows, *rest)
        return torch.where((drafts == drafts[:, :1]) | (drafts < 0), drafts, VOCAB)


class StaleNewestToken(NGram):
    """The newest token is the one drawn before a row's last draft."""

    def draft(self, batch: Batch) -> Tensor:
        drafts = super().draft(batch).clone()
        rows = batch.row_ids[: batch.num_decodes]
        drafts[:, 0] = self._tokens[rows, self._computed[rows].long() - 1]
        return drafts


class ChunksThatYield(NGram):
    """A chunk that does not end its prompt counts as its end."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        made = super().accept(logits, hidden, batch, sampler)
        made.counts[batch.num_decodes :] = 1
        return made


class HiddenStateBefore(NextN):
    """Drafts continue the hidden state of the token before the right one."""

    def _remember(self, batch: Batch, newest: Any, hidden: Tensor) -> None:
        newest.source = (newest.source - 1).clamp(min=0)
        super()._remember(batch, newest, hidden)


class LastHiddenState(NextN):
    """Drafts continue the hidden state of the last draft, accepted or not."""

    def _remember(self, batch: Batch, newest: Any, hidden: Tensor) -> None:
        width = self.width()
        decodes = batch.num_decodes
        newest.source = newest.source.clone()
        newest.source[:decodes] = torch.arange(decodes) * width + width - 1
        super()._remember(batch, newest, hidden)


class NextTokenOfChunksForgotten(NextN):
    """The entry of the token after a chunk is made from another token."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        if batch.next_ids is not None:
            batch.next_ids = batch.next_ids * 0
        return super().accept(logits, hidden, batch, sampler)


class CachedPrefixForgotten(NextN):
    """A row behind a cached prefix begins like one without."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        batch.resumed = None
        return super().accept(logits, hidden, batch, sampler)


class PauseWithoutEntry(NextN):
    """A step without drafts leaves the draft's cache without the entry of the newest token."""

    def _pause(self, batch: Batch) -> Tensor:
        return self._last[batch.row_ids[: batch.num_decodes], None]


class LastDraftWithoutEntry(Standalone):
    """A whole draft model's cache lacks the entry of a chain's last draft."""

    def _store_last(self, batch: Batch, tokens: Tensor) -> None:
        if not self._shape_of(batch).steps:
            super()._store_last(batch, tokens)


class PauseWithoutLastPass(Standalone):
    """A step without drafts leaves a whole draft model's cache without the newest token."""

    def _store_last(self, batch: Batch, tokens: Tensor) -> None:
        if self._shape_of(batch).steps:
            super()._store_last(batch, tokens)


class PromptsWithoutEntries(Standalone):
    """A whole draft model computes only the decode rows of a step with prompts."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        draft = self._model
        if 0 < batch.num_decodes < batch.num_rows:
            self._model = SimpleNamespace(forward=lambda *given: None)  # type: ignore[assignment]
        made = super().accept(logits, hidden, batch, sampler)
        self._model = draft
        return made


class DraftEntriesNotMoved(Standalone):
    """A whole draft model's entries of an accepted path stay apart."""

    def _keep_path(self, batch: Batch, path: Tensor) -> None:
        return


class SizeOfTheStepIgnored(NGram):
    """Each step has drafts of the plan's size."""

    def _shape_of(self, batch: Batch) -> DraftShape:
        return self._shape


class TreeTakenForChain(NGram):
    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        batch.tree = None
        return super().accept(logits, hidden, batch, sampler)


class EntriesNotMoved(NGram):
    """The entries of an accepted path stay apart."""

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        made = super().accept(logits, hidden, batch, sampler)
        made.path = None
        return made


class EqualSiblings(NGram):
    def propose(self, tokens: Tensor, rows: Tensor, *rest: Any) -> Tensor:
        return super().propose(tokens, rows, *rest)[:, :1].expand(-1, self.width() - 1)


class SiblingsAttendedTo(NGram):
    """Each token attends to all tokens before it."""

    def draft(self, batch: Batch) -> Tensor:
        drafts = super().draft(batch)
        if batch.tree is not None:
            whole = (2 << torch.arange(self.width())) - 1
            batch.tree = replace(batch.tree, mask=whole.expand_as(batch.tree.mask))
        return drafts


#: faults that show only if the size of drafts changes
FAULTY_IN_SIZES: dict[str, Maker] = {
    "PauseWithoutEntry": partial(nextn, kind=PauseWithoutEntry),
    "PauseWithoutLastPass": partial(standalone, kind=PauseWithoutLastPass),
    "SizeOfTheStepIgnored": partial(ngram, kind=SizeOfTheStepIgnored),
}
FAULTY: dict[str, Maker] = {
    "positions": lambda limits: ngram(limits, _told(positions=lambda given: given - 1)),
    "rows of the sampler": lambda limits: ngram(limits, _told(rows=lambda given: given.flip(0))),
    "no drafts ahead": lambda limits: ngram(limits, _told(ahead=lambda given: None)),
    "all drafts ahead": lambda limits: ngram(limits, _told(ahead=lambda given: given.abs())),
    "not observed": lambda limits: ngram(limits, _told(observe=False)),
    **{
        kind.__name__: partial(ngram, kind=kind)
        for kind in (
            FillersAccepted,
            NewestTokenCounted,
            LongerLengths,
            BoundsForLengths,
            WrongDraftAccepted,
            CountedAfterRejection,
            RightDraftRejected,
            RowsMixed,
            KeptOnReentry,
            DraftsOutsideTheVocabulary,
            StaleNewestToken,
            ChunksThatYield,
        )
    },
    **{
        kind.__name__: partial(nextn, kind=kind)
        for kind in (
            HiddenStateBefore,
            LastHiddenState,
            NextTokenOfChunksForgotten,
            CachedPrefixForgotten,
        )
    },
    **{
        kind.__name__: partial(standalone, kind=kind)
        for kind in (LastDraftWithoutEntry, PromptsWithoutEntries)
    },
    "DraftEntriesNotMoved": partial(
        standalone, kind=DraftEntriesNotMoved, topk=TREE.topk, draft_tokens=TREE.tokens
    ),
    **{
        kind.__name__: _tree(kind)
        for kind in (TreeTakenForChain, EntriesNotMoved, EqualSiblings, SiblingsAttendedTo)
    },
}

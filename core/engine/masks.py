"""The masks of a step: filled on the host while the device runs the model's pass."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from glowplug.core.engine.constraint import ANY, Constraint
from glowplug.core.engine.in_flight import InFlight
from glowplug.core.protocols import GrammarBackend, Masks, Matcher, words_of
from glowplug.core.speculation.forced_drafts import ForcedDrafts
from glowplug.core.step.batch import Batch
from glowplug.core.step.mask_memory import MaskBuffer
from glowplug.core.step.messages import Stats
from glowplug.core.step.request import Sequence


@dataclass
class MaskCounts:
    """Counters of masked steps since the start.

    Attributes:
        steps: steps with at least one mask.
        waits: steps whose model pass had ended on the device before the masks were ready, so that
            the device waited; always 0 on a CPU, where the host computes the pass.
        wait_seconds: time between the end of the pass and the masks, on the device's clock.
        seconds: host time spent on masks.
    """

    steps: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0

    def fill(self, stats: Stats) -> None:
        """Set the fields of ``stats`` that are about masks."""
        stats.masked_steps = self.steps
        stats.mask_waits = self.waits
        stats.mask_wait_seconds = self.wait_seconds
        stats.mask_seconds = self.seconds


@dataclass(eq=False)
class UnreadStep:
    """The rows with a grammar that a launched step samples; its tokens are not yet read."""

    inflight: InFlight
    rows: list[tuple[int, Constraint]]


@dataclass(eq=False)
class CopiedDrafts:
    """The tokens of a step's decoding rows on the way to the host.

    Attributes:
        tokens: int64 [D, W].
        parents: int64 [D, W]; None for chains.
        copied: event after the copies; None if the device is the host.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None
    copied: torch.cuda.Event | None
    _read: tuple[list[list[int]], list[list[int]]] | None = None

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Wait for the copies, and return the tokens and the index of each token's parent."""
        if self._read is None:
            if self.copied is not None:
                self.copied.synchronize()
            chain = [max(0, at - 1) for at in range(self.tokens.shape[1])]
            chains = [chain] * len(self.tokens)
            parents = chains if self.parents is None else self.parents.tolist()
            self._read = self.tokens.tolist(), parents
        return self._read


class StepMasks:
    """The grammars of a rank's rows, and the masks of each step.

    In each step call ``begin``; if ``active``, ``copy_drafts`` before the model's pass and
    ``apply`` after it; and ``launched`` at the end.

    Attributes:
        active: the step that has begun samples a row with a grammar.
        failed: ids of sequences whose grammar has failed, with the reason; the engine takes them.
        counts: counters of masked steps.
        forced: tokens that are offered as drafts; None without chains of drafts.

    Args:
        backend: the library.
        vocab: number of tokens of a mask.
        device: device of the logits.
        drafts: most drafts of a chain; 0: there are no chains.
    """

    def __init__(
        self, backend: GrammarBackend, vocab: int, device: torch.device, drafts: int = 0
    ) -> None:
        self.active = False
        self.failed: list[tuple[int, str]] = []
        self.counts = MaskCounts()
        self.forced = ForcedDrafts(drafts) if drafts else None
        self._backend = backend
        self._vocab = vocab
        self._words = words_of(vocab)
        self._device = device
        self._on_host = device.type == "cpu"
        self._rows: dict[int, tuple[Sequence, Constraint]] = {}
        self._unread: list[UnreadStep] = []
        self._batch: Batch | None = None
        self._sampling: list[tuple[int, Constraint]] = []  # by row of the batch
        self._drafts: CopiedDrafts | None = None
        side = None if self._on_host else torch.cuda.Stream(device)
        # two buffers in turn: the copy out of one may run while the other is filled
        self._buffers = [MaskBuffer(self._words, device, side) for _ in range(2)]

    def warm_up(self) -> None:
        """Apply a mask that allows every token, so that no request waits for a compiler."""
        rows, masks = self._buffers[0].take(1)
        rows[:] = 0
        masks[:] = -1
        logits = torch.zeros(1, self._vocab, device=self._device)
        self._buffers[0].passed()
        self._buffers[0].apply(partial(self._backend.forbid, logits))

    def begin(self, batch: Batch) -> None:
        """Note the rows of the next step, whose sequences may have changed."""
        if self.forced is not None:
            self.forced.drop([*batch.left, *(sequence.row for sequence in batch.joined)])
        for row in batch.left:
            self._rows.pop(row, None)
        for sequence in batch.joined:
            if sequence.row >= 0:
                self._rows.pop(sequence.row, None)
            if sequence.row >= 0 and sequence.grammar is not None:
                made = sequence.grammar.constraint(sequence.output)
                self._rows[sequence.row] = (sequence, made)
        self._drafts = None
        self._batch = batch
        self._sampling = []
        if self._rows:
            samples = batch.samples.tolist()
            self._sampling = [
                (i, self._rows[row][1])
                for i, row in enumerate(batch.rows.tolist())
                if samples[i] and row in self._rows
            ]
        else:
            self._unread = []
        self.active = bool(self._sampling)

    def copy_drafts(self, step: Batch) -> None:
        """Begin to copy the tokens of the decoding rows to the host, if there are drafts.

        Before, drafts are replaced by forced tokens.

        Args:
            step: the batch that runs, with its input tokens and trees. Its first rows are those of
                the batch that has begun, those of a captured step are padded.
        """
        batch = self._batch
        assert batch is not None, "begin comes first"
        rows = batch.num_decodes
        if not rows or batch.decode_tokens == rows:
            return
        width = batch.decode_tokens // rows
        tokens = step.input_ids[: rows * width].view(rows, width)
        if self.forced is not None and step.tree is None:
            given = None if step.draft_counts is None else step.draft_counts[:rows]
            self.forced.offer(tokens, batch.rows[:rows].tolist(), given)
        parents = None if step.tree is None else step.tree.parents[:rows]
        if self._on_host:
            self._drafts = CopiedDrafts(tokens, parents, None)
            return
        copied = torch.cuda.Event()
        tokens = _pinned_copy(tokens)
        parents = None if parents is None else _pinned_copy(parents)
        copied.record()
        self._drafts = CopiedDrafts(tokens, parents, copied)

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits of the tokens that the rows' grammars forbid to minus infinity.

        The results of earlier steps are waited for; the device runs the model's pass meanwhile.

        Args:
            logits: float32 [N, V], of the decoding rows' tokens and then of the finished prompts.
        """
        last, buffer = self._buffers
        self._buffers = [buffer, last]
        buffer.passed()
        self._read()
        started = time.perf_counter()
        self._fill_masks(buffer)
        self.counts.steps += 1
        self.counts.waits += buffer.late()
        self.counts.wait_seconds += last.waited()
        buffer.apply(partial(self._backend.forbid, logits))
        self.counts.seconds += time.perf_counter() - started
        self._take_failures()

    def launched(self, inflight: InFlight) -> None:
        """Keep the results of the step, which the matchers read in a later one."""
        if self._sampling:
            self._unread.append(UnreadStep(inflight, self._sampling))
        if self.forced is not None and self._batch is not None:
            inflight.forced = self.forced.keep(self._batch.rows.tolist(), inflight.accepted.counts)

    # ---- inside ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Advance the constraints by the tokens of all steps launched before."""
        unread = self._unread
        self._unread = []
        for step in unread:
            result = step.inflight.wait()
            begun = time.perf_counter()
            tokens = result.tokens.tolist()
            counts = result.counts.tolist()
            for i, constraint in step.rows:
                for token in tokens[i][: counts[i]]:
                    constraint.accept(token)
            self.counts.seconds += time.perf_counter() - begun

    def _fill_masks(self, buffer: MaskBuffer) -> None:
        """Fill the masks of the step."""
        positions = self._positions()
        places, masks = buffer.take(sum(count for _, count in positions))
        plain: list[tuple[int, Constraint]] = []
        rows: list[int] = []
        at = 0
        wanted: list[int] = []
        for (i, constraint), (first, count) in zip(self._sampling, positions):
            wanted += range(first, first + count)
            if count == 1 and constraint.in_grammar:
                plain.append((at, constraint))
                rows.append(i)
            else:
                self._fill_row(i, constraint, masks[at : at + count])
            at += count
        places[:] = wanted
        self._fill(plain, masks)
        if self.forced is not None:
            for i, (_, constraint) in zip(rows, plain):
                self.forced.add(i, 0, constraint.forced())

    def _fill_row(self, i: int, constraint: Constraint, masks: Masks) -> None:
        """Fill the masks of the positions that row ``i`` of the batch samples, [count, words]."""
        if len(masks) == 1:
            constraint.fill(masks[0])
            return
        assert self._drafts is not None, "rows of several tokens have drafts"
        tokens, parents = self._drafts.read()
        masks[:] = ANY
        forced = _ignored if self.forced is None else partial(self.forced.add, i)
        constraint.fill_tree(tokens[i], parents[i], masks, forced)

    def _positions(self) -> list[tuple[int, int]]:
        """Return for each row with a mask its first row of the logits, and their number."""
        batch = self._batch
        assert batch is not None, "begin comes first"
        decodes = batch.num_decodes
        tokens = batch.decode_tokens
        width = tokens // decodes if decodes else 1
        ends: list[int] = []
        if batch.num_rows > decodes:
            ends = (tokens - 1 + np.cumsum(batch.samples[decodes:])).tolist()
        return [
            (i * width, width) if i < decodes else (ends[i - decodes], 1) for i, _ in self._sampling
        ]

    def _fill(self, plain: list[tuple[int, Constraint]], masks: Masks) -> None:
        """Fill the masks of constraints whose matcher alone decides, at once."""
        if plain:
            wanted: list[tuple[Matcher, int]] = [(one.matcher, at) for at, one in plain]
            self._backend.fill(wanted, masks)
        some = np.bitwise_or.reduce(masks, axis=1).tolist()
        for at, constraint in plain:
            if not some[at] or constraint.matcher.error():
                constraint.check(masks[at], some[at] != 0)

    def _take_failures(self) -> None:
        self.failed += [
            (sequence.id, constraint.failure)
            for sequence, constraint in self._rows.values()
            if constraint.failure
        ]


def _ignored(node: int, forced: Seq[int]) -> None:
    """Ignore the tokens that have to follow ``node``: they cannot be drafts of a tree."""


def _pinned_copy(part: torch.Tensor) -> torch.Tensor:
    """Begin to copy ``part`` to pinned host memory."""
    held = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return held.copy_(part, non_blocking=True)

"""Draft models of a scripted target that check their inputs and the entries of their cache.

One continues the target's hidden states, the other is a whole model. The cache of either has an
entry for each token: the hash of the text that the token ends, and that of the text before. Entries
are checked when a draft pass reads them, since those of rejected drafts may hold anything until
then.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.protocols import Limits, WeightTarget
from glowplug.core.step.batch import Batch
from glowplug.core.testing.harness.prefix_hash import EMPTY_HASH, extend
from glowplug.core.testing.harness.scripted_target import (
    HIDDEN,
    PAGE,
    VOCAB,
    slots_of,
    state_of,
    text_of,
)


class Entry(NamedTuple):
    """The cache entry of a token.

    Attributes:
        length: number of tokens of the text that the token ends.
        text: hash of this text.
        before: hash of the text without the token.
    """

    length: int
    text: int
    before: int


class ScriptedDraft:
    """A draft model, its family and its attention, for algorithms that shift the cache by one.

    Args:
        previous: key in ``Batch.extra`` of the hidden states that a pass continues.
    """

    def __init__(self, previous: str) -> None:
        self._previous = previous
        self._entries: dict[int, Entry] = {}
        self._planned: Batch | None = None

    def build_nextn(self, context: Any, target: Any) -> ScriptedDraft:
        return self

    def targets(self) -> Iterator[WeightTarget]:
        return iter(())

    def finalize(self) -> None:
        return

    def ignored(self, name: str) -> bool:
        return False

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self._planned = batch

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        """Store the entries of tokens, each of which continues a hidden state."""
        assert len(input_ids) == len(positions) == len(kv_slots) == len(previous)
        self._store(input_ids, kv_slots, previous)

    def _store(self, input_ids: Tensor, kv_slots: Tensor, previous: Tensor) -> list[Entry]:
        made = []
        for token, slot, state in zip(
            input_ids.tolist(), kv_slots.tolist(), previous.tolist(), strict=True
        ):
            length, before = text_of(state)
            made.append(Entry(length + 1, extend(before, token), before))
            self._entries[slot] = made[-1]
        return made

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run a draft pass and check that each token reads the entries of its own text."""
        assert self._planned is batch, "attention did not plan the pass"
        assert len(input_ids) == len(positions) == len(batch.kv_slots) == batch.num_tokens
        made = self._store(input_ids, batch.kv_slots, batch.extra[self._previous])
        slots: list[int] = batch.kv_slots.tolist()
        for entry, position, slot in zip(made, positions.tolist(), slots, strict=True):
            # a surplus step of an ended row writes to the scratch page
            assert entry.length == position + 1 or slot < PAGE, (
                "a draft pass continues another token's state"
            )
        first = 0
        for place in range(batch.num_rows):
            count = int(batch.query_lens[place])
            for number in range(count):
                self._check_reads(batch, place, number, made[first + number])
            first += count
        states = [state_of(entry.length, entry.text) for entry in made]
        return torch.tensor(states).view(len(states), HIDDEN)

    def _check_reads(self, batch: Batch, place: int, number: int, own: Entry) -> None:
        """Check the entries that token ``number`` of a row attends to, from the last to the first.

        Each has to be that of the text before the next one.
        """
        slots = read_slots(batch, place, number)
        if min(slots) < PAGE:
            return  # as above
        entries = [self._entries.get(slot) for slot in slots]
        assert entries[-1] == own, "a draft pass does not see its own token"
        for before, after in zip(entries, entries[1:]):
            assert before is not None and after is not None, "a draft pass reads an empty slot"
            assert before.text == after.before, "a draft pass reads the entry of another text"
        assert entries[0] is not None and entries[0].length == batch.first_key + 1

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits that depend on the text, the token ids without the last one."""
        scores = torch.full((len(hidden), VOCAB), -9.0)
        for place, state in enumerate(hidden.tolist()):
            rng = random.Random(text_of(state)[1])
            scores[place, : VOCAB - 1] = torch.tensor([rng.random() for _ in range(VOCAB - 1)])
        return scores


class ScriptedModel(ScriptedDraft):
    """A whole draft model, its family and its attention.

    A token's text is that of the last token before it to which it attends, and the token itself.
    """

    def __init__(self) -> None:
        super().__init__("")

    def build(self, context: Any) -> ScriptedModel:
        return self

    def kv_layout(self) -> KVLayout:
        return KVLayout(1, PAGE, ())

    def reserve(self, limits: Limits) -> None:
        return

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Run a pass and check that each token reads the entries of its own text."""
        assert self._planned is batch, "attention did not plan the pass"
        assert len(input_ids) == len(positions) == len(batch.kv_slots) == batch.num_tokens
        tokens = zip(input_ids.tolist(), positions.tolist(), strict=True)
        states = []
        for place in range(batch.num_rows):
            for number in range(int(batch.query_lens[place])):
                token, position = next(tokens)
                made = self._add(batch, place, number, token)
                # a surplus step of an ended row reads the scratch page
                assert made is None or made.length == position + 1, "a token has another position"
                states.append(state_of(made.length, made.text) if made else state_of(1, 0))
        return torch.tensor(states).view(len(states), HIDDEN)

    def _add(self, batch: Batch, place: int, number: int, token: int) -> Entry | None:
        """Store the entry of token ``number`` of a row; None if it reads the scratch page."""
        slots = read_slots(batch, place, number)
        if min(slots) < PAGE:
            return None
        before = self._entries.get(slots[-2]) if len(slots) > 1 else Entry(0, EMPTY_HASH, 0)
        assert before is not None, "a draft pass reads an empty slot"
        made = Entry(before.length + 1, extend(before.text, token), before.text)
        self._entries[slots[-1]] = made
        self._check_reads(batch, place, number, made)
        return made

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        assert layers == range(1)
        for column in range(sources.shape[1]):
            pairs = zip(sources[:, column].tolist(), targets[:, column].tolist(), strict=True)
            moved = {target: self._entries.get(source) for source, target in pairs}
            self._entries |= {slot: entry for slot, entry in moved.items() if entry is not None}


def read_slots(batch: Batch, place: int, number: int) -> list[int]:
    """Return the KV slots to which token ``number`` of a row attends, in order."""
    slots: list[int] = slots_of(batch, place, np.array(_keys(batch, place, number))).tolist()
    return slots


def _keys(batch: Batch, place: int, number: int) -> list[int]:
    """Return the cache positions to which token ``number`` of a row attends, in order."""
    count = int(batch.query_lens[place])
    keys = int(batch.kv_lens_device[place])
    if batch.tree_mask is None or place >= batch.num_decodes:
        return list(range(batch.first_key, keys - count + number + 1))
    span = batch.tree_span or count
    mask = int(batch.tree_mask[place, number])
    masked = [keys - span + bit for bit in range(span) if mask >> bit & 1]
    return [*range(batch.first_key, keys - span), *masked]

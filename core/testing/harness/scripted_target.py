"""A target model, its attention and its sampler that follow a script, to test speculation.

The script decides the token after each text when it is first requested: often one of the drafts
that were offered there, otherwise another token. From then on this token is the only right one. So
every number of accepted drafts occurs, whatever an algorithm drafts.

A hidden state holds the length and the hash of the text that its token ends, so that a draft model
can check whether it continues the right one (``scripted_draft``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.protocols import Sampled, WeightTarget
from glowplug.core.step.batch import Batch
from glowplug.core.testing.harness.prefix_hash import EMPTY_HASH, extend
from glowplug.core.testing.harness.stateless_sampler import StatelessSampler

VOCAB = 23
HIDDEN = 8
HASH_PARTS = 4  #: parts of 16 bits of a hash, each of which a float32 holds exactly
NUMBER = 1 + HASH_PARTS  #: place in a hidden state of the token's index in its step
FOLLOWED = 0.7  #: share of texts after which the script follows a draft
PAGE = 4  #: tokens per page
EMPTY = -1  #: content of a KV slot that was never written

Text = tuple[int, ...]


def state_of(length: int, text_hash: int, number: int = 0) -> list[float]:
    """Return the hidden state of the last token of a text.

    Args:
        length: number of tokens of the text.
        text_hash: hash of the text.
        number: index of the token in its step.
    """
    parts = [float(text_hash >> (16 * part) & 0xFFFF) for part in range(HASH_PARTS)]
    made = [float(length), *parts, float(number)]
    return made + [0.0] * (HIDDEN - len(made))


def text_of(state: Seq[float]) -> tuple[int, int]:
    """Return the length and the hash of the text that a hidden state belongs to."""
    parts = (int(part) << (16 * place) for place, part in enumerate(state[1:NUMBER]))
    return int(state[0]), sum(parts)


class Script:
    """The right token after each text, decided when it is first requested."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._decided: dict[Text, int] = {}

    def following(self, text: Text, offered: Seq[int] = ()) -> int:
        """Return the token after ``text``, never the last id of the vocabulary.

        Args:
            text: the tokens so far.
            offered: the drafts for the place after them; only the first call considers them.
        """
        if text not in self._decided:
            usable = [token for token in offered if token < VOCAB - 1]
            others = [token for token in range(VOCAB - 1) if token not in offered]
            follows = bool(usable) and self._rng.random() < FOLLOWED
            self._decided[text] = self._rng.choice(usable if follows else others)
        return self._decided[text]


@dataclass(frozen=True)
class ScriptedToken:
    """A token of a step.

    Attributes:
        row: row of the sequence table.
        text: the tokens up to this one.
        drafts: those of them that are drafts of this step.
        children: indices in the step of the drafts that follow this token.
    """

    row: int
    text: Text
    drafts: Text
    children: tuple[int, ...]


class ScriptedTarget:
    """The target model and its attention backend. The KV cache holds the tokens themselves.

    Attributes:
        script: the script.
        nodes: the tokens of the last step, in the order of the batch.
        truth: row -> the right text so far, of the rows whose sequence has not ended.
    """

    def __init__(self, script: Script, slots: int) -> None:
        self.script = script
        self.nodes: list[ScriptedToken] = []
        self.truth: dict[int, list[int]] = {}
        self._cached: NDArray[np.int64] = np.full(slots, EMPTY)

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        return

    def move_entries(self, sources: Tensor, targets: Tensor, layers: range) -> None:
        for column in range(sources.shape[1]):
            self._cached[targets[:, column].numpy()] = self._cached[sources[:, column].numpy()]

    def targets(self) -> Iterator[WeightTarget]:
        return iter(())

    def finalize(self) -> None:
        return

    def ignored(self, name: str) -> bool:
        return False

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Read the text of each token through the page table, and check it and the positions."""
        assert len(input_ids) == len(positions) == len(batch.kv_slots) == batch.num_tokens
        ids: list[int] = input_ids.tolist()
        assert all(0 <= id < VOCAB for id in ids), "an input id is not in the vocabulary"
        texts = [self._cached_text(batch, place) for place in range(batch.num_rows)]
        self._cached[batch.kv_slots.numpy()] = input_ids.numpy()
        self.nodes = []
        for place, text in enumerate(texts):
            first = len(self.nodes)
            self._add_row(batch, place, text, ids[first : first + int(batch.query_lens[place])])
        assert positions.tolist() == [len(node.text) - 1 for node in self.nodes], (
            "a token is at the position of another one"
        )
        return self._states()

    def _states(self) -> Tensor:
        """Return the hidden states of the step's tokens, [T, HIDDEN]."""
        states = [
            state_of(len(node.text), reduce(extend, node.text, EMPTY_HASH), number)
            for number, node in enumerate(self.nodes)
        ]
        return torch.tensor(states).view(len(states), HIDDEN)

    def _cached_text(self, batch: Batch, place: int) -> Text:
        """Return the tokens that the cache has of a row before the step."""
        count = int(batch.kv_lens_device[place]) - int(batch.query_lens[place])
        slots = slots_of(batch, place, np.arange(count))
        return tuple(self._cached[slots].tolist())

    def _add_row(self, batch: Batch, place: int, text: Text, ids: list[int]) -> None:
        """Add the tokens ``ids`` of a row, which follow ``text``, after a check of both."""
        decodes = place < batch.num_decodes
        row = int(batch.rows[place])
        self._check_truth(row, [*text, *(ids[:1] if decodes else ids)], decodes)
        first = len(self.nodes)
        paths = _paths(batch, place, len(ids))
        drafted = range(1, 1 + drafts_of(batch, place, len(ids)))
        for path in paths:
            behind = [other for other in drafted if paths[other][:-1] == path]
            own = tuple(ids[number] for number in path)
            drafts, children = (own[1:], behind) if decodes else ((), [])
            offsets = tuple(first + child for child in children)
            self.nodes.append(ScriptedToken(row, text + own, drafts, offsets))

    def _check_truth(self, row: int, known: list[int], whole: bool) -> None:
        """Compare the text that a row continues with the right one, or with its beginning.

        Args:
            row: row of the sequence table.
            known: cached tokens of the row, and those of the step without drafts.
            whole: ``known`` has to be the whole text.
        """
        truth = self.truth.get(row)
        if truth is not None:
            right = truth if whole else truth[: len(known)]
            assert known == right, f"row {row} continues {known}, its text is {right}"

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits whose most likely token is the script's.

        The last id's logit is the token's index in its step, negated, for the sampler.
        """
        scores = torch.zeros(len(hidden), VOCAB)
        for place, number in enumerate(hidden[:, NUMBER].int().tolist()):
            node = self.nodes[number]
            offered = [self.nodes[child].text[-1] for child in node.children]
            assert len(set(offered)) == len(offered), "two drafts after one token are equal"
            scores[place, self.script.following(node.text, offered)] = 9.0
            scores[place, -1] = -number
        return scores

    def gained(self, root: int) -> list[int]:
        """Return the tokens that a row gains whose newest token is node ``root``."""
        found = []
        node = self.nodes[root]
        while True:
            token = self.script.following(node.text)
            found.append(token)
            right = [child for child in node.children if self.nodes[child].text[-1] == token]
            if not right:
                return found
            node = self.nodes[right[0]]


def slots_of(batch: Batch, place: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the KV slots of positions of a row of the batch."""
    pages: NDArray[np.int64] = batch.page_table[place].numpy().astype(np.int64)
    slots: NDArray[np.int64] = (
        pages[np.minimum(positions // PAGE, len(pages) - 1)] * PAGE + positions % PAGE
    )
    return slots


def drafts_of(batch: Batch, place: int, count: int) -> int:
    """Return the number of drafts among the ``count`` tokens of a decoding row, after a check."""
    given = batch.draft_counts
    if given is None or place >= batch.num_decodes:
        return count - 1
    assert given.dtype == torch.int32 and given.shape == (batch.num_decodes,), (
        "draft_counts has an int32 for each decoding row"
    )
    drafts = int(given[place])
    assert 0 <= drafts < count, f"a row of {count} tokens has {drafts} drafts"
    return drafts


def _paths(batch: Batch, place: int, count: int) -> list[list[int]]:
    """Return the path of each of the ``count`` tokens of a row, itself included.

    A path is a list of indices in the row.
    """
    if batch.tree_mask is None or place >= batch.num_decodes:
        return [list(range(number + 1)) for number in range(count)]
    masks: list[int] = batch.tree_mask[place].tolist()
    return [[bit for bit in range(count) if mask >> bit & 1] for mask in masks]


class ScriptedSampler(StatelessSampler):
    """A ``Sampler`` that takes the script's token, and checks its arguments for each token.

    Attributes:
        observed: row -> the tokens counted since the last step.
    """

    def __init__(self, target: ScriptedTarget) -> None:
        self._target = target
        self.observed: dict[int, list[int]] = {}

    def capture_key(self) -> str | None:
        return "scripted"

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        count = len(logits)
        assert len(rows) == len(positions) == count, "one row and position for each token"
        assert ahead is None or len(ahead) == count
        before = [[]] * count if ahead is None else ahead.tolist()
        nodes = [self._target.nodes[int(-number)] for number in logits[:, -1].tolist()]
        for node, row, position, drafts in zip(
            nodes, rows.tolist(), positions.tolist(), before, strict=True
        ):
            assert row == node.row, f"a token of row {node.row} is drawn for row {row}"
            assert position == len(node.text), "a token is drawn with the noise of another position"
            given = sorted(token for token in drafts if token >= 0)
            assert given == sorted(node.drafts), f"drafts ahead are {node.drafts}, not {given}"
        return Sampled(logits.argmax(-1), torch.zeros(count, dtype=torch.bool))

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        for row, own, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            self.observed.setdefault(row, []).extend(own[:count])

"""Answers that repeat given tokens without a grammar.

A mask costs its own time, and the text that it enforces may cost another: rows of JSON choose the
same experts. A run that repeats the tokens of a run with a schema has the text without the masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glowplug.core.protocols import Sampled
from glowplug.plugins.sampling.torch_sampler_runtime import TorchSampler

OWN = -1  #: the sampler's own token is drawn


class Repeater:
    """The tokens that the rows of a sampler repeat.

    Attributes:
        answers: the tokens of an answer by the seed of its request.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.answers: Mapping[int, Sequence[int]] = {}
        self._table = torch.full((rows, length), OWN)

    def join(self, row: int, seed: int | None, prompt_len: int) -> None:
        """Set the tokens of a row, which a request with ``seed`` enters."""
        self._table[row] = OWN
        answer = self.answers.get(seed, ()) if seed is not None else ()
        self._table[row, prompt_len : prompt_len + len(answer)] = torch.tensor(answer)

    def repeat(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return ``tokens`` [N], replaced where the answers have a token."""
        known = positions.clamp(max=self._table.shape[1] - 1)
        given = self._table[rows, known]
        return torch.where(given == OWN, tokens, given)


@contextmanager
def repeating(rows: int, length: int) -> Iterator[Repeater]:
    """Let the samplers of this process repeat the answers of the repeater that is returned.

    Args:
        rows: most rows of an engine.
        length: most tokens of a sequence, prompt included.
    """
    repeater = Repeater(rows, length)
    join, sample = TorchSampler.join, TorchSampler.sample

    def joined(self: TorchSampler, row: int, params: Any, tokens: Any, prompt_len: int,
               stop_ids: Any) -> None:  # fmt: skip
        join(self, row, params, tokens, prompt_len, stop_ids)
        repeater.join(row, params.seed, prompt_len)

    def sampled(self: TorchSampler, logits: Tensor, rows: Tensor, positions: Tensor,
                ahead: Tensor | None = None) -> Sampled:  # fmt: skip
        found = sample(self, logits, rows, positions, ahead)
        found.tokens = repeater.repeat(found.tokens, rows, positions)
        return found

    TorchSampler.join, TorchSampler.sample = joined, sampled  # type: ignore[method-assign]
    try:
        yield repeater
    finally:
        TorchSampler.join, TorchSampler.sample = join, sample  # type: ignore[method-assign]

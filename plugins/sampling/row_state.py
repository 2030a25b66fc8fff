"""Per-row state of the torch sampler: parameter columns, token lists and masks, penalty counts.

Each row of the sequence table has an entry on the device, written when a sequence joins, never per
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.step.request import SamplingParams

GREEDY_BELOW = 1e-5  #: temperatures below this mean greedy sampling


class Feature(IntFlag):
    """Set of sampling features that a row uses; a step runs the union of its rows' features."""

    RANDOM = 1
    MIN_P = 2
    TOP_K = 4
    TOP_P = 8
    PENALTIES = 16
    BIAS = 32
    ALLOWED = 64
    MIN_TOKENS = 128
    LOGPROBS = 256

    @property
    def edits(self) -> bool:
        """True if some of the features change logits before a token is chosen."""
        return bool(
            self & (Feature.PENALTIES | Feature.BIAS | Feature.ALLOWED | Feature.MIN_TOKENS)
        )


def features_of(params: SamplingParams, stop_ids: frozenset[int]) -> Feature:
    """Return the sampling features that affect a sequence with ``params``."""
    random = params.temperature >= GREEDY_BELOW
    needed = {
        Feature.RANDOM: random,
        Feature.MIN_P: random and params.min_p > 0,
        Feature.TOP_K: random and params.top_k > 0,
        Feature.TOP_P: random and params.top_p < 1,
        Feature.PENALTIES: bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        ),
        Feature.BIAS: bool(params.logit_bias),
        Feature.ALLOWED: params.allowed_token_ids is not None,
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(stop_ids),
        Feature.LOGPROBS: params.logprobs is not None,
    }
    return Feature(sum(feature for feature, wanted in needed.items() if wanted))


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy ``array`` to ``device`` without waiting for the device, and return the copy."""
    host = torch.from_numpy(array)
    # NOTE: new pinned memory each time; torch's pinned-memory cache keeps it alive until the copy
    # is done.
    return host.clone() if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Column:
    """A per-row array [rows, width], written on the host and read on the device.

    If the device is a CPU, host and device array share one memory. On a GPU ``upload`` copies the
    rows written since its last call, without waiting.
    """

    def __init__(
        self, rows: int, width: int, dtype: type[np.float32] | type[np.int64], device: torch.device
    ) -> None:
        self.host: NDArray[np.float32 | np.int64] = np.zeros((rows, width), dtype)
        self._shared = device.type == "cpu"
        self.device = (
            torch.from_numpy(self.host) if self._shared else torch.from_numpy(self.host).to(device)
        )
        self._dirty: set[int] = set()

    def write(self, row: int, values: Iterable[float]) -> None:
        self.host[row] = list(values)
        self._dirty.add(row)

    def upload(self) -> None:
        if self._dirty and not self._shared:
            rows = np.array(sorted(self._dirty))
            device = self.device.device
            self.device.index_copy_(0, send(rows, device), send(self.host[rows], device))
        self._dirty.clear()


class TokenLists:
    """A short list of (token id, value) for each row; the values are added to the row's logits.

    Unused entries of a list add 0 to token 0.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.values = torch.zeros(rows, 0, dtype=torch.float32, device=device)
        self._filled: set[int] = set()

    def write(self, row: int, entries: Mapping[int, float]) -> None:
        if not entries and row not in self._filled:
            return
        self._widen(len(entries))
        ids = np.zeros(self.ids.shape[1], np.int64)
        values = np.zeros(self.ids.shape[1], np.float32)
        ids[: len(entries)], values[: len(entries)] = list(entries), list(entries.values())
        self.ids[row] = send(ids, self.ids.device)
        self.values[row] = send(values, self.ids.device)
        (self._filled.add if entries else self._filled.discard)(row)

    def _widen(self, width: int) -> None:
        extra = max(0, width - self.ids.shape[1])
        if extra:
            extra = max(extra, self.ids.shape[1])
            self.ids = torch.nn.functional.pad(self.ids, (0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, extra))

    def add(self, logits: Tensor, rows: Tensor, active: Tensor | None = None) -> None:
        """Add the values of the rows' lists to their logits, in place.

        Args:
            logits: [N, V].
            rows: row of each sequence [N].
            active: bool [N]; False leaves a row's logits unchanged. None: all are changed.
        """
        values = self.values[rows]
        if active is not None:
            values = torch.where(active[:, None], values, 0.0)
        logits.scatter_add_(1, self.ids[rows], values)


class SparseRowState:
    """State of V numbers per row, stored as entries [entries, V] only for rows that need one.

    All other rows share entry 0, whose content has no meaning. When all entries are in use, their
    number is doubled.
    """

    def __init__(
        self, rows: int, vocab: int, dtype: torch.dtype, fill: int, device: torch.device
    ) -> None:
        self.state = torch.full((1, vocab), fill, dtype=dtype, device=device)
        self._fill = fill
        self._rows = np.zeros(rows, np.int64)
        self._free: list[int] = []

    def _assign(self, row: int) -> int:
        """Return the index of the entry of ``row``, allocating an entry if needed."""
        if not self._free:
            self._grow()
        self._rows[row] = self._rows[row] or self._free.pop()
        return int(self._rows[row])

    def write(self, row: int, values: NDArray[Any]) -> int:
        """Give ``row`` an entry that holds ``values`` [V]. Return the entry's index."""
        entry = self._assign(row)
        self.state[entry] = send(values, self.state.device)
        return entry

    def leave(self, row: int) -> None:
        """Free the entry of ``row``, if it has one."""
        if self._rows[row]:
            self._free.append(int(self._rows[row]))
            self._rows[row] = 0

    def _grow(self) -> None:
        old = len(self.state)
        extra = self.state.new_full((max(4, old), self.state.shape[1]), self._fill)
        self.state = torch.cat([self.state, extra])
        self._free.extend(range(len(self.state) - 1, old - 1, -1))


#: flag in a penalty count: the token is in the prompt; the lower bits count the token in the output
PROMPT_BIT = 1 << 30


def penalty_counts(tokens: NDArray[np.int32], prompt_len: int, vocab: int) -> NDArray[np.int32]:
    """Return how often each token occurs in a sequence's output so far, int32 [V].

    Tokens of the prompt have ``PROMPT_BIT`` set. Penalties are computed from these numbers.
    """
    counts = np.bincount(tokens[prompt_len:], minlength=vocab)[:vocab].astype(np.int32)
    prompt = tokens[:prompt_len]
    counts[prompt[prompt < vocab]] |= PROMPT_BIT
    return counts


def allowed_tokens(params: SamplingParams, vocab: int) -> NDArray[np.bool_]:
    """Return the mask of the tokens that ``params`` allows, bool [V]."""
    mask = np.zeros(vocab, np.bool_)
    mask[[token for token in params.allowed_token_ids or () if 0 <= token < vocab]] = True
    return mask

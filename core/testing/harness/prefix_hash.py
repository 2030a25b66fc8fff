"""A language in which the next token is a hash of the whole prefix, for the fake model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.request import SamplingParams

MASK_64 = (1 << 64) - 1
EMPTY_HASH = 0x51ED270B  #: hash of the empty prefix
# constants of splitmix64
SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
SPLITMIX_FACTOR_1 = 0xBF58476D1CE4E5B9
SPLITMIX_FACTOR_2 = 0x94D049BB133111EB


def extend(prefix_hash: int, token: int) -> int:
    """Return the hash of a prefix and one more token."""
    value = (prefix_hash ^ (token + SPLITMIX_INCREMENT)) * SPLITMIX_FACTOR_1 & MASK_64
    return (value ^ (value >> 29)) * SPLITMIX_FACTOR_2 & MASK_64


def extend_all(prefix_hashes: NDArray[np.uint64], tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the result of ``extend`` for each of many prefixes and its token."""
    value = (prefix_hashes ^ (tokens + np.uint64(SPLITMIX_INCREMENT))) * np.uint64(
        SPLITMIX_FACTOR_1
    )
    mixed: NDArray[np.uint64] = (value ^ (value >> np.uint64(29))) * np.uint64(SPLITMIX_FACTOR_2)
    return mixed


def next_token(prefix_hash: int, vocab: int) -> int:
    """Return the token that follows a prefix."""
    return (prefix_hash >> 17) % vocab


def logprob_of(prefix_hash: int) -> float:
    """Return an invented log-probability of the token that follows a prefix."""
    return -float((prefix_hash >> 5) % 1000) / 128


def reference(
    prompt: list[int], params: SamplingParams, stop_ids: frozenset[int], *, vocab: int, context: int
) -> tuple[list[int], str]:
    """Return the (output, finish reason) that every correct schedule yields for ``prompt``."""
    state = EMPTY_HASH
    for token in prompt:
        state = extend(state, token)
    output: list[int] = []
    assert params.max_tokens is not None
    while True:
        token = next_token(state, vocab)
        output.append(token)
        state = extend(state, token)
        if token in stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == context:
            return output, "length"

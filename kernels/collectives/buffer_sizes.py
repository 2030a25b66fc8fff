"""Size of the buffers for exchange between ranks, for plans and kernels alike; imports no torch."""

from __future__ import annotations

BUFFERS = 3  #: receiving buffers that take turns
WORD_BYTES = 2  #: bytes of a word, the unit of buffer sizes


def buffer_words(ranks: int, capacity: int) -> int:
    """Return the number of words of one rank's receiving buffers.

    Args:
        ranks: number of ranks in the group.
        capacity: number of words that a rank can send to a peer in one call.
    """
    return BUFFERS * (ranks - 1) * capacity

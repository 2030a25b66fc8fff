"""Size of the buffers for exchange between ranks, for plans and kernels alike; imports no torch."""

from __future__ import annotations

BUFFERS = 3  #: receiving buffers that take turns
WORD_BYTES = 2  #: bytes of a word, the unit of buffer sizes
ROW_ALIGNMENT = 64  #: words; rows of tokens begin at multiples of it


def buffer_words(ranks: int, capacity: int) -> int:
    """Return the number of words of one rank's receiving buffers.

    Args:
        ranks: number of ranks in the group.
        capacity: number of words that a rank can send to a peer in one call.
    """
    return BUFFERS * (ranks - 1) * capacity


def token_words(size: int, topk: int, groups: int = 0) -> int:
    """Return the number of words of a token that is sent to the ranks of its experts.

    Args:
        size: bytes of the token.
        topk: number of its experts, each with an id and a weight of 32 bits.
        groups: number of its scales, of 32 bits each.
    """
    words = -(-size // WORD_BYTES) + 2 * (2 * topk + groups)
    return -(-words // ROW_ALIGNMENT) * ROW_ALIGNMENT

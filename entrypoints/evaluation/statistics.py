"""Confidence intervals of shares, and the exact test of McNemar."""

from __future__ import annotations

import math

CONFIDENCE = 0.95
QUANTILE = 1.959963984540054  #: of the normal distribution at (1 + CONFIDENCE) / 2


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, at ``CONFIDENCE``.

    It stays within 0 and 1 and is right for small counts and shares near the ends (E. B. Wilson,
    Probable inference, JASA 22, 1927). For no observations it is (0, 1).
    """
    if not count:
        return 0.0, 1.0
    share = hits / count
    square = QUANTILE**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = (
        QUANTILE
        / (1 + square / count)
        * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    It is the probability that two engines of equal accuracy differ at least as much on the
    questions that only one of them answers rightly (binomial with probability 1/2).

    Args:
        first_only: questions that only the first engine answers rightly.
        second_only: questions that only the second one answers rightly.
    """
    count = first_only + second_only
    smaller = min(first_only, second_only)
    tail = sum(math.comb(count, k) for k in range(smaller + 1))
    return min(1.0, 2 * tail / (1 << count))

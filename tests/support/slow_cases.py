"""Parameters of which some are slow, so that a run of all tests takes a part of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def some_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return ``cases`` as parameters of a test; those that are in ``slow`` are marked slow."""
    return [pytest.param(one, marks=pytest.mark.slow if one in slow else ()) for one in cases]


def some_slow_rows(rows: Iterable[Sequence[Any]], slow: Collection[Any]) -> list[Any]:
    """Return ``rows`` of values of several parameters; those in ``slow`` are marked slow."""
    return [pytest.param(*row, marks=pytest.mark.slow if row in slow else ()) for row in rows]

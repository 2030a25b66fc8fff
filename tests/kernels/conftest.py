"""New memory holds NaN, or the largest integer, in tests of kernels, which may write into memory
that was never written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory in which torch fills the results of ``torch.empty`` and similar functions, as it does
    while algorithms have to be deterministic.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])

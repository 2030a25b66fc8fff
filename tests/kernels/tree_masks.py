"""Random tree masks for tests of decoding kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def random_masks(rows: int, width: int, span: int) -> Tensor:
    """Return masks int64 [rows, width] of random bits below ``span``, the last of which is set."""
    rng = np.random.default_rng(span)
    bits = rng.integers(0, 1 << span, (rows, width), np.uint64) | np.uint64(1 << span - 1)
    return torch.from_numpy(bits.view(np.int64))

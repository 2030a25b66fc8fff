"""Memory for masks on a CPU: the arrays that are filled are those that are applied."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from glowplug.core.step.mask_memory import MaskBuffer


def test_what_is_filled_is_applied_also_after_growth() -> None:
    buffer = MaskBuffer(3, torch.device("cpu"), None)
    seen: list[Tensor] = []
    for count in (2, 1, 7):
        places, masks = buffer.take(count)
        places[:] = np.arange(count) + 2**40
        masks[:] = np.arange(3 * count).reshape(count, 3)
        buffer.passed()
        seen.clear()
        buffer.apply(lambda places, masks: seen.extend((places, masks)))
        assert seen[0].tolist() == (np.arange(count) + 2**40).tolist()
        assert seen[1].tolist() == np.arange(3 * count).reshape(count, 3).tolist()
        assert not buffer.late() and buffer.waited() == 0.0

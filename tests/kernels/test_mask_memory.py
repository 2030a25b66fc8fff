"""Memory for masks on a CPU: the arrays that are filled are those that are applied, at addresses
for which kernels have one variant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.engine.masks import StepMasks
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


@pytest.mark.parametrize("count", range(1, 8))
def test_masks_begin_at_multiples_of_16_bytes(count: int) -> None:
    buffer = MaskBuffer(5, torch.device("cpu"), None)
    seen: list[Tensor] = []
    buffer.take(count)
    buffer.apply(lambda places, masks: seen.extend((places, masks)))
    places, masks = seen
    start = places.data_ptr()
    assert (masks.data_ptr() - start) % 16 == 0
    assert places.shape == (count,) and masks.shape == (count, 5)


class Seen:
    """A backend that keeps the arguments of ``forbid``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forbid(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        self.calls.append((logits, rows, masks))


def test_the_first_mask_is_applied_before_any_request() -> None:
    backend: Any = Seen()
    StepMasks(backend, 70, torch.device("cpu")).warm_up()
    ((logits, rows, masks),) = backend.calls
    assert logits.shape == (1, 70) and logits.dtype == torch.float32
    assert rows.tolist() == [0] and rows.dtype == torch.int64
    assert masks.tolist() == [[-1, -1, -1]] and masks.dtype == torch.int32

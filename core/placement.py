"""Where tokens go in the paged cache, computed on the device; and small host arrays sent there in one copy."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def slots_at(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slots int64 [B, W] of ``positions`` int64 [B, W] in the rows of ``page_table`` int32 [B, P].

    A position behind the table's last column goes to the scratch page, as unused entries of the table do.
    """
    columns = page_table.shape[1]
    wanted = positions.div(page_size, rounding_mode="floor")
    pages = page_table.gather(1, wanted.clamp(max=columns - 1)).long()
    pages = pages.masked_fill_(wanted >= columns, 0)
    return pages * page_size + positions % page_size


def send(parts: Seq[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """One-dimensional integer ``parts`` as int32 tensors on ``device``: one copy, which the host does not wait for."""
    sizes = [len(part) for part in parts]
    if device.type == "cpu":
        return torch.split(torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="unsafe")), sizes)
    # NOTE: torch keeps pinned memory that was given back until the copies out of it have happened.
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    np.concatenate(parts, out=packed.numpy(), casting="unsafe")
    return torch.split(packed.to(device, non_blocking=True), sizes)

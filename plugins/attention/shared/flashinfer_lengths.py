"""Exact sequence lengths, written into FlashInfer's MLA plans on the GPU.

The host plans with upper bounds, because the number of accepted drafts is known only on the device.

A plan is a list of work items: the keys of a row that a program reads for a tile of the row's
queries. FlashInfer makes the plan on the host, in a pinned buffer, and copies it to a device
buffer. The kernel reads two lengths of each work item there: the number of keys of the row (from
which the causal mask counts back) and the key at which the work item ends. These are the only
places where lengths are stored, so this module overwrites both after the copy. A work item left
without keys yields zeros and a log-sum-exp of -inf, so merging it adds nothing.

Source: ``MLAPlanInfo`` and ``MLAPlan`` in ``scheduler.cuh``, ``get_block_coord`` and ``write_o`` in
``mla_hopper.cuh`` of flashinfer 0.6.11.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: numbers in ``_plan_info``: the cluster count, and the byte offset of each list in the buffers
PLAN_FIELDS = 18
CLUSTERS = 1  #: plan field: the cluster count
QUERY_START = 2  #: plan field: the list of first queries
KEYS = 11  #: plan field: the list of row lengths in keys
KEY_END = 14  #: plan field: the list of keys at which the work items end
WORK_STARTS = 15  #: plan field: the list of the clusters' first work items

#: bytes of each shrunk plan buffer. A plan needs 0.6 MB: nine lists of 16,384 work items and five
#: lists with one number per multiprocessor.
PLAN_BUFFER_BYTES = 1 << 20


def shrink(wrapper: Any) -> None:
    """Shrink a new wrapper's two 8 MiB plan buffers, pinned and on the device, to 1 MiB each.

    A drafting engine keeps one wrapper per captured graph. FlashInfer raises an error when a plan
    does not fit into the device's buffer.
    """
    pinned = wrapper._pin_memory_int_workspace_buffer.is_pinned()
    wrapper._pin_memory_int_workspace_buffer = torch.empty(
        PLAN_BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned
    )
    wrapper._int_workspace_buffer = wrapper._int_workspace_buffer.new_empty(PLAN_BUFFER_BYTES)


class Works:
    """The work items of a wrapper's last plan.

    A field has one number for each work item, int32 [work items]. ``host(field)`` returns the
    field in the host's pinned buffer, ``there(field)`` that in the device's buffer. ``field``: a
    constant of this module such as ``KEY_END``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._info = [int(number) for number in wrapper._plan_info]
        if len(self._info) != PLAN_FIELDS:
            raise ValueError(f"the plan has {len(self._info)} numbers instead of {PLAN_FIELDS}")
        self._host: Tensor = wrapper._pin_memory_int_workspace_buffer.view(torch.int32)
        self._there: Tensor = wrapper._int_workspace_buffer.view(torch.int32)
        self.count = int(self._host[self._info[WORK_STARTS] // 4 + self._info[CLUSTERS]])

    def host(self, field: int) -> NDArray[np.int32]:
        numbers: NDArray[np.int32] = self._part(self._host, field).numpy()
        return numbers

    def there(self, field: int) -> Tensor:
        return self._part(self._there, field)

    def _part(self, buffer: Tensor, field: int) -> Tensor:
        return buffer[self._info[field] // 4 :][: self.count]


def set_lengths(wrapper: Any, lens: Tensor, width: int) -> None:
    """Overwrite the key counts of the rows in a wrapper's plan on the device.

    Args:
        wrapper: The FlashInfer wrapper, already planned.
        lens: Number of keys of each row, int32 [R] on the device; at most the planned bounds.
        width: Number of queries per row.
    """
    works = Works(wrapper)
    rows = works.there(QUERY_START)
    keys = works.there(KEYS)
    ends = works.there(KEY_END)
    if width > 1:
        rows = rows.div(width, rounding_mode="floor")
    torch.index_select(lens, 0, rows, out=keys)
    torch.minimum(ends, keys, out=ends)


def check_layout(wrapper: Any, bounds: NDArray[np.int32], width: int) -> None:
    """Check that this FlashInfer lays out a plan as this module expects.

    The work items on the host must hold the planned lengths at the expected places.

    Args:
        wrapper: The FlashInfer wrapper, already planned.
        bounds: Planned number of keys of each row, [R].
        width: Number of queries per row.

    Raises:
        RuntimeError: The installed FlashInfer lays out its plans differently.
    """
    try:
        works = Works(wrapper)
        rows = works.host(QUERY_START) // width
        reached = np.zeros_like(bounds)
        np.maximum.at(reached, rows, works.host(KEY_END))
        as_planned = np.array_equal(bounds[rows], works.host(KEYS)) and np.array_equal(
            reached, bounds
        )
    except (AttributeError, IndexError, ValueError):
        as_planned = False
    if not as_planned:
        from flashinfer import __version__

        raise RuntimeError(
            f"flashinfer-python {__version__} lays out its MLA plans differently from 0.6.11, so "
            "the sequence lengths computed on the GPU cannot be written into them. "
            'Fix: attention.use = "auto", flashinfer-python==0.6.11, or speculative.use = "none"'
        )

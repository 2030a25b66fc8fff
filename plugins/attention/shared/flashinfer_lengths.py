"""Rows' lengths that only the device knows, in what flashinfer's MLA wrapper has planned from upper
bounds.

A plan is a list of works: which keys of a row a program reads for a tile of its queries. It is made
on the host, in a pinned buffer, and copied to one on the device, where the kernel finds how many
keys a work's row has (which its causal mask counts back from) and at which of them the work ends.
Nothing else tells it, so both are replaced there, behind the copy. A work left without keys yields
zeros and -inf for its log-sum-exp, so that merging adds nothing.
Source: ``MLAPlanInfo`` and ``MLAPlan`` in ``scheduler.cuh``, ``get_block_coord`` and ``write_o`` in
``mla_hopper.cuh`` of flashinfer 0.6.11.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIELDS = 18  #: numbers in a plan: clusters, and where in the buffers each list begins, in bytes
CLUSTERS = 1
QUERY_START = 2
KEYS = 11
KEY_END = 14
WORK_STARTS = 15

LISTS = (
    1 << 20
)  #: bytes; a plan takes nine lists of 16,384 works and five of a number a multiprocessor: 0.6 MB


def shrink(wrapper: Any) -> None:
    """Leave a new wrapper so much of the 8 MiB that it took on the device and of pinned memory, for
    the many of a drafting engine's graphs. What a plan takes beyond the device's buffer is an error
    of the library's.
    """
    pinned = wrapper._pin_memory_int_workspace_buffer.is_pinned()
    wrapper._pin_memory_int_workspace_buffer = torch.empty(
        LISTS, dtype=torch.uint8, pin_memory=pinned
    )
    wrapper._int_workspace_buffer = wrapper._int_workspace_buffer.new_empty(LISTS)


class Works:
    """The works of a wrapper's last plan. Lists are int32 [works]: ``host`` of pinned memory,
    ``there`` on the device.
    """

    def __init__(self, wrapper: Any) -> None:
        self._info = [int(number) for number in wrapper._plan_info]
        if len(self._info) != FIELDS:
            raise ValueError(f"a plan of {len(self._info)} numbers in place of {FIELDS}")
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
    """Rows of ``width`` queries have ``lens`` int32 [R] keys, on the device; none has more than was
    planned.
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
    """RuntimeError unless the host's works say what was planned: rows of ``width`` queries and
    ``bounds`` [R] keys.
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
            f"flashinfer-python {__version__} does not lay out its plans of latent attention as 0.6.11 "
            "does, so lengths that the device alone knows cannot be put in. Fix: attention.use = "
            '"auto", flashinfer-python==0.6.11, or speculative.use = "none"'
        )

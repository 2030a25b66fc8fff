"""Copies of small arrays between pinned host memory and the device, by a kernel.

A copy engine delays the kernels around it. In a decode step of V2-Lite on two H200, the results
left the device 5 us after the last kernel, the next step's inputs arrived 15 us later, and the
first kernel began 6 us after them (traced with 8 rows). A kernel reads and writes host memory
itself.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.launch.integers import cdiv

BYTES_MAX = 64 << 10  #: most bytes that a kernel copies; a copy engine is faster for many
WORD: tl.constexpr = tl.constexpr(4)  # bytes that a thread copies at once
BLOCK = 1024  #: words of a program


@triton.jit(
    do_not_specialize=["size", "source_stride", "target_stride"],
    do_not_specialize_on_alignment=["source", "target"],
)
def _copy(source, target, size, source_stride, target_stride, BLOCK: tl.constexpr):
    """Copy rows of ``size`` bytes; pointers are uint8, strides are in bytes.

    The host writes and reads this memory, so that no cache may have it (".cv").
    """
    row = tl.program_id(1).to(tl.int64)
    source += row * source_stride
    target += row * target_stride
    words = size // WORD
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    given = source.to(tl.pointer_type(tl.int32)) + word
    value = tl.load(given, mask=inside, cache_modifier=".cv")
    tl.store(target.to(tl.pointer_type(tl.int32)) + word, value, mask=inside)
    if tl.program_id(0) == 0:
        byte = words * WORD + tl.arange(0, WORD)
        last = tl.load(source + byte, mask=byte < size, cache_modifier=".cv")
        tl.store(target + byte, last, mask=byte < size)


def copy_small(source: Tensor, target: Tensor) -> None:
    """Enqueue a copy of ``source`` to ``target``; one of them is in pinned host memory.

    A kernel copies at most ``BYTES_MAX`` bytes; the copy engine copies more, and rows that do not
    begin at whole words.

    Args:
        source: any shape and dtype.
        target: the same shape and dtype; rows of two dimensions may be strided.
    """
    device = target.device if target.is_cuda else source.device
    few = source.nbytes <= BYTES_MAX
    if few and _by_words(source) and _by_words(target) and _reaches_host_memory(device):
        copy_by_kernel(source, target)
    else:
        target.copy_(source, non_blocking=True)


def copy_by_kernel(source: Tensor, target: Tensor) -> None:
    """Launch the kernel of ``copy_small``, for tensors whose rows begin at whole words."""
    if not source.numel():
        return
    if source.is_contiguous() and target.is_contiguous():
        source, target = source.reshape(1, -1), target.reshape(1, -1)
    given, copied = source.view(torch.uint8), target.view(torch.uint8)
    rows, size = given.shape
    grid = (cdiv(max(1, size // WORD.value), BLOCK), rows)
    _copy[grid](given, copied, size, given.stride(0), copied.stride(0), BLOCK=BLOCK)


def _by_words(part: Tensor) -> bool:
    """Return whether every row of a tensor begins at a whole word."""
    if part.data_ptr() % WORD.value:
        return False
    strided = part.dim() == 2 and part.stride(1) == 1
    return part.is_contiguous() or (strided and part.stride(0) * part.itemsize % WORD.value == 0)


@cache
def _reaches_host_memory(device: torch.device) -> bool:
    """Return whether kernels of a device read and write pinned host memory, by one trial.

    The trial waits for the device, so the first copy must not be part of a captured graph.
    """
    given = torch.arange(256, dtype=torch.int32).pin_memory()
    found = torch.zeros_like(given).pin_memory()
    there = torch.zeros_like(given, device=device)
    try:
        copy_by_kernel(given, there)
        copy_by_kernel(there, found)
        torch.cuda.synchronize(device)
    except (ValueError, RuntimeError) as error:
        reason = str(error)
    else:
        if torch.equal(given, found):
            return True
        reason = "other values arrived"
    logging.getLogger("glowplug").warning(
        "small copies take the copy engine: kernels do not reach pinned memory (%s)", reason
    )
    return False

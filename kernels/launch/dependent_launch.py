"""Programmatic dependent launch (PDL): a kernel starts while the preceding kernel still runs.

It waits only before it reads results of that kernel. A kernel launched with ``options()`` first
calls ``begin``, then does work that needs no result of an earlier kernel (such as loading weights),
then calls ``wait`` before the first load or store of anything else. Every kernel launched in this
way must wait, because the next one relies on it.

NOTE: launch a kernel without ``options()`` right after a library kernel that itself uses PDL: the
last kernel of FlashMLA may return without having waited for the one that wrote its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def supported() -> bool:
    """Return whether the device supports PDL: Hopper and later, outside Triton's interpreter."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def options() -> Mapping[str, bool]:
    """Return the launch options for a kernel that calls ``begin`` and ``wait``.

    They include the kernel's ``DEPENDENT`` argument.
    """
    return {"DEPENDENT": True, "launch_pdl": True} if supported() else {"DEPENDENT": False}


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Allow the next kernel to start while this one runs; do nothing without ``DEPENDENT``."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait for the results of the preceding kernels; do nothing without ``DEPENDENT``."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def fetch(lines):
    """Prefetch the cache lines at ``lines`` (pointers) into L2 without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

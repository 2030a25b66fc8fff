"""Programmatic dependent launch: a kernel starts while the one before it drains, and waits only
where it reads.

A kernel launched with ``OPTIONS`` calls ``begin`` first of all, then whatever needs no result of an
earlier kernel (fetching weights), then ``wait`` before the first load or store of anything else.
Every kernel so launched has to wait: the next one relies on it.

NOTE: right behind a library's kernel that is launched so too, launch plainly: FlashMLA's last one
may return without having waited for the one that wrote its results.
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
    """On Hopper and later, outside the interpreter."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def options() -> Mapping[str, bool]:
    """Keyword arguments of a launch of a kernel that begins and waits as above; its ``DEPENDENT``
    among them.
    """
    return {"DEPENDENT": True, "launch_pdl": True} if supported() else {"DEPENDENT": False}


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_wait()


@triton.jit
def fetch(lines):
    """Ask for the cache lines at ``lines`` (pointers) to be brought into L2; nothing waits for
    them.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

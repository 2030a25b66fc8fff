"""Memory that the processes of one host share, and waits for changes in it.

A word has 64 bits: 32 bits of data and the 32-bit number of the exchange that it belongs to. A
reader accepts a word only with the number that it expects, so neither the order in which stores
become visible nor that of loads matters.

NOTE: this needs copies that move each aligned word of 64 bits whole, as those of numpy and libc do
on x86-64 and aarch64, and Linux's futex, which wakes readers that sleep.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.facts.machine import usable_cores

#: machine -> number of the system call ``futex``
FUTEX = {"x86_64": 202, "aarch64": 98}
WAIT, WAKE = 0, 1  #: operations of ``futex``
EVERY_WAITER = (1 << 31) - 1
FIRST = 8  #: number of the first exchange; memory that was never written has the number 0
NUMBERS = (1 << 32) - FIRST  #: exchanges after which their numbers repeat
Words = NDArray[np.uint64]


class _TimeSpec(ctypes.Structure):
    """struct timespec of libc."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def can_share(ranks: int) -> bool:
    """Return whether ``ranks`` processes of this machine gain by sharing words.

    They do not if they outnumber the cores: a rank that looks for words keeps the rank that is to
    write them from running (8 ranks on 2 cores: 500 to 800 us for a gather, over sockets 300).
    """
    known = platform.machine() in FUTEX and hasattr(os, "memfd_create")
    return known and usable_cores() > ranks


def make_memory(words: int) -> int:
    """Return the file descriptor of new shared memory, ``words`` words of zeros without a name."""
    file = os.memfd_create("glowplug-ranks")
    os.ftruncate(file, 8 * words)
    return file


class SharedWords:
    """Words in shared memory, mapped into this process.

    Args:
        file: file descriptor of the memory; it may be closed afterwards.
        words: number of words.

    Attributes:
        words: uint64 [words].
    """

    def __init__(self, file: int, words: int) -> None:
        self.words: Words = np.frombuffer(mmap.mmap(file, 8 * words), np.uint64)
        self._address = self.words.ctypes.data
        self._number = FUTEX[platform.machine()]
        self._syscall: Any = ctypes.CDLL(None).syscall

    def wake(self, word: int) -> None:
        """Wake every process that sleeps until the word changes."""
        self._syscall(self._number, ctypes.c_void_p(self._tag(word)), WAKE, EVERY_WAITER)

    def sleep(self, word: int, number: int, seconds: float) -> None:
        """Sleep until the word is written and woken, unless its number is not ``number`` any more.

        Args:
            word: index of the word.
            number: number of the word's exchange when it was read.
            seconds: longest sleep; it may end earlier.
        """
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(
            self._number,
            ctypes.c_void_p(self._tag(word)),
            WAIT,
            ctypes.c_uint32(number),
            ctypes.byref(limit),
            None,
            0,
        )

    def _tag(self, word: int) -> int:
        """Return the address of the number within a word."""
        return self._address + 8 * word + 4


def following(number: int) -> int:
    """Return the number of the exchange after that of ``number``."""
    return FIRST + (number + 1 - FIRST) % NUMBERS


def write(place: Words, data: NDArray[np.uint32], number: int) -> None:
    """Store ``data`` [N] in the words ``place`` [N], each with the exchange's ``number``."""
    words = np.empty((len(data), 2), np.uint32)
    words[:, 0] = data
    words[:, 1] = number
    place[:] = words.view(np.uint64)[:, 0]


def read(place: Words) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return (data, numbers) of the words ``place`` [..., N], each uint32 [..., N]."""
    halves = place.copy().view(np.uint32)
    return halves[..., 0::2], halves[..., 1::2]

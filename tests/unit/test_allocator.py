"""The page allocator hands each page out once, loses none and never hands out the scratch page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from glowplug.core.step.pages import SCRATCH_PAGE, PageAllocator


def test_every_page_but_the_scratch_page_is_handed_out_once() -> None:
    pages = PageAllocator(10)
    assert (pages.free, pages.total) == (9, 9)
    taken = pages.take(9)
    assert taken is not None and taken.dtype == np.int32
    assert sorted(taken.tolist()) == list(range(1, 10))
    assert SCRATCH_PAGE not in taken
    assert pages.take(1) is None and pages.free == 0
    nothing = pages.take(0)
    assert nothing is not None and len(nothing) == 0


def test_a_request_for_too_many_pages_takes_none() -> None:
    pages = PageAllocator(4)
    assert pages.take(4) is None
    assert pages.free == 3


def test_a_returned_array_belongs_to_the_caller() -> None:
    pages = PageAllocator(4)
    first = pages.take(3)
    assert first is not None
    kept = first.copy()
    pages.give(first)
    second = pages.take(2)
    assert second is not None
    second[:] = 0
    assert first.tolist() == kept.tolist()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([0], "not of this pool"),
        ([-1], "not of this pool"),
        ([8], "not of this pool"),
        ([7], "free already"),
        ([1, 1], "twice"),
    ],
)
def test_check_mode_refuses_wrong_frees(wrong: list[int], message: str) -> None:
    pages = PageAllocator(8)
    pages.give(np.array([], np.int32))
    taken = pages.take(6)
    assert taken is not None and sorted(taken.tolist()) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=message):
        pages.give(np.array(wrong, np.int32))
    assert pages.free == 1, "a refused call changes nothing"
    pages.give(taken)
    with pytest.raises(ValueError, match="free already"):
        pages.give(taken[:1])


def test_a_pool_of_only_the_scratch_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one more"):
        PageAllocator(1)


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(2, 40),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
    check=st.booleans(),
)
def test_random_operations_agree_with_a_set(
    size: int, actions: list[tuple[bool, int]], check: bool
) -> None:
    pages, held = PageAllocator(size, check=check), []
    for is_take, count in actions:
        if is_take:
            taken = pages.take(count)
            assert (taken is None) == (count > size - 1 - len(held))
            held += [] if taken is None else taken.tolist()
        else:
            pages.give(np.array(held[:count], np.int32))
            held = held[count:]
        assert len(set(held)) == len(held) and 0 not in held
        assert pages.free == size - 1 - len(held)

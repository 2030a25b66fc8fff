"""Switch points of measured layouts, and the fastest layout for a number of requests."""

from __future__ import annotations

import pytest

from glowplug.core.facts.layout_speed import compared, faster_from, fastest_size

#: size 2 is faster at 8 by chance, and then from 64 on; size 4 from 256 on, and most of all
SPEEDS = {
    1: {1: 100.0, 2: 90.0, 4: 80.0},
    8: {1: 400.0, 2: 401.0, 4: 300.0},
    32: {1: 900.0, 2: 880.0, 4: 700.0},
    64: {1: 1200.0, 2: 1300.0, 4: 1100.0},
    256: {1: 2000.0, 2: 2600.0, 4: 2800.0},
}


def test_a_size_is_faster_from_where_no_larger_number_is_slower() -> None:
    assert (faster_from(SPEEDS, 2), faster_from(SPEEDS, 4)) == (64, 256)
    assert faster_from({**SPEEDS, 512: {1: 2100.0, 2: 2100.0}}, 2) is None, "equal is not faster"
    assert faster_from({**SPEEDS, 512: {1: 2100.0, 2: 2100.0}}, 4) == 256, "it was not compared"
    assert faster_from({1: {1: 1.0, 2: 2.0}, 8: {1: 1.0, 2: 2.0}}, 2) == 1


def test_only_numbers_measured_in_both_layouts_are_compared() -> None:
    speeds = {16: {2: 5.0}, 4: {1: 1.0, 2: 2.0}, 8: {1: 9.0}, 2: {1: 1.0, 2: 2.0}}
    assert compared(speeds, 2) == [2, 4] and compared(speeds, 4) == []
    assert faster_from(speeds, 2) == 2 and faster_from(speeds, 4) is None


@pytest.mark.parametrize(
    ("requests", "size"), [(1, 1), (8, 1), (63, 1), (64, 2), (255, 2), (256, 4), (4096, 4)]
)
def test_the_fastest_size_has_its_switch_point_and_the_largest_gain(
    requests: int, size: int
) -> None:
    assert fastest_size(SPEEDS, requests) == size


def test_without_a_switch_point_the_size_is_one() -> None:
    assert fastest_size({}, 8) == 1
    assert fastest_size({8: {1: 2.0, 2: 1.0}}, 8) == 1

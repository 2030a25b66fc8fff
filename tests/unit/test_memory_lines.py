"""The GPU memory test's judgement of an engine's memory lines, on lines measured on an H200."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.test_gpu_memory import SMALL, Lines, lines_off, near

MIB = 1 << 20
# a model without a draft: its plan has no line of page states, though ranks measure one
GOOD = {
    "weights": (3186.0, 3188.5, None),
    "activations": (743.1, 743.9, 743.9),
    "logits": (502.0, 502.0, 502.0),
    "rotary tables": (8.0, 8.0, None),
    "sampling state": (200.0, 203.9, None),
    "cuda runtime": (736.0, 712.7, 714.7),
    "graphs": (488.4, 482.7, 460.0),
    "kv cache": (135031.9, 11166.0, None),
    "page states": (None, 0.0, None),
}


def lines(**changed: tuple[float | None, float | None, float | None]) -> Lines:
    def of(value: float | None) -> int | None:
        return None if value is None else int(value * MIB)

    found: dict[str, dict[str, Any]] = {}
    for name, (planned, measured, served) in {**GOOD, **changed}.items():
        found[name] = {"planned": of(planned), "measured": of(measured)}
        if served is not None:
            found[name]["served"] = of(served)
    return found


def off(alone: bool = True, first: bool = True, kv: float = 11166.0, **changed: Any) -> set[str]:
    return set(
        lines_off(
            lines(**{name.replace("_", " "): value for name, value in changed.items()}),
            int(kv * MIB),
            alone,
            first,
        )
    )


def test_a_missing_line_counts_as_zero() -> None:
    assert near(None, 0) and near(0, None) and near(None, None) and near(None, SMALL)
    assert not near(None, SMALL + 1) and not near(SMALL + 1, None)


def test_lines_within_the_bars_are_good() -> None:
    assert off() == set()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("weights", (3186.0, 3400.0, None), "weights"),
        ("activations", (743.1, 900.0, 900.0), "activations"),
        ("activations", (743.1, 743.9, 800.0), "activations, again"),
        ("page_states", (None, 40.0, None), "page states"),
        ("page_states", (40.0, None, None), "page states"),
        ("graphs", (488.4, 482.7, 560.0), "graphs"),
        ("graphs", (122.1, 120.1, 172.0), "graphs"),
        ("graphs", (122.1, 120.1, None), "graphs"),
        ("cuda_runtime", (736.0, 712.7, 800.0), "cuda runtime, served"),
    ],
)
def test_a_line_beyond_them_is_named(name: str, value: Any, told: str) -> None:
    assert off(**{name: value}) == {told}


def test_device_readings_are_judged_for_a_first_engine_alone() -> None:
    changed: dict[str, Any] = {"graphs": (488.4, 482.7, 0.0), "cuda_runtime": (736.0, 712.7, -71.3)}
    assert off(**changed) == {"graphs", "cuda runtime, served"}
    assert off(alone=False, **changed) == off(first=False, **changed) == set()
    assert off(kv=12000.0) == off(kv=12000.0, alone=False) == {"kv cache"}

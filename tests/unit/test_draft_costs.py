"""Tables of the seconds of a step for each size of its drafts."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.startup import draft_costs

CHAIN = DraftShape(1, 1, 2)
COSTS = DraftCosts(
    (
        ShapeCosts(NO_DRAFTS, (1, 4, 8), (1.0, 1.6, 2.0)),
        ShapeCosts(CHAIN, (2,), (3.0,)),
    )
)


def test_seconds_between_and_beyond_the_measured_rows() -> None:
    none, chain = COSTS.table((NO_DRAFTS, CHAIN), 12)
    assert none == pytest.approx([1.0, 1.0, 1.2, 1.4, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4])
    assert chain == [3.0] * 13


def test_seconds_do_not_fall_beyond_the_measured_rows() -> None:
    falling = ShapeCosts(CHAIN, (1, 2), (3.0, 2.0))
    assert falling.at(4) == 2.0


def test_a_file_holds_the_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"model": "any", **COSTS.to_json()}))
    assert DraftCosts.read(str(path)) == COSTS
    assert COSTS.lacking((NO_DRAFTS, DraftShape(3, 1, 4))) == [DraftShape(3, 1, 4)]
    with pytest.raises(KeyError):
        COSTS.table((DraftShape(3, 1, 4),), 2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no table of costs"),
        ("[]", "no table of costs"),
        ('{"draft_costs": [{"rows": [1]}]}', "no table of costs"),
        (json.dumps(DraftCosts((ShapeCosts(CHAIN, (), ()),)).to_json()), "has no rows"),
        (json.dumps(DraftCosts((ShapeCosts(CHAIN, (1,), (1.0, 2.0)),)).to_json()), "not one"),
        (json.dumps(DraftCosts((ShapeCosts(CHAIN, (2, 1), (1.0, 2.0)),)).to_json()), "ascend"),
        (json.dumps(DraftCosts((ShapeCosts(CHAIN, (0,), (1.0,)),)).to_json()), "ascend"),
        (json.dumps(DraftCosts((ShapeCosts(CHAIN, (1,), (0.0,)),)).to_json()), "positive"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(content: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftCosts.parse(content)


def test_the_first_step_of_a_size_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take many times as long as later ones, also when the time is over."""
    spent = [9.0, 8.0, 1.0, 2.0]  # seconds of the steps, both sizes in turn
    readings = accumulate([0.0, *(part for one in spent for part in (one, 0.0))])
    monkeypatch.setattr(draft_costs.time, "process_time", lambda: next(readings))
    monkeypatch.setattr(draft_costs, "_step", lambda *_: None)
    monkeypatch.setattr(draft_costs, "_launch", lambda *_: SimpleNamespace(wait=lambda: None))
    over: Any = SimpleNamespace(over=lambda: True)
    none: Any = None
    found = draft_costs._on_cpu(none, none, 4, (NO_DRAFTS, CHAIN), 6, over)
    assert found == [1.0, 2.0]

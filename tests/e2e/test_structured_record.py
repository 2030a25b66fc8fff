"""The programs of the record of structured output, on few tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from tests.e2e import structured_cost, structured_forced, structured_record


def recorded(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["record", "--out", str(out), *flags])
    structured_record.main()
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_a_third_run_repeats_the_text_of_the_masked_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run itself compares the tokens."""
    monkeypatch.setattr(structured_cost, "TOKENS", 12)
    monkeypatch.setattr(structured_cost, "BATCHES", (3,))
    out = tmp_path / "record.json"
    out.write_text('{"llguidance": {"hostile": 1}, "xgrammar": {"gaps": 2}}')
    record = recorded(monkeypatch, out, "--part", "cost", "--pairs", "2")
    part = record["llguidance"]
    assert record["xgrammar"] == {"gaps": 2} and part["hostile"] == 1  # type: ignore[index]
    (row,) = part["cost"]  # type: ignore[index]
    assert row["steps"] == {"without": 12, "with": 12, "repeated": 12}
    assert row["masked_steps"] == 2 * 12, "the third run has no grammar"
    assert row["share_of_steps_of_the_text"] > 0 and row["share_of_steps_of_the_masks"] > 0
    known = part["conditions"]["cost"]  # type: ignore[index]
    assert known.keys() >= {"commit", "date", "load", "packages"}
    assert "tests.e2e.structured_record" in known["command"] and known["packages"]["llguidance"]
    assert part["conditions"].keys() == {"cost"}  # type: ignore[index]


@pytest.mark.parametrize(
    "library", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)]
)
def test_forced_tokens_save_steps(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    monkeypatch.setattr(structured_forced, "TOKENS", 60)
    rows = structured_forced.forced(library, structured_record.DRAFTS["chain"], 2)
    assert [(row["schemas"], row["offered"]) for row in rows] == [
        ("mostly forced", False), ("mostly forced", True), ("random", False), ("random", True)
    ]  # fmt: skip
    without, offered = rows[:2]
    assert without["tokens"] == offered["tokens"] and offered["steps"] < without["steps"]

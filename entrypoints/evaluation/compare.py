"""Comparison of two results on the same questions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.evaluation.files import read_bytes
from glowplug.entrypoints.evaluation.questions import without_reasoning
from glowplug.entrypoints.evaluation.result import Record
from glowplug.entrypoints.evaluation.statistics import mcnemar

SAME_QUESTIONS = ("task", "questions_digest")  #: keys in which results of the same questions agree


def read_result(path: Path) -> Record:
    """Read a result file of an earlier run.

    Raises:
        ValueError: the file cannot be read or is no result.
    """
    try:
        found: Any = orjson.loads(read_bytes(path))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("first"), dict):
        found = found["first"]
    if not isinstance(found, dict) or not {"questions", *SAME_QUESTIONS} <= found.keys():
        raise ValueError(f"{path} is no result of `glowplug eval --output-file`")
    return found


def check_same_questions(first: Record, second: Record, path: Path) -> None:
    """Check that two results are of the same questions.

    Raises:
        ValueError: they are not.
    """
    for key in SAME_QUESTIONS:
        if first[key] != second[key]:
            raise ValueError(
                f"{path} has answers to other questions ({key} {second[key]}, here {first[key]}): "
                "use the same task, file and options"
            )


def compared(first: Record, second: Record) -> Record:
    """Return the comparison of two results over the questions that both have answered.

    ``same_text`` counts answers that are equal without their reasoning, which servers separate.
    ``p_value`` is that of McNemar's exact test; ``disagreements`` has every question that only one
    of the two answers rightly.
    """
    others = {one["name"]: one for one in second["questions"]}
    pairs = [(one, others[one["name"]]) for one in first["questions"] if one["name"] in others]
    counts = Counter((a["correct"], b["correct"]) for a, b in pairs)
    first_only = counts[True, False]
    second_only = counts[False, True]
    count = len(pairs)
    return {
        "compared": count,
        "both": counts[True, True],
        "first_only": first_only,
        "second_only": second_only,
        "neither": counts[False, False],
        "same_text": sum(
            without_reasoning(a["text"]) == without_reasoning(b["text"]) for a, b in pairs
        ),
        "difference": (second_only - first_only) / count if count else 0.0,
        "p_value": mcnemar(first_only, second_only),
        "disagreements": [_disagreement(a, b) for a, b in pairs if a["correct"] != b["correct"]],
    }


def _disagreement(first: Record, second: Record) -> Record:
    """Return the answers of both engines to a question that one of them answers rightly."""
    return {
        "name": first["name"],
        "expected": first["expected"],
        "right": "first" if first["correct"] else "second",
        "first": _value(first),
        "second": _value(second),
    }


def _value(one: Record) -> str:
    """Return the value of an answer, or the reason why it has none in parentheses."""
    return f"({one['invalid']})" if one["value"] is None else str(one["value"])

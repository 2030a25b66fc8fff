"""The result of a run: grades, accuracy with its interval, invalid answers, speed."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from glowplug import __version__
from glowplug.entrypoints.evaluation.questions import Answer, EvalTask, Question
from glowplug.entrypoints.evaluation.statistics import CONFIDENCE, wilson

SCHEMA_VERSION = 1

Record = dict[str, Any]


def graded(task: EvalTask, question: Question, answer: Answer) -> Record:
    """Return the record of one answered question.

    An answer without a value is invalid: it counts as wrong, with its reason.
    """
    value = None
    correct = False
    reason = answer.error
    if not reason:
        grade = task.grade(question, answer.text)
        value = grade.value
        correct = grade.correct
        reason = "" if value is not None else "no value in the answer"
    return {
        "name": question.name,
        "groups": list(question.groups),
        "expected": question.expected,
        "value": value,
        "correct": correct,
        "invalid": reason,
        "failed": bool(answer.error),
        "output_tokens": answer.output_tokens,
        "seconds": round(answer.seconds, 4),
        "text": answer.text,
    }


def summary(records: Sequence[Record]) -> Record:
    """Return accuracy, interval and share of invalid answers of graded questions."""
    count = len(records)
    hits = sum(one["correct"] for one in records)
    low, high = wilson(hits, count)
    invalid = sum(bool(one["invalid"]) for one in records)
    return {
        "answered": count,
        "correct": hits,
        "accuracy": hits / count if count else 0.0,
        "interval": [low, high],
        "invalid": invalid,
        "invalid_rate": invalid / count if count else 0.0,
    }


def result(
    task: EvalTask,
    settings: Mapping[str, Any],
    questions: Sequence[Question],
    answers: Mapping[int, Answer],
    engine: tuple[str, str],
    seconds: float,
) -> Record:
    """Return the result of a run, complete or interrupted.

    Args:
        task: the task.
        settings: settings of the run.
        questions: the questions.
        answers: the answers by the index of their question.
        engine: label of the engine and name of its model.
        seconds: duration of the run.
    """
    records = [graded(task, questions[index], answers[index]) for index in sorted(answers)]
    groups = sorted({group for one in records for group in one["groups"]})
    return {
        "schema_version": SCHEMA_VERSION,
        "glowplug": __version__,
        "python": platform.python_version(),
        "task": task.name,
        "engine": engine[0],
        "model": engine[1],
        **settings,
        "num_questions": len(questions),
        "questions_digest": digest(questions),
        "interrupted": len(answers) < len(questions),
        "confidence": CONFIDENCE,
        **summary(records),
        **speed(records, seconds),
        "groups": {
            group: summary([one for one in records if group in one["groups"]]) for group in groups
        },
        "reasons": dict(Counter(one["invalid"] for one in records if one["invalid"]).most_common()),
        "questions": records,
    }


def speed(records: Sequence[Record], seconds: float) -> Record:
    """Return latency and throughput of a run of ``seconds``, and the number of failed requests."""
    tokens = sum(one["output_tokens"] for one in records)
    times = [one["seconds"] for one in records]
    return {
        "failed": sum(one["failed"] for one in records),
        "latency": seconds,
        "mean_question_latency": sum(times) / len(times) if times else 0.0,
        "output_tokens": tokens,
        "output_throughput": tokens / seconds if seconds else 0.0,
    }


def digest(questions: Sequence[Question]) -> str:
    """Return a digest of the questions' prompts and expected answers."""
    total = hashlib.blake2b(digest_size=8)
    for one in questions:
        total.update(repr((one.name, one.prompt, one.expected, one.rule)).encode())
    return total.hexdigest()

"""``glowplug eval tasks``: chat questions with one exact answer each.

By default these are the 500 held-out tasks of the embedded model, whose card states its scores. A
file of one's own has a line ``{"question", "answer"}`` for each question, with an optional "kind"
(for which a score of its own is reported) and "think" (true: the question is asked with
``thinking`` in the chat template, and the answer must close its reasoning).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glowplug.core.facts.model_folder import embedded_path
from glowplug.entrypoints.evaluation.files import read_lines
from glowplug.entrypoints.evaluation.questions import (
    EvalTask,
    Grade,
    Options,
    Question,
    add_answer_options,
    positive,
    without_reasoning,
)

THINK_GROUP = "think form"  #: group of the questions that are asked with ``thinking``
CLOSED = "closed"  #: rule: the answer counts only behind a closed reasoning text


def held_out_path() -> Path:
    """Return the file of the embedded model's held-out tasks."""
    return embedded_path().parent / "held_out.jsonl"


def configure(group: Any) -> None:
    """Add the task's options."""
    group.add_argument(
        "--data-path",
        type=Path,
        metavar="FILE",
        help="questions: JSON lines with question, answer, kind and think; default: the embedded "
        "model's held-out tasks",
    )
    group.add_argument(
        "--num-questions", type=positive, help="questions of the file to use; default: all"
    )
    add_answer_options(group, 200)


def questions(args: Options) -> list[Question]:
    """Read the questions.

    Raises:
        ValueError: the file is missing or malformed.
    """
    path = args.data_path or held_out_path()
    found = []
    for number, (place, one) in enumerate(read_lines(path, ("question", "answer"))):
        think = one.get("think", False)
        if not isinstance(think, bool) or not isinstance(one.get("kind", ""), str):
            raise ValueError(f'{place}: "think" must be a truth value and "kind" a text')
        found.append(
            Question(
                name=str(number),
                prompt=one["question"],
                expected=one["answer"],
                groups=tuple(filter(None, (one.get("kind", ""), THINK_GROUP if think else ""))),
                max_tokens=args.max_new_tokens,
                chat=True,
                template={"thinking": True} if think else {},
                rule=CLOSED if think else "",
            )
        )
    return found[: args.num_questions]


def grade(question: Question, text: str) -> Grade:
    """Compare the answer, without reasoning, with the expected text.

    An empty answer is invalid, and so is one that begins to reason and never ends.
    """
    if question.rule == CLOSED and "</think>" not in text:
        return Grade(None)
    found = without_reasoning(text)
    return Grade(found, found == question.expected) if found else Grade(None)


def describe(args: Options) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "data_path": "embedded" if args.data_path is None else str(args.data_path),
        "chat": True,
        "max_new_tokens": args.max_new_tokens,
    }


TASK = EvalTask(
    "tasks",
    "chat questions with one exact answer; default: the embedded model's held-out tasks",
    configure,
    questions,
    grade,
    describe,
)

"""``glowplug eval gsm8k``: grade-school mathematics with worked examples in the prompt.

The prompt and the grading are those of SGLang's ``bench_gsm8k`` and ``few_shot_gsm8k``: the last
number of the answer counts. The file has the published format, a line ``{"question", "answer"}``
for each question, whose answer ends with ``#### NUMBER``.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from glowplug.entrypoints.evaluation.files import read_lines
from glowplug.entrypoints.evaluation.questions import (
    EvalTask,
    Grade,
    Options,
    Question,
    add_answer_options,
    not_negative,
    positive,
    without_reasoning,
)

STOP = ("Question", "Assistant:", "<|separator|>")  #: beginnings of text after the answer
#: a number; its commas have been removed. A minus sign after a digit is a subtraction's
NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
MARK = "####"  #: mark in front of the expected number


def configure(group: Any) -> None:
    """Add the task's options."""
    group.add_argument(
        "--data-path",
        type=Path,
        required=True,
        metavar="FILE",
        help="questions: JSON lines with question and answer, as published (test.jsonl)",
    )
    group.add_argument(
        "--shots-path",
        type=Path,
        metavar="FILE",
        help="file of the worked examples, for example the published train.jsonl; default: the "
        "first lines of --data-path, which are questions too, as in the published benchmark",
    )
    group.add_argument(
        "--num-questions", type=positive, default=200, help="questions of the file to use"
    )
    group.add_argument("--num-shots", type=not_negative, default=5, help="worked examples")
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="send the prompt as a user's message over chat completions",
    )
    add_answer_options(group, 512)


def questions(args: Options) -> list[Question]:
    """Read the questions and put the worked examples in front of each.

    Raises:
        ValueError: a file is missing or malformed, or has too few examples.
    """
    lines = read_lines(args.data_path, ("question", "answer"))
    source = args.shots_path or args.data_path
    shots = read_lines(args.shots_path, ("question", "answer")) if args.shots_path else lines
    if len(shots) < args.num_shots:
        raise ValueError(f"{source} has {len(shots)} lines, --num-shots is {args.num_shots}")
    examples = "".join(
        f"Question: {one['question']}\nAnswer: {one['answer']}\n\n"
        for _, one in shots[: args.num_shots]
    )
    return [
        Question(
            name=str(number),
            prompt=f"{examples}Question: {one['question']}\nAnswer:",
            expected=expected_number(one["answer"], place),
            max_tokens=args.max_new_tokens,
            stop=STOP,
            chat=args.apply_chat_template,
        )
        for number, (place, one) in enumerate(lines[: args.num_questions])
    ]


def expected_number(answer: str, place: str) -> str:
    """Return the number behind ``####`` in a published answer.

    Raises:
        ValueError: there is none; the message begins with ``place``.
    """
    _, mark, text = answer.rpartition(MARK)
    found = last_number(text) if mark else None
    if found is None:
        raise ValueError(f"{place}: the answer does not end with '{MARK} NUMBER'")
    return found


def last_number(text: str) -> str | None:
    """Return the last number in ``text``, without commas; None if there is none."""
    found = NUMBER.findall(text.replace(",", ""))
    return found[-1] if found else None


def grade(question: Question, text: str) -> Grade:
    """Compare the last number of the answer with the expected one, by value."""
    found = last_number(without_reasoning(text))
    if found is None:
        return Grade(None)
    return Grade(found, Decimal(found) == Decimal(question.expected))


def describe(args: Options) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "data_path": str(args.data_path),
        "num_shots": args.num_shots,
        "shots_among_questions": args.shots_path is None and args.num_shots > 0,
        "chat": args.apply_chat_template,
        "max_new_tokens": args.max_new_tokens,
    }


TASK = EvalTask(
    "gsm8k",
    "grade-school mathematics with worked examples (bench_gsm8k)",
    configure,
    questions,
    grade,
    describe,
)

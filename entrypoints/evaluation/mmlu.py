"""``glowplug eval mmlu``: questions with four choices on many subjects.

The folder has the published layout: ``dev/SUBJECT_dev.csv`` with the examples and
``test/SUBJECT_test.csv`` with the questions, without header: question, A, B, C, D, right letter.
Prompts are those of the published evaluation.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from glowplug.entrypoints.evaluation.files import read_bytes
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

LETTERS = "ABCD"
CHOICE = re.compile(r"\b([ABCD])\b")  #: a letter that stands alone


def configure(group: Any) -> None:
    """Add the task's options."""
    group.add_argument(
        "--data-path",
        "--data-dir",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder with dev/*_dev.csv and test/*_test.csv, as published",
    )
    group.add_argument(
        "--ntrain", "--num-shots", type=not_negative, default=5, help="worked examples (dev)"
    )
    group.add_argument("--nsub", type=positive, help="subjects to use, in order; default: all")
    group.add_argument("--subjects", nargs="+", metavar="NAME", help="use only these subjects")
    group.add_argument(
        "--num-questions", type=positive, help="questions of each subject; default: all"
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="send the prompt as a user's message over chat completions",
    )
    add_answer_options(group, 1)


def questions(args: Options) -> list[Question]:
    """Read the questions of all chosen subjects.

    Raises:
        ValueError: a file or subject is missing, or a line is malformed.
    """
    found: list[Question] = []
    for subject in _subjects(args):
        examples = read_csv(args.data_path / "dev" / f"{subject}_dev.csv") if args.ntrain else []
        if len(examples) < args.ntrain:
            raise ValueError(
                f"{args.data_path / 'dev' / f'{subject}_dev.csv'} has {len(examples)} lines, "
                f"--ntrain is {args.ntrain}"
            )
        head = (
            "The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n"
        ) + "".join(f"{shown(row)} {row[5]}\n\n" for row in examples[: args.ntrain])
        rows = read_csv(args.data_path / "test" / f"{subject}_test.csv")
        found += [
            Question(
                name=f"{subject}/{number}",
                prompt=head + shown(row),
                expected=row[5],
                groups=(subject,),
                max_tokens=args.max_new_tokens,
                chat=args.apply_chat_template,
            )
            for number, row in enumerate(rows[: args.num_questions])
        ]
    return found


def _subjects(args: Options) -> list[str]:
    """Return the names of the chosen subjects, in order.

    Raises:
        ValueError: the folder has no questions, or not those of a chosen subject.
    """
    folder = args.data_path / "test"
    known = sorted(path.name.removesuffix("_test.csv") for path in folder.glob("*_test.csv"))
    if not known:
        raise ValueError(f"{folder} has no files named SUBJECT_test.csv")
    unknown = sorted(set(args.subjects or ()) - set(known))
    if unknown:
        raise ValueError(f"{folder} has no subject {unknown[0]!r}; it has: {', '.join(known)}")
    chosen = [name for name in known if args.subjects is None or name in args.subjects]
    return chosen[: args.nsub]


def read_csv(path: Path) -> list[list[str]]:
    """Read the rows of a subject's file: question, four choices and the right letter.

    Raises:
        ValueError: the file cannot be read, or a row is malformed.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    rows = []
    reader = csv.reader(io.StringIO(text, newline=""))
    for row in reader:
        if not row:
            continue
        place = f"{path}:{reader.line_num}"
        if len(row) != 6:
            raise ValueError(f"{place}: {len(row)} columns, not question, A, B, C, D, answer")
        row[5] = row[5].strip()
        if row[5] not in tuple(LETTERS):
            raise ValueError(f"{place}: the answer is {row[5]!r}, not one of A, B, C, D")
        rows.append(row)
    return rows


def shown(row: list[str]) -> str:
    """Return a question with its choices as text that ends with ``Answer:``."""
    choices = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, row[1:5]))
    return f"{row[0]}{choices}\nAnswer:"


def grade(question: Question, text: str) -> Grade:
    """Compare the first letter of the answer that stands alone with the expected one."""
    found = CHOICE.search(without_reasoning(text))
    if found is None:
        return Grade(None)
    return Grade(found[1], found[1] == question.expected)


def describe(args: Options) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "data_path": str(args.data_path),
        "num_shots": args.ntrain,
        "chat": args.apply_chat_template,
        "max_new_tokens": args.max_new_tokens,
    }


TASK = EvalTask(
    "mmlu",
    "questions with four choices on many subjects",
    configure,
    questions,
    grade,
    describe,
)

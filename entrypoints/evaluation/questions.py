"""A task of ``glowplug eval``: its questions, the answers, and their grades."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question of a task.

    Attributes:
        name: the question's name in results, unique in its task.
        prompt: text of the prompt, or of the user's message.
        expected: the right answer; its form depends on the task.
        groups: subjects or kinds, for each of which an accuracy of its own is reported.
        max_tokens: most tokens of the answer.
        stop: strings that end the answer.
        chat: True: the prompt is sent as a user's message, with the model's chat template.
        template: keywords of the chat template.
        rule: the task's own way to compare the answer; "": its only one.
    """

    name: str
    prompt: str
    expected: str
    groups: tuple[str, ...] = ()
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    chat: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        text: the generated text.
        output_tokens: number of generated tokens.
        seconds: time from the request to the end of the answer.
        error: reason why there is no answer; "" if there is one.
    """

    text: str = ""
    output_tokens: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Grade:
    """The grade of one answer.

    Attributes:
        value: the value found in the answer; None: it has none, so the answer is invalid.
        correct: True: the value is the expected one.
    """

    value: str | None
    correct: bool = False


Options = argparse.Namespace


@dataclass(frozen=True)
class EvalTask:
    """A set of questions with the rules of their grading.

    Attributes:
        name: name of the sub-command.
        summary: one line for ``--help``.
        configure: function that adds the task's options to an argument group.
        questions: function that reads the questions which the options choose.
        grade: function that grades the text of an answer.
        describe: function that returns the task's settings for the result.
    """

    name: str
    summary: str
    configure: Callable[[Any], None]
    questions: Callable[[Options], list[Question]]
    grade: Callable[[Question, str], Grade]
    describe: Callable[[Options], dict[str, Any]]


def add_answer_options(group: Any, max_tokens: int) -> None:
    """Add the options that all tasks have for their answers.

    Args:
        group: an argument group.
        max_tokens: default of ``--max-new-tokens``.
    """
    group.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=positive,
        default=max_tokens,
        help=f"most tokens of an answer; default: {max_tokens}",
    )


def positive(text: str) -> int:
    """Parse a positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def not_negative(text: str) -> int:
    """Parse a number that is not negative."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def without_reasoning(text: str) -> str:
    """Return the text after ``</think>``, or all of it, without surrounding white space."""
    return text.rpartition("</think>")[2].strip()

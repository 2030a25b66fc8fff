"""``glowplug eval golden``: a few prompts whose answers show a damaged or imprecise model.

The best known one is the character composed of 木 and 乞: DeepSeek-R1 fails it when its weights or
activations are too coarse. A file is a list of objects with "prompt", "expect" (a list of texts,
any of which is right) and an optional "match": "contains" (the default), "exact" or "regex".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.evaluation.files import checked, read_bytes
from glowplug.entrypoints.evaluation.questions import (
    EvalTask,
    Grade,
    Options,
    Question,
    add_answer_options,
    without_reasoning,
)

DEFAULT = Path(__file__).with_name("golden.json")
MATCHES = ("contains", "exact", "regex")


def configure(group: Any) -> None:
    """Add the task's options."""
    group.add_argument(
        "--data-path",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help="prompts and expected answers as JSON; default: the list that ships with glowplug",
    )
    group.add_argument(
        "--thinking",
        action="store_true",
        help="set `thinking` and `enable_thinking` in the chat template",
    )
    add_answer_options(group, 2048)


def questions(args: Options) -> list[Question]:
    """Read the prompts.

    Raises:
        ValueError: the file is missing or malformed.
    """
    template = {"thinking": True, "enable_thinking": True} if args.thinking else {}
    found = []
    for number, one in enumerate(_entries(args.data_path)):
        place = f"{args.data_path}, entry {number}"
        checked(one, ("prompt",), place)
        rule = one.get("match", "contains")
        if rule not in MATCHES:
            raise ValueError(f'{place}: "match" is {rule!r}, not one of {", ".join(MATCHES)}')
        found.append(
            Question(
                name=str(one.get("name", number)),
                prompt=one["prompt"],
                expected=json.dumps(_expected(one, rule, place), ensure_ascii=False),
                max_tokens=args.max_new_tokens,
                chat=True,
                template=template,
                rule=rule,
            )
        )
    if len({question.name for question in found}) < len(found):
        raise ValueError(f'{args.data_path}: two entries have the same "name"')
    return found


def _entries(path: Path) -> list[Any]:
    try:
        value = orjson.loads(read_bytes(path))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path} must be a JSON list of prompts")
    return value


def _expected(entry: dict[str, Any], rule: str, place: str) -> list[str]:
    """Return the expected answers of an entry.

    Raises:
        ValueError: they are no texts, or no regular expressions although the rule requires them.
    """
    found = entry.get("expect")
    if not isinstance(found, list) or not found or not all(isinstance(x, str) and x for x in found):
        raise ValueError(f'{place}: "expect" must be a list of texts')
    for pattern in found if rule == "regex" else ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{place}: {pattern!r} is no regular expression: {error}") from None
    return found


def grade(question: Question, text: str) -> Grade:
    """Compare the answer, without reasoning, with the expected ones."""
    found = without_reasoning(text)
    if not found:
        return Grade(None)
    expected: list[str] = json.loads(question.expected)
    if question.rule == "exact":
        return Grade(found, found in expected)
    if question.rule == "regex":
        return Grade(found, any(re.search(pattern, found) for pattern in expected))
    return Grade(found, any(part in found for part in expected))


def describe(args: Options) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "data_path": str(args.data_path.name if args.data_path == DEFAULT else args.data_path),
        "chat": True,
        "thinking": args.thinking,
        "max_new_tokens": args.max_new_tokens,
    }


TASK = EvalTask(
    "golden",
    "prompts whose answers show a damaged or imprecise model, and a file of such answers",
    configure,
    questions,
    grade,
    describe,
)

"""Answers with tool calls, written in each published format, and their parsed form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from glowplug.core.step.tools import Tool
from glowplug.core.testing.suites.parser import Case

Call = tuple[str, dict[str, Any]]

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
WRITE = Tool("write_file", "Write a file", {"type": "object"})
TIME = Tool("time-now.utc", "The time")
TOOLS = (WEATHER, WRITE, TIME)

PARIS: Call = ("get_weather", {"city": "Paris", "days": 3})
CHINESE: Call = ("get_weather", {"city": "北京 🗼 é"})
NESTED: Call = (
    "write_file",
    {"path": "a/b.json", "data": {"list": [1, [2.5, {"x": None}], []], "on": True, "{": "}]"}},
)
QUOTES: Call = (
    "write_file",
    {"text": 'say "hi" \\ back\\\\slash\n\ttab {[<', "more": 'ends with a backslash \\"'},
)
SHELL: Call = ("write_file", {"text": "make test 2>&1 | tee <log> && echo '</done>'"})
EMPTY: Call = ("time-now.utc", {})

#: text before the calls, the calls, text after them
DIALOGUES: Sequence[tuple[str, Sequence[Call], str]] = (
    ("", [PARIS], ""),
    ("Let me look.\n\n", [PARIS], ""),
    ("", [EMPTY], ""),
    ("", [PARIS, CHINESE, NESTED], ""),
    ("I write: < and <t and {", [QUOTES, EMPTY], "\nDone, 東京."),
    ("", [SHELL, NESTED], ""),
)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def deepseek_v3(calls: Sequence[Call]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
            for name, given in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def deepseek_v31(calls: Sequence[Call]) -> str:
    return (
        "<｜tool▁calls▁begin｜>"
        + "".join(
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(given)}<｜tool▁call▁end｜>"
            for name, given in calls
        )
        + "<｜tool▁calls▁end｜>"
    )


def kimi_k2(calls: Sequence[Call]) -> str:
    return (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumped(given)}"
            "<|tool_call_end|>"
            for i, (name, given) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    )


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {dumped(given)}}}\n</tool_call>'
        for name, given in calls
    )


def llama3_json(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(
        f'{{"name": "{name}", "parameters": {dumped(given)}}}' for name, given in calls
    )


def pythonic(calls: Sequence[Call], shown: Callable[[Any], str] = repr) -> str:
    inner = ", ".join(
        f"{name}({', '.join(f'{key}={shown(value)}' for key, value in given.items())})"
        for name, given in calls
    )
    return f"[{inner}]"


def dsml(element: str, space: str = "") -> Callable[[Sequence[Call]], str]:
    """Return the writer of a version of DSML."""
    mark = f"｜DSML｜{space}"

    def parameter(name: str, value: Any) -> str:
        text = isinstance(value, str)
        kind = "true" if text else "false"
        shown = value if text else dumped(value)
        return f'<{mark}parameter name="{name}" string="{kind}">{shown}</{mark}parameter>\n'

    def write(calls: Sequence[Call]) -> str:
        inner = "".join(
            f'<{mark}invoke name="{name}">\n'
            + "".join(parameter(*one) for one in given.items())
            + f"</{mark}invoke>\n"
            for name, given in calls
        )
        return f"<{mark}{element}>\n{inner}</{mark}{element}>"

    return write


def cases(
    write: Callable[[Sequence[Call]], str], numbered: int | None = None, after: bool = True
) -> list[Case]:
    """Return the dialogues in a format.

    Args:
        write: function that writes calls in the format.
        numbered: number of earlier calls, for ids with a number; None: the format has no ids.
        after: text may follow the calls.
    """
    found = []
    for before, calls, behind in DIALOGUES:
        behind = behind if after else ""
        parts = [("content", before.rstrip())] if before else []
        for i, (name, given) in enumerate(calls):
            head = "" if numbered is None else f"functions.{name}:{numbered + i} "
            parts.append(("tool_call", f"{head}{name} {dumped(given)}"))
        if behind:
            parts.append(("content", behind.lstrip()))
        text = before + write(calls) + behind
        found.append(Case(text, parts, tools=TOOLS, earlier_calls=numbered or 0))
    return found

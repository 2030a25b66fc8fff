"""Results as text: one table, wrong answers, and the comparison."""

from __future__ import annotations

from glowplug.entrypoints.bench.others.report import table
from glowplug.entrypoints.evaluation.result import Record

COLUMNS = ("", "questions", "accuracy", "interval", "invalid", "invalid rate")
SHOWN_CHARACTERS = 60  #: most characters of a value in a table


def result_text(result: Record, show: int) -> str:
    """Return a result as text, with at most ``show`` wrong answers."""
    lines = [
        f"{result['task']}: {result['engine']}, model {result['model']}",
        _accuracies(result),
        f"Latency: {result['latency']:.3f} s, mean of a question: "
        f"{result['mean_question_latency']:.3f} s",
        f"Output throughput: {result['output_throughput']:.3f} token/s "
        f"({result['output_tokens']} tokens)",
    ]
    if result["interrupted"]:
        missing = result["num_questions"] - result["answered"]
        lines.append(f"Interrupted: {missing} of {result['num_questions']} questions unanswered")
    for reason, count in result["reasons"].items():
        lines.append(f"Invalid: {count} x {shortened(reason, 4 * SHOWN_CHARACTERS)}")
    wrong = [one for one in result["questions"] if not one["correct"] and not one["invalid"]]
    if wrong and show > 0:
        lines += [f"Wrong: {len(wrong)}", _wrong_answers(wrong[:show])]
    return "\n".join(lines)


def _accuracies(result: Record) -> str:
    """Return the table of the accuracies, of all questions and of each group."""
    groups = result["groups"] if len(result["groups"]) > 1 else {}
    rows = [_row("all", result), *(_row(name, one) for name, one in groups.items())]
    return table(COLUMNS, rows)


def _wrong_answers(wrong: list[Record]) -> str:
    """Return the table of some wrong answers."""
    rows = [[one["name"], shortened(one["expected"]), shortened(one["value"])] for one in wrong]
    return table(("question", "expected", "answer"), rows)


def comparison_text(comparison: Record, first: str, second: str) -> str:
    """Return a comparison as text; ``first`` and ``second`` are the labels of the engines."""
    one = comparison
    lines = [
        f"First: {first}",
        f"Second: {second}",
        f"Both right {one['both']}, only the first {one['first_only']}, only the second "
        f"{one['second_only']}, neither {one['neither']}; the same text {one['same_text']} of "
        f"{one['compared']}",
        f"Accuracy of the second minus the first: {100 * one['difference']:+.2f} points, "
        f"p = {one['p_value']:.4f} (McNemar's exact test)",
    ]
    if one["disagreements"]:
        rows = [
            [
                each["name"],
                shortened(each["expected"]),
                shortened(each["first"]),
                shortened(each["second"]),
                each["right"],
            ]
            for each in one["disagreements"]
        ]
        lines.append(table(("question", "expected", "first", "second", "right"), rows))
    return "\n".join(lines)


def _row(name: str, one: Record) -> list[object]:
    low, high = one["interval"]
    return [
        name,
        one["answered"],
        one["accuracy"],
        f"{low:.3f}-{high:.3f}",
        one["invalid"],
        one["invalid_rate"],
    ]


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Return ``text`` as one line of at most ``most`` characters, without column marks."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= most else line[: most - 3] + "..."

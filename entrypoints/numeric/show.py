"""The report of ``glowplug check --numeric`` as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from glowplug.entrypoints.bench.others.report import table
from glowplug.entrypoints.numeric.measure import NumericReport, PartError

COLUMNS = ("part", "prefill", "decode", "permitted", "share of permitted", "drift", "")


def as_text(report: NumericReport) -> str:
    """Return the report as a table with a verdict."""
    allowed = report.tolerance
    rows = [_row(part) for part in report.parts]
    return "\n".join(
        [
            f"{report.prompts} sequences of {report.tokens} tokens against the float32 reference; "
            f"{allowed.reason}",
            table(COLUMNS, rows),
            f"Logits: max error {report.max_error:.3g}, KL {report.kl:.2g} nats (median; largest "
            f"{report.kl_max:.2g}; permitted {allowed.kl:.2g}), the same best token in "
            f"{report.top1:.1%}",
            f"Served tokens: log-probabilities differ by {report.served_error:.2g} (median; "
            f"permitted {report.served_tolerance:.2g})",
            *(f"FAILED: {failure}" for failure in report.failures),
            *(["passed"] if not report.failures else []),
        ]
    )


def _row(part: PartError) -> list[object]:
    numbers = (f"{number:.2e}" for number in (part.prefill, part.decode, part.permitted))
    verdict = "" if part.passes else "differs"
    return [part.part, *numbers, f"{part.ratio:.2f}", f"{part.drift:.2e}", verdict]


def as_json(report: NumericReport) -> dict[str, Any]:
    """Return the report as a JSON object."""
    first = report.first
    return {
        **asdict(report),
        "first_difference": None if first is None else first.part,
        "passed": not report.failures,
    }

"""``glowplug ablate``: techniques on and off as a table, a fresh engine for each row.

Rows are one change at a time from the engine's configuration (``--mode one-at-a-time``), every
combination (``--mode grid``), or the lines of a file (``--row-file``). Every row is planned first;
a refused one has its reasons in place of numbers. The others run one after another, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.model_folder import EMBEDDED
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.bench.ablation import record, tables
from glowplug.entrypoints.bench.ablation.load import AblationLoad
from glowplug.entrypoints.bench.ablation.planning import PlannedRow, base_config, plan_rows
from glowplug.entrypoints.bench.ablation.rows import (
    Settings,
    grid,
    label,
    one_at_a_time,
    parse_vary,
    read_rows,
    selected,
)
from glowplug.entrypoints.bench.ablation.runner import TIME_LIMIT, run_row
from glowplug.entrypoints.bench.ablation.techniques import TECHNIQUES, compared_values
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.bench.plots.drawing import MissingMatplotlib, draw_record
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

MODES = {"one-at-a-time": one_at_a_time, "grid": grid}


def configure(parser: argparse.ArgumentParser) -> None:
    _add_rows(parser.add_argument_group("rows"))
    _add_load(parser.add_argument_group("load"))
    _add_run(parser.add_argument_group("run"))
    add_engine_options(parser)


def _add_rows(group: Any) -> None:
    names = ", ".join(one.name for one in TECHNIQUES)
    group.add_argument(
        "--vary",
        nargs="+",
        default=None,
        metavar="TECHNIQUE[=VALUE,..]",
        help=f"techniques to compare: {names}, or a configuration field with a dot; default: all "
        "techniques with their own values",
    )
    group.add_argument(
        "--mode",
        choices=tuple(MODES),
        default="one-at-a-time",
        help="one-at-a-time: the engine's configuration, then a row for each value alone; grid: "
        "every combination of the values",
    )
    group.add_argument(
        "--row-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="rows instead of --vary: one a line, such as `graphs=off nextn=1`, or `base`",
    )
    group.add_argument(
        "--rows",
        default=None,
        metavar="NUMBERS",
        help="measure only these rows, such as 1-4,7 (--dry-run shows the numbers)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--input-len", type=int, default=None, help="tokens of random prompts; default: texts"
    )
    group.add_argument(
        "--shared-len",
        type=int,
        default=0,
        help="leading tokens that random prompts have in common",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        default=None,
        metavar="FILE",
        help='JSON lines with {"prompt": text}; default: short built-in questions',
    )
    group.add_argument("--output-len", type=int, default=128, help="most output tokens")
    group.add_argument(
        "--queries", type=int, default=6, help="single queries; 0: no table of single queries"
    )
    group.add_argument("--repeat", type=int, default=3, help="rounds over the single queries")
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="*",
        default=[1, 8, 32],
        help="requests in flight, the columns of the throughput table; without a value: none",
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        default=None,
        help="requests at each concurrency; default: twice as many",
    )


def _add_run(group: Any) -> None:
    group.add_argument(
        "--output-file",
        type=Path,
        default=Path("ablation.json"),
        metavar="FILE",
        help="JSON; the tables (.md) and the chart (.svg) have the same name. Results that it "
        "has already are not measured again",
    )
    group.add_argument(
        "--time-limit",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="most seconds of a row, after which it has failed",
    )
    group.add_argument(
        "--max-minutes",
        type=float,
        default=None,
        help="minutes after which no more rows are measured; the same command continues later",
    )
    group.add_argument("--retry-failed", action="store_true", help="measure failed rows again")
    group.add_argument(
        "--dry-run", action="store_true", help="print the plan or the refusal of each row only"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the rows and write the tables.

    Returns:
        Exit status 0; 1 if a row failed (its cells have the reason); 2 if the options or all rows
            are refused.
    """
    try:
        ablation = Ablation(args)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug ablate: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        ablation.show_plans()
        return 0
    return ablation.run()


def _load(args: argparse.Namespace) -> AblationLoad:
    """Return the requests that the options describe.

    Raises:
        ValueError: an option is too small, or does not fit another one.
    """
    counts = args.num_prompts or [2 * level for level in args.concurrency]
    if len(counts) != len(args.concurrency):
        raise ValueError("--num-prompts must have one value for each value of --concurrency")
    if min((*counts, *args.concurrency, args.output_len, args.repeat, args.input_len or 1)) < 1:
        raise ValueError("sizes, lengths and repetitions must be at least 1")
    if args.queries < 0 or not (args.queries or args.concurrency):
        raise ValueError("nothing to measure: give --queries or --concurrency")
    if args.prompts and args.input_len:
        raise ValueError("--prompts has texts, --input-len makes random prompts: give one of them")
    if args.shared_len and not args.shared_len < (args.input_len or 0):
        raise ValueError("--shared-len must be less than --input-len")
    return AblationLoad(
        queries=args.queries,
        repeat=args.repeat,
        output_len=args.output_len,
        levels=tuple(args.concurrency),
        prompts=tuple(counts),
        input_len=args.input_len,
        shared_len=args.shared_len,
        file=str(args.prompts.resolve()) if args.prompts else None,
    )


def _rows(args: argparse.Namespace, plugins: PluginSet, model: str) -> list[Settings]:
    """Return the settings of all rows.

    Raises:
        OSError: the file of rows cannot be read.
        ValueError: a technique or a value is wrong.
    """
    if args.row_file is not None:
        if args.vary is not None:
            raise ValueError("--row-file has the rows already: leave --vary out")
        return read_rows(args.row_file)
    given = dict(map(parse_vary, args.vary or [one.name for one in TECHNIQUES]))
    return MODES[args.mode](
        {name: values or compared_values(name, plugins, model) for name, values in given.items()}
    )


class Ablation:
    """The table that the options describe.

    Raises:
        GlowplugError: the model or the configuration cannot be read.
        OSError: a file cannot be read.
        ValueError: an option has a wrong value.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._load = _load(args)
        given = engine_config(args)
        plugins = load_plugins(extra=args.extra_plugins)
        model = str(given.get("model", EMBEDDED))
        positions = plugins.read_model(model).facts.max_positions
        base = base_config(given, self._load, positions)
        self._rows = plan_rows(_rows(args, plugins, model), base, plugins)
        count = len(self._rows)
        numbers = selected(args.rows, count) if args.rows else range(1, count + 1)
        self._selected = frozenset(numbers)
        self._file = record.AblationFile(
            args.output_file, self._rows, self._load, conditions_apart(), args.retry_failed
        )

    def show_plans(self) -> None:
        """Print the number, settings and plan of each row, or why it is refused."""
        for row in self._rows:
            said = f"same plan as row {row.same_as}" if row.same_as else f"plan {row.fingerprint}"
            print(f"{row.number}. {label(row.settings)}: {said if row.plan else _refused(row)}")

    def run(self) -> int:
        """Measure the selected rows, write all results, and return the exit status."""
        ends = None
        if self._args.max_minutes is not None:
            ends = time.monotonic() + 60 * self._args.max_minutes
        for row in self._rows:
            self._take(row, ends)
        document = self._file.document()
        self._write(document)
        if all(row.plan is None for row in self._rows):
            return 2
        failed = [one for one in document["rows"] if one["status"] == record.FAILED]
        return 1 if failed else 0

    def _take(self, row: PlannedRow, ends: float | None) -> None:
        """Add a row to the file: measure it, unless its result is known or there can be none.

        Args:
            row: the row.
            ends: time (``time.monotonic``) after which nothing is measured; None: no limit.
        """
        known = self._file.known(row)
        if row.plan is None:
            self._file.add(row, record.REFUSED, {})
            self._print(row, _refused(row))
        elif row.same_as:
            self._file.add(row, record.SAME, {})
            self._print(row, f"same plan as row {row.same_as}")
        elif known is not None:
            self._file.add(row, known["status"], known)
            self._print(row, f"known, {known['status']} {known.get('date', '')}")
        elif row.number in self._selected:
            self._measure(row, ends)

    def _measure(self, row: PlannedRow, ends: float | None) -> None:
        """Measure a row in the time that is left, and add the result."""
        limit = self._args.time_limit
        left = limit if ends is None else ends - time.monotonic()
        if left <= 0:
            self._print(row, "left out: --max-minutes are over")
            return
        found = run_row(row.config, self._load, min(limit, left))
        failure = found["failure"]
        if failure and failure["kind"] == TIME_LIMIT and left < limit:
            self._print(row, "left out: --max-minutes are over")
            return
        status = record.FAILED if failure else record.MEASURED
        self._print(row, _summary(self._file.add(row, status, found | {"date": record.today()})))

    def _print(self, row: PlannedRow, said: str) -> None:
        print(f"{row.number}/{len(self._rows)} {label(row.settings)}: {said}", flush=True)

    def _write(self, document: Mapping[str, Any]) -> None:
        """Write the result file, the chart if it can be drawn, and the page with the tables."""
        path: Path = self._args.output_file
        report.write_json(path, document)
        chart = path.with_suffix(".svg")
        drawn = False
        try:
            drawn = draw_record(document, chart)
        except MissingMatplotlib as missing:
            print(f"no chart: {missing}", file=sys.stderr)
        page = tables.markdown(document, path.name, chart.name if drawn else None)
        path.with_suffix(".md").write_text(page, encoding="utf-8")
        print(f"\n{page}")


def _refused(row: PlannedRow) -> str:
    """Return the reasons of a refusal in one line."""
    return "refused: " + "; ".join(f"{one.field}: {one.reason}" for one in row.refusals)


def _summary(found: Mapping[str, Any]) -> str:
    """Return the main figures of a row, or its failure, in one line."""
    failure = found.get("failure")
    if failure:
        reason = failure["reason"].strip().splitlines()[0]
        return f"{failure['kind']} ({failure['phase']}): {reason}"
    single = found["single"]
    parts = [f"{single['tokens_per_s']:.1f} tokens/s @1"] if single else []
    parts += [f"{one['total_throughput']:.0f} @{one['concurrency']}" for one in found["offline"]]
    return f"{', '.join(parts)} ({found['seconds']:.0f} s)"

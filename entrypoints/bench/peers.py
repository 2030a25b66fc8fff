"""``glowplug bench peers``: our results beside those of other engines, with ratios.

Reads static-batch or serving results in the format of each tool: ``bench one-batch --save``,
SGLang's ``bench_one_batch --result-filename`` (JSON lines, one shape each), log lines ``batch N:
prefill A ms (B tokens/s), decode step C ms (D tokens/s)``, and the JSON lines of the ``bench
serving`` of glowplug, SGLang or vLLM.

With ``--offline`` a further table gives the server's share of the offline engine's throughput. A
point is one batch size or concurrency. If one engine has several runs at a point, the fastest
counts. Each point is shown with its floor (``others/floor.py``) where the floor is known: one-batch
records contain it; for a server it is computed for ``--floor-model`` on ``--floor-card``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.floor import Card, measured_card
from glowplug.entrypoints.bench.others.layout import ONE_GPU, OURS
from glowplug.entrypoints.bench.others.step_floor import SHAPES, served_floors

#: columns after those of the engines
EXTRA_COLUMNS = (
    "offline",
    "times_best_peer",
    "times_one_gpu",
    "floor",
    "share_of_floor",
    "share_of_offline",
)
LOG_LINE = re.compile(
    r"batch (\d+): prefill ([\d.]+) ms \(([\d.]+) tokens/s\), decode step ([\d.]+) ms"
)

Record = Mapping[str, Any]
Points = dict[int, dict[str, float]]  #: batch size or concurrency -> metric -> value
Tables = dict[str, list[dict[str, Any]]]  #: title -> rows


@dataclass(frozen=True)
class Metric:
    """One compared metric, which has a table of its own.

    Attributes:
        key: the metric's key in the results; the key of its floor is in ``floor``.
        title: title of the table.
        lower: True if lower values are better.
    """

    key: str
    title: str
    lower: bool

    @property
    def floor(self) -> str:
        return f"floor_{self.key}"


STATIC_METRICS = (
    Metric("decode_ms", "decode step, ms", True),
    Metric("prefill_tokens_per_s", "prefill, tokens/s", False),
)
SERVING_METRICS = (
    Metric("output_throughput", "serving, output tokens/s", False),
    Metric("mean_ttft_ms", "serving, mean TTFT in ms", True),
    Metric("mean_tpot_ms", "serving, mean TPOT in ms", True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ours",
        type=Path,
        help="result file of `bench one-batch --save` or `bench serving --output-file`",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="result file or log of a peer",
    )
    parser.add_argument(
        "--offline",
        type=Path,
        default=None,
        metavar="FILE",
        help="result file of `bench offline --output-file`",
    )
    parser.add_argument(
        "--floor-model",
        default=None,
        metavar="MODEL",
        help="model of a serving run; adds the floors of the run",
    )
    parser.add_argument(
        "--floor-card",
        default="H200",
        metavar="NAME",
        help="card of the serving run, for its floors (default H200)",
    )
    parser.add_argument(
        "--output-file", type=Path, default=None, help="write conditions, points and ratios as JSON"
    )
    parser.add_argument("--markdown", type=Path, default=None, help="write the tables to this file")


def run(args: argparse.Namespace) -> int:
    """Print the tables that compare the engines' result files.

    Returns:
        Exit status 0; 2 when a file cannot be read.
    """
    try:
        engines = {OURS: _ours(args)}
        for given in args.peer:
            name, equals, file = given.partition("=")
            if not equals or not name:
                raise ValueError(f"--peer {given}: expected NAME=FILE")
            engines[name] = merged(engines.get(name, {}), points(Path(file)))
        found = comparison(engines)
        if args.offline:
            found |= beside_offline(engines[OURS], args.offline)
    except (OSError, ValueError, KeyError, GlowplugError) as error:
        print(f"glowplug bench peers: {error}", file=sys.stderr)
        return 2
    tables = markdown(found, list(engines))
    print(tables)
    if args.markdown:
        args.markdown.write_text(tables + "\n", encoding="utf-8")
    if args.output_file:
        report.write_json(args.output_file, {"conditions": header(args.ours), "tables": found})
    return 0


def _ours(args: argparse.Namespace) -> Points:
    """Return this engine's points, with the floors of ``--floor-model`` if it is given."""
    found = points(args.ours)
    if not args.floor_model:
        return found
    return with_floors(found, args.ours, args.floor_model, measured_card(args.floor_card))


# ---- reading -------------------------------------------------------------------------------------


def points(path: Path) -> Points:
    """Read a result file into points: values by metric for each batch size or concurrency.

    Raises:
        ValueError: the file has no result.
    """
    found: Points = {}
    for at, values in map(_point, (record for record in _records(path) if not record.get("error"))):
        found = merged(found, {at: values})
    if not found:
        raise ValueError(f"{path} has no result")
    return found


def _records(path: Path) -> list[Record]:
    """Return the records of a result file or of a log of ``vllm_steps.py``."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [match.groups() for match in LOG_LINE.finditer(text)]
    if lines:
        return [
            {
                "batch_size": int(batch),
                "prefill_tokens_per_s": float(rate),
                "decode_median_ms": float(step),
            }
            for batch, _, rate, step in lines
        ]
    try:
        whole = orjson.loads(text)
        return whole["results"] if "results" in whole else [whole]
    except orjson.JSONDecodeError:
        return [orjson.loads(line) for line in text.splitlines() if line.startswith("{")]


def _point(record: Record) -> tuple[int, dict[str, float]]:
    """Return (batch size or concurrency, values by metric) of a record."""
    if "max_concurrency" in record:
        return int(record["max_concurrency"] or 0), {
            metric.key: float(record[metric.key]) for metric in SERVING_METRICS
        }
    step = record.get("decode_median_ms") or 1e3 * record["median_decode_latency"]
    values = {
        "decode_ms": float(step),
        "prefill_tokens_per_s": float(
            record.get("prefill_tokens_per_s") or record["prefill_throughput"]
        ),
    }
    for name, key in (("floor_decode_ms", "floor_ms"), ("floor_prefill_tokens_per_s",) * 2):
        if key in record:
            values[name] = float(record[key])
    return int(record["batch_size"]), values


def merged(one: Points, other: Points) -> Points:
    """Return the points of ``one`` and ``other``, with the better value where both have one."""
    lower = {metric.key: metric.lower for metric in (*STATIC_METRICS, *SERVING_METRICS)}
    found = {at: dict(values) for at, values in one.items()}
    for at, values in other.items():
        kept = found.setdefault(at, {})
        for key, value in values.items():
            kept[key] = (min if lower.get(key, True) else max)(kept.get(key, value), value)
    return found


def with_floors(ours: Points, path: Path, model_path: str, card: Card) -> Points:
    """Add the floors (least times) to ``ours``, the serving points read from ``path``.

    ``card``: the card of each rank.
    """
    from glowplug.core.plugin.registry import load_plugins

    model = load_plugins().read_model(model_path).facts
    lines = _records(path)
    prompt = int(lines[0]["random_input_len"])
    output = int(lines[0]["random_output_len"])
    drafted = {int(line["max_concurrency"] or 0): line for line in lines if line.get(SHAPES)}
    return {
        at: values
        | {
            f"floor_{key}": floor
            for key, floor in served_floors(
                card, model, at, prompt, output, drafted.get(at)
            ).items()
        }
        for at, values in ours.items()
    }


#: conditions that every line of a serving run repeats
CONDITION_KEYS = (
    "date",
    "model_id",
    "backend",
    "dataset_name",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "request_rate",
    "seed",
)


RUN_KEYS = (
    "date",
    "max_concurrency",
    "num_prompts",
    "seed",
    "duration",
    "completed",
    "failed",
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "device_idle_share",
    "accept_length",
    "accept_rates",
)


def runs(path: Path) -> list[Record]:
    """Return each serving run in the file, with only the keys in ``RUN_KEYS``."""
    return [
        {key: line[key] for key in RUN_KEYS if line.get(key) is not None} for line in _records(path)
    ]


def header(path: Path) -> dict[str, Any]:
    """Return the conditions of a result file.

    A ``--save`` document has conditions of its own. For serving runs, they are taken from the first
    line, with the number of completed requests by concurrency.
    """
    try:
        whole = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        whole = {}
    if "results" in whole:
        return {key: value for key, value in whole.items() if key != "results"}
    lines = _records(path)
    found = {key: lines[0][key] for key in CONDITION_KEYS if key in lines[0]}
    requests = {
        str(line["max_concurrency"]): line["completed"] for line in lines if "completed" in line
    }
    return found | ({"requests": requests} if requests else {})


# ---- comparing -----------------------------------------------------------------------------------


def comparison(engines: Mapping[str, Points]) -> Tables:
    """Return a table for each metric, with a row per point and the value of every engine.

    ``times_best_peer`` is this engine's speed relative to the best peer: above 1, this engine is
    faster. ``times_one_gpu`` is relative to this engine on one GPU, if that was measured. The floor
    and this engine's share of the floor's speed are added where they are known.
    """
    ours = engines[OURS]
    metrics = (
        SERVING_METRICS if SERVING_METRICS[0].key in next(iter(ours.values())) else STATIC_METRICS
    )
    return {metric.title: [_row(metric, at, engines) for at in sorted(ours)] for metric in metrics}


def beside_offline(ours: Points, path: Path) -> Tables:
    """Return a table of serving throughput relative to the offline engine.

    The table has one row, for the highest concurrency. ``path``: file with the offline result on
    the same kind of load.
    """
    offline = max(float(record["output_throughput"]) for record in _records(path))
    at = max(ours)
    served = ours[at]["output_throughput"]
    row = {"point": at, OURS: served, "offline": offline, "share_of_offline": served / offline}
    return {"serving beside the offline engine, output tokens/s": [row]}


def _row(metric: Metric, at: int, engines: Mapping[str, Points]) -> dict[str, Any]:
    """Return a metric's table row: each engine's value and this engine's relative speed.

    ``at``: the row's point, a batch size or concurrency.
    """
    values = {
        name: found[at][metric.key]
        for name, found in engines.items()
        if metric.key in found.get(at, {})
    }
    row: dict[str, Any] = {"point": at, **values}
    peers = [value for name, value in values.items() if name not in (OURS, ONE_GPU)]
    if peers:
        best = min(peers) if metric.lower else max(peers)
        row |= _ratio("times_best_peer", metric, values[OURS], best)
    if ONE_GPU in values:
        row |= _ratio("times_one_gpu", metric, values[OURS], values[ONE_GPU])
    floor = engines[OURS][at].get(metric.floor)
    if floor:
        row |= {"floor": floor, **_ratio("share_of_floor", metric, values[OURS], floor)}
    return row


def _ratio(name: str, metric: Metric, ours: float, other: float) -> dict[str, float]:
    """Return the speed of this engine relative to another, as ``{name: ratio}``.

    The result is empty where the divisor is 0: tokens that arrive together have no time between
    them.
    """
    mine, theirs = (other, ours) if metric.lower else (ours, other)
    return {name: mine / theirs} if theirs else {}


def markdown(found: Mapping[str, Sequence[Record]], engines: Sequence[str]) -> str:
    """Return the tables ``found`` as Markdown, with a column for each of ``engines``."""
    parts = []
    for title, rows in found.items():
        columns = [
            column
            for column in ("point", *engines, *EXTRA_COLUMNS)
            if any(column in row for row in rows)
        ]
        cells = [[row.get(column, "-") for column in columns] for row in rows]
        parts.append(f"{title}\n\n{report.table(columns, cells)}")
    return "\n\n".join(parts)

"""Options of ``glowplug bench serving``.

Names and aliases are those of vLLM's ``bench serve`` and SGLang's ``bench_serving``.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.backends import BACKENDS
from glowplug.entrypoints.bench.load.metrics import METRICS
from glowplug.entrypoints.bench.others.drafts import add_simulation_options


def configure(parser: argparse.ArgumentParser) -> None:
    _server(parser.add_argument_group("server"))
    prompts = parser.add_argument_group("prompts")
    _dataset(prompts)
    _sharegpt(prompts)
    _load(parser.add_argument_group("load"))
    _output(parser.add_argument_group("results"))


def _server(group: Any) -> None:
    """Add the command-line options that describe the server and its route."""
    group.add_argument(
        "--backend",
        "--endpoint-type",
        choices=sorted(BACKENDS),
        default="glowplug",
        help="kind of server and route; default: glowplug's /v1/completions",
    )
    group.add_argument("--base-url", help="URL of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument(
        "--model", help="model name in the requests; default: the first of /v1/models"
    )
    group.add_argument(
        "--tokenizer",
        help="tokenizer.json or its folder, to make text prompts and to recount output tokens",
    )
    group.add_argument("--api-key", help="API key, sent as a bearer token")
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="additional request header",
    )
    group.add_argument(
        "--ready-check-timeout",
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        help="seconds to wait until the server is ready",
    )


def _dataset(group: Any) -> None:
    """Add the command-line options that choose the prompts."""
    group.add_argument(
        "--dataset-name",
        choices=("random", "custom", "sharegpt"),
        default="random",
        help="custom and sharegpt read --dataset-path; sharegpt also needs --tokenizer",
    )
    group.add_argument(
        "--dataset-path",
        help='custom: JSON lines with "prompt" (or "conversations"), "output_tokens"; '
        'sharegpt: the published JSON list with "conversations"',
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        default=[100],
        help="requests per run; one value, or one for each --max-concurrency",
    )
    group.add_argument(
        "--random-input-len", "--random-input", "--input-len", type=int, default=1024
    )
    group.add_argument(
        "--random-output-len",
        "--random-output",
        "--output-len",
        type=int,
        default=128,
        help="tokens to generate; also the default for prompts from a file",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths are uniform in [length * ratio, length]: 1 makes them equal",
    )
    group.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        default="ids",
        help="send random prompts as token ids where the route takes them, or as text",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        help="random ids are below this; default: the vocabulary size that the server reports",
    )
    group.add_argument("--seed", type=int, default=1)


def _sharegpt(group: Any) -> None:
    """Add the command-line options that choose conversations of the ShareGPT file."""
    group.add_argument(
        "--sharegpt-output-len",
        type=int,
        help="tokens to generate for each ShareGPT prompt; default: the length of its answer",
    )
    group.add_argument(
        "--sharegpt-context-len",
        type=int,
        help="leave out conversations longer than this, in place of the published limits",
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take ShareGPT prompts in the file's order"
    )
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="send fewer requests than --num-prompts if the ShareGPT file has fewer prompts",
    )


def _load(group: Any) -> None:
    """Add the command-line options that set the request rate and the concurrency."""
    group.add_argument(
        "--max-concurrency",
        type=int,
        nargs="+",
        help="most requests in flight; several values: one run for each",
    )
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="gamma shape of the gaps between requests; 1: Poisson, less: bursts, inf: equal gaps",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="raise the request rate over the run, in place of --request-rate",
    )
    group.add_argument(
        "--ramp-up-start-rps", type=float, help="requests per second at the start of the ramp-up"
    )
    group.add_argument(
        "--ramp-up-end-rps", type=float, help="requests per second at the end of the ramp-up"
    )
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate past the end-of-sequence token: the default; as in vLLM",
    )
    group.add_argument(
        "--disable-ignore-eos",
        action="store_true",
        help="let answers end at the end-of-sequence token",
    )
    add_simulation_options(group)
    group.add_argument("--extra-request-body", type=orjson.loads, default={}, metavar="JSON")
    group.add_argument("--warmup-requests", type=int, default=1)
    group.add_argument(
        "--flush-cache", action="store_true", help="POST /flush_cache before each run"
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="POST /start_profile and /stop_profile around the run",
    )


def _output(group: Any) -> None:
    """Add the command-line options that choose the printed and saved results."""
    group.add_argument("--output-file", help="append one JSON line per run")
    group.add_argument(
        "--output-details",
        "--save-detailed",
        action="store_true",
        help="add lists of per-request values to the record",
    )
    group.add_argument(
        "--save-result", action="store_true", help="write one JSON file per run into --result-dir"
    )
    group.add_argument("--result-dir", default=".")
    group.add_argument("--result-filename")
    group.add_argument("--tag", "--label", help="free text kept in the record")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count the requests that meet these limits",
    )
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=METRICS,
        help="metrics to print; the record has all of them",
    )
    group.add_argument("--metric-percentiles", type=_percentiles, default=(90.0, 95.0, 99.0))
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def _metrics(text: str) -> tuple[str, ...]:
    """Parse the value of ``--percentile-metrics`` into the names of metrics."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown metric {unknown[0]!r}: known are {', '.join(METRICS)}"
        )
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("percentiles must be between 0 and 100")
    return values

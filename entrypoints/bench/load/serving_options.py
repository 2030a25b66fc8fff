"""Options of ``glowplug bench serving``.

Names and aliases are those of vLLM's ``bench serve`` and SGLang's ``bench_serving``; those of the
prompts are in ``dataset_options``.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import orjson

from glowplug.entrypoints.bench.load import dataset_options
from glowplug.entrypoints.bench.load.backends import BACKENDS, Request
from glowplug.entrypoints.bench.load.metrics import METRICS
from glowplug.entrypoints.bench.others.drafts import add_simulation_options

#: sampling parameters of a request, by their name in its body
SAMPLING: dict[str, type[int] | type[float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


def configure(parser: argparse.ArgumentParser) -> None:
    _server(parser.add_argument_group("server"))
    dataset_options.configure(parser)
    _load(parser.add_argument_group("load"))
    _sampling(parser.add_argument_group("sampling"))
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
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="model name in the requests, in place of --model",
    )
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of the route, in place of the backend's own"
    )
    group.add_argument(
        "--insecure", action="store_true", help="do not check the server's certificate"
    )
    group.add_argument("--api-key", help="API key, sent as a bearer token")
    group.add_argument(
        "--header",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="additional request headers",
    )
    group.add_argument(
        "--request-id-prefix",
        default="",
        metavar="TEXT",
        help="send X-Request-Id with each request: this text and the request's number",
    )
    group.add_argument(
        "--ready-check-timeout",
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        help="seconds to wait until the server is ready",
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
    add_simulation_options(group)
    group.add_argument("--warmup-requests", "--num-warmups", type=int, default=1)
    group.add_argument(
        "--flush-cache", action="store_true", help="POST /flush_cache before each run"
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="POST /start_profile and /stop_profile around the run",
    )


def _sampling(group: Any) -> None:
    """Add the command-line options that each request passes on to the server."""
    group.add_argument("--temperature", type=float, default=0.0)
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="return log-probabilities, and those of the N most probable tokens",
    )
    group.add_argument(
        "--return-logprob",
        dest="logprobs",
        action="store_const",
        const=0,
        help="return log-probabilities of the generated tokens",
    )
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
    group.add_argument(
        "--extra-request-body",
        "--extra-body",
        type=orjson.loads,
        default={},
        metavar="JSON",
        help="further keys of each request",
    )


def request_of(args: argparse.Namespace, model: str) -> Request:
    """Return the settings of all requests. ``model``: the model's name in them."""
    given = {name: getattr(args, name) for name in SAMPLING}
    return Request(
        args.served_model_name or model,
        args.temperature,
        not args.disable_ignore_eos,
        args.extra_request_body,
        {name: value for name, value in given.items() if value is not None},
        args.logprobs,
        args.request_id_prefix,
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
    group.add_argument(
        "--append-result",
        action="store_true",
        help="append a JSON line per run to --result-filename, or to the file of --save-result",
    )
    group.add_argument(
        "--metadata",
        type=_pair,
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="further keys of the record",
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


def _pair(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, not {text!r}")
    return key.strip(), value.strip()


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

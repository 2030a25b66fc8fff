"""``glowplug bench one-batch-server``: latency of one static batch over HTTP.

Each batch is one request to ``/generate``. The server is started for the measurement with the given
engine options, or it runs already at ``--base-url``. The options and the record's keys are those of
SGLang's ``bench_one_batch_server``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.load.http_stream import ServerTarget, call
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.engine_options import add_batch_options, engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.front import event_loop

COLUMNS = (
    "batch_size",
    "input_len",
    "output_len",
    "latency",
    "output_throughput",
    "overall_throughput",
)
NO_MODEL = "None"  #: value of ``--model`` in published commands for a server that runs already
FALLBACK_VOCAB = 1000  #: token ids below this exist in every known vocabulary


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    add_batch_options(group, "request")
    group.add_argument("--run-name", default="default", help="name stored in the record")
    group.add_argument(
        "--base-url", help="URL of a running server; default: one is started with these options"
    )
    group.add_argument(
        "--skip-warmup", action="store_true", help="measure without a first, unmeasured request"
    )
    group.add_argument(
        "--result-filename",
        "--output-file",
        metavar="FILE",
        help="append one JSON line for each combination",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure each batch and print the table.

    Returns:
        Exit status 0; 2 if the options are refused, the server does not start, or it refuses a
            batch.
    """
    try:
        shapes = list(itertools.product(args.batch_size, args.input_len, args.output_len))
        if min(map(min, shapes)) < 1:
            raise ValueError("batch size, input length and output length must be at least 1")
        config = _config(args)
        with ExitStack() as stack:
            url = args.base_url
            if url is None:
                url = stack.enter_context(LocalServer(config)).base_url
            records = event_loop.run(_measure(args, ServerTarget(url), shapes))
    except (GlowplugError, OSError, ValueError, RuntimeError) as error:
        print(f"glowplug bench one-batch-server: {error}", file=sys.stderr)
        return 2
    print(report.table(COLUMNS, [[record[name] for name in COLUMNS] for record in records]))
    return 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the server to start; {} for a server that runs already.

    Raises:
        GlowplugError: an engine option is refused.
        ValueError: engine options are given for a server that runs already, or no model is named.
    """
    config = engine_config(args)
    if args.extra_plugins:
        raise ValueError("--plugin: start the server by glowplug serve, and give its --base-url")
    if args.base_url is None:
        if config.get("model") == NO_MODEL:
            raise ValueError("--model None needs --base-url, the URL of a running server")
        return config
    needless = sorted(set(config) - {"model"})
    if needless:
        raise ValueError(
            f"--base-url names a server that runs already, so its {needless[0]} cannot be set: "
            "leave the engine options out"
        )
    return {}


async def _measure(
    args: argparse.Namespace, target: ServerTarget, shapes: list[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """Return the record of each (batch size, prompt tokens, tokens to generate)."""
    vocab = await _vocabulary(target)
    rng = random.Random(0)
    if not args.skip_warmup:
        await _seconds(target, rng, vocab, shapes[0])
    records = []
    for shape in shapes:
        seconds = await _seconds(target, rng, vocab, shape)
        batch, length, output = shape
        records.append(
            {
                "run_name": args.run_name,
                "batch_size": batch,
                "input_len": length,
                "output_len": output,
                "latency": seconds,
                "output_throughput": batch * output / seconds,
                "overall_throughput": batch * (length + output) / seconds,
            }
        )
        if args.result_filename:
            report.append_line(Path(args.result_filename), records[-1])
    return records


async def _vocabulary(target: ServerTarget) -> int:
    """Return the vocabulary size that the server reports, or one that every model has."""
    status, body = await call(target, "GET", "/get_model_info")
    found = orjson.loads(body) if status == 200 else {}
    return int(found.get("vocab_size") or FALLBACK_VOCAB)


async def _seconds(
    target: ServerTarget, rng: random.Random, vocab: int, shape: tuple[int, int, int]
) -> float:
    """Send one batch of random prompts and return the seconds until the whole answer.

    Raises:
        ValueError: the server refused the request.
    """
    batch, length, output = shape
    payload = {
        "input_ids": [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)],
        "sampling_params": {"temperature": 0, "max_new_tokens": output, "ignore_eos": True},
    }
    started = time.perf_counter()
    status, body = await call(target, "POST", "/generate", payload)
    seconds = time.perf_counter() - started
    if status != 200:
        raise ValueError(f"POST /generate answered {status}: {body.decode(errors='replace')[:300]}")
    return seconds

"""``glowplug bench serving``: load on a running server, of glowplug or of another engine.

Options and result keys are those of vLLM's and SGLang's serving benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from glowplug.core.step.draft_counts import DraftCounts
from glowplug.entrypoints.bench.load import datasets, metrics
from glowplug.entrypoints.bench.load.backends import (
    BACKENDS,
    Backend,
    Outcome,
    Request,
    outcome_of,
    send_prompt,
)
from glowplug.entrypoints.bench.load.dataset_options import (
    dataset_conditions,
    prompt_counts,
    prompts_of,
)
from glowplug.entrypoints.bench.load.http_stream import ServerTarget, call
from glowplug.entrypoints.bench.load.load import drive, load_of, progress
from glowplug.entrypoints.bench.load.serving_options import configure as configure, request_of
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.drafts import (
    counted_by_server,
    counted_by_vllm,
    refuse_simulation,
    server_acceptance,
)
from glowplug.entrypoints.front import event_loop


@dataclass(frozen=True)
class MeasuredServer:
    """The measured server's description of itself, read before the run."""

    model: str
    vocab: int | None
    info: dict[str, Any] | None


def run(args: argparse.Namespace) -> int:
    """Send the load to a server and print the report of the measurements.

    Returns:
        Exit status 0 if every request succeeded; 1 if some failed; 2 if the run could not start.
    """
    try:
        return event_loop.run(_run(args))
    except (OSError, ValueError) as error:
        print(f"glowplug bench serving: {error}", file=sys.stderr)
        return 2


async def _run(args: argparse.Namespace) -> int:
    """Measure every concurrency, print and save the records, and return the exit status."""
    failed = 0
    async for record, outcomes in runs(args):
        failed += record["failed"]
        print(
            report.serving_report(record, args.percentile_metrics, args.metric_percentiles),
            flush=True,
        )
        for error in sorted({outcome.error for outcome in outcomes if outcome.error})[:5]:
            print(f"failed: {error}", file=sys.stderr)
        _save(args, record, outcomes)
    return 1 if failed else 0


async def runs(args: argparse.Namespace) -> AsyncIterator[tuple[metrics.Record, list[Outcome]]]:
    """Measure every concurrency of the options; yield each record and the requests' outcomes.

    Raises:
        OSError: the server cannot be reached.
        ValueError: the options contradict each other, or the server does not fit them.
    """
    target = _target(args)
    refuse_simulation(args)
    metrics.parse_goodput(args.goodput)  # fails before the run starts if invalid
    load_of(args, None)  # likewise
    _check_metadata(args)
    server = await _inspect_server(target, args)
    for concurrency, count in _sweep(args):
        prompts = prompts_of(args, count, server.vocab)
        yield await _measure_one(args, target, server, prompts, concurrency)
        server = replace(server, info=await _info(target))


def _sweep(args: argparse.Namespace) -> list[tuple[int | None, int]]:
    """Return (concurrency, number of prompts) of each run; a concurrency of None has no limit.

    The options have lists of equal length, or one number of prompts for all runs.
    """
    levels = args.max_concurrency or [None]
    counts = prompt_counts(args)
    if len(counts) == 1:
        counts = counts * len(levels)
    if len(counts) != len(levels):
        raise ValueError(
            f"--num-prompts has {len(counts)} values and --max-concurrency {len(levels)}"
        )
    return list(zip(levels, counts))


def _target(args: argparse.Namespace) -> ServerTarget:
    """Return the server that the options name.

    Raises:
        ValueError: a header is malformed.
    """
    headers = [("Authorization", f"Bearer {args.api_key}")] if args.api_key else []
    for pair in args.header:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"--header must be NAME=VALUE, not {pair!r}")
        headers.append((name, value))
    url = args.base_url or f"http://{args.host}:{args.port}"
    return ServerTarget(url, tuple(headers), verify=not args.insecure)


async def _inspect_server(target: ServerTarget, args: argparse.Namespace) -> MeasuredServer:
    """Wait for the server and read its model's name and, if reported, the vocabulary size."""
    await _ready(target, args.ready_check_timeout)
    status, body = await call(target, "GET", "/v1/models")
    models = orjson.loads(body).get("data", []) if status == 200 else []
    name = args.model or (models[0]["id"] if models else None)
    if name is None:
        raise ValueError(
            f"{target.base_url}/v1/models answered {status}; give the model with --model"
        )
    info = await _info(target)
    described = await _json(target, "/get_model_info") or {}
    vocab = described.get("vocab_size") or (info or {}).get("vocab_size")
    return MeasuredServer(name, vocab, info)


async def _ready(target: ServerTarget, timeout: float) -> None:
    """Wait until the server's route ``/ready`` answers with a status other than 503.

    Servers without that route answer 404 once they are up.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            status, _ = await call(target, "GET", "/ready")
            reason = "it is still loading its model"
        except OSError as error:
            status = 503
            reason = str(error)
        if status != 503:
            return
        if time.monotonic() > deadline:
            raise ConnectionError(f"no server at {target.base_url} after {timeout:g} s: {reason}")
        await asyncio.sleep(0.5)


async def _info(target: ServerTarget) -> dict[str, Any] | None:
    return await _json(target, "/server_info") or await _json(target, "/get_server_info")


def _stats(info: dict[str, Any] | None) -> dict[str, Any]:
    """Return the engine's counters; {} for servers of other engines."""
    return (info or {}).get("stats") or {}


async def _drafts(target: ServerTarget, info: dict[str, Any] | None) -> Sequence[DraftCounts]:
    """Return the server's counters of verified drafts. ``info``: its answer of /server_info."""
    found = counted_by_server(info)
    if found is not None:
        return found
    status, body = await call(target, "GET", "/metrics")
    return counted_by_vllm(body.decode(errors="replace") if status == 200 else "")


async def _json(target: ServerTarget, path: str) -> dict[str, Any] | None:
    status, body = await call(target, "GET", path)
    try:
        value = orjson.loads(body) if status == 200 else None
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _backend(args: argparse.Namespace) -> Backend:
    """Return the kind of server and route of the options."""
    backend = BACKENDS[args.backend]
    return replace(backend, path=args.endpoint) if args.endpoint else backend


async def _warm_up(
    args: argparse.Namespace, target: ServerTarget, prompt: datasets.BenchPrompt, request: Request
) -> None:
    """Send the warm-up requests, and flush the prefix cache if requested.

    Raises:
        ValueError: a request failed.
    """
    backend = _backend(args)
    for _ in range(args.warmup_requests):
        outcome = outcome_of(await send_prompt(target, backend, prompt, request), backend)
        if not outcome.ok:
            raise ValueError(f"the warm-up request failed: {outcome.error}")
    if args.flush_cache:
        await _expect_ok(target, "/flush_cache")


async def _measure_one(
    args: argparse.Namespace,
    target: ServerTarget,
    server: MeasuredServer,
    prompts: list[datasets.BenchPrompt],
    concurrency: int | None,
) -> tuple[metrics.Record, list[Outcome]]:
    """Measure one concurrency, after the warm-up.

    Returns:
        The record and the outcomes of all requests.

    Raises:
        ValueError: the warm-up failed.
    """
    backend = _backend(args)
    request = request_of(args, server.model)
    await _warm_up(args, target, prompts[0], request)
    drafts = await _drafts(target, await _info(target))
    if args.profile:
        await _expect_ok(target, "/start_profile")
    done, close = progress(len(prompts), not args.disable_tqdm)
    load = load_of(args, concurrency)
    outcomes, duration = await drive(target, backend, request, prompts, load, done)
    close()
    if args.profile:
        await _expect_ok(target, "/stop_profile")
    record = dict(args.metadata) | _conditions(args, server, len(prompts), concurrency)
    record |= await _server_figures(target, server, drafts)
    return record | _client_figures(args, outcomes, duration, concurrency), outcomes


def _client_figures(
    args: argparse.Namespace, outcomes: list[Outcome], duration: float, concurrency: int | None
) -> metrics.Record:
    """Return the figures of a run that are measured here, for its record.

    Args:
        args: options of the command.
        outcomes: outcomes of all requests.
        duration: seconds of the run.
        concurrency: most requests in flight; None: no limit.
    """
    goodput = metrics.parse_goodput(args.goodput)
    found = metrics.measure(
        outcomes, duration, percentiles=args.metric_percentiles, goodput=goodput
    )
    found["per_user_throughput"] = metrics.per_user_throughput(
        {**found, "max_concurrency": concurrency}
    )
    found["total_output_tokens_retokenized"] = _retokenized(args, outcomes)
    return found


async def _server_figures(
    target: ServerTarget, server: MeasuredServer, drafts: Sequence[DraftCounts]
) -> metrics.Record:
    """Return the figures of the run that the server reports: acceptance and idle device.

    Args:
        target: the server.
        server: its description before the run.
        drafts: its counters of verified drafts before the run.
    """
    after = await _info(target)
    return {
        **server_acceptance(drafts, await _drafts(target, after), after),
        "device_idle_share": report.idle_share(_stats(server.info), _stats(after)),
    }


async def _expect_ok(target: ServerTarget, path: str) -> None:
    status, body = await call(target, "POST", path, {})
    if status != 200:
        raise ValueError(f"POST {path} answered {status}: {body.decode(errors='replace')[:300]}")


def _retokenized(args: argparse.Namespace, outcomes: list[Outcome]) -> int | None:
    """Return the number of output tokens, counted by tokenizing the texts; None without tokenizer.

    The number reveals a server that reports more tokens than it sends.
    """
    if not args.tokenizer:
        return None
    encode, _, _ = datasets.file_tokenizer(args.tokenizer)
    return sum(len(encode(outcome.text)) for outcome in outcomes if outcome.ok)


def _conditions(
    args: argparse.Namespace, server: MeasuredServer, count: int, concurrency: int | None
) -> metrics.Record:
    """Return the settings of the run for its record.

    ``server_info`` is the server's own report.
    """
    rate = "inf" if math.isinf(args.request_rate) else args.request_rate
    return {
        "schema_version": metrics.SCHEMA_VERSION,
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "tag": args.tag,
        "label": args.tag,
        "backend": args.backend,
        "endpoint_type": args.backend,
        "model_id": server.model,
        "tokenizer_id": args.tokenizer or server.model,
        **dataset_conditions(args, count),
        "temperature": args.temperature,
        "sampling_params": request_of(args, server.model).sampling,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "ramp_up_strategy": args.ramp_up_strategy,
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "max_concurrency": concurrency,
        **report.startup_times((server.info or {}).get("engine") or {}),
        "server_info": server.info,
    }


def _check_metadata(args: argparse.Namespace) -> None:
    """Raise ValueError if ``--metadata`` has a key of the record itself."""
    server = MeasuredServer("", None, None)
    own = _conditions(args, server, 1, None).keys() | metrics.measure([], 1.0).keys()
    taken = [key for key, _ in args.metadata if key in own]
    if taken:
        raise ValueError(f"--metadata {taken[0]} is a key of the record itself: give another name")


def _save(args: argparse.Namespace, record: metrics.Record, outcomes: list[Outcome]) -> None:
    """Write the record to the files that the options name."""
    whole = record | metrics.details(outcomes) if args.output_details else record
    if args.output_file:
        report.append_line(Path(args.output_file), whole)
    if args.save_result or args.append_result:
        model = record["model_id"].rsplit("/", 1)[-1]
        level = f"-concurrency{record['max_concurrency']}" if record["max_concurrency"] else ""
        name = (
            f"{record['backend']}-{record['request_rate']}qps{level}-{model}-{record['date']}.json"
        )
        write = report.append_line if args.append_result else report.write_json
        write(Path(args.result_dir) / (args.result_filename or name), whole)

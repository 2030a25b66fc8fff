"""``glowplug bench versus``: this engine and its peers on one checkpoint and device, with floors.

Measures static batches, then servers under load (``--serving``), one engine at a time, all with the
same layout of ranks (``--tp N``). The floors of several ranks include the measured time of their
exchanges. With
``--together`` all engines load at once; the caller has to limit their memory (``--options``).
Writes tables, records and the log of every engine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from glowplug import __version__
from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.bench.others.comparison import Comparison
from glowplug.entrypoints.bench.others.floor import measured_card
from glowplug.entrypoints.bench.others.layout import ONE_GPU, OURS, add_layout_options, layout_of
from glowplug.entrypoints.bench.others.peer_engines import (
    ENGINES,
    ComparedDrafts,
    interpreters,
    version,
)
from glowplug.entrypoints.bench.ranks.exchange_times import ExchangeTimes, step_exchanges

KINDS = ("static", "serving")
BATCH_SIZES = [1, 8, 32, 128]  #: default of ``--batch-size``
#: kind of run that measures the exchanges between ranks for the floors; of this engine only
COLLECTIVES = "collectives"


def configure(parser: argparse.ArgumentParser) -> None:
    _add_engines(parser)
    add_layout_options(parser)
    _add_static(parser)
    _add_serving(parser)
    _add_drafts(parser)
    parser.add_argument(
        "--floor-card", default="H200", metavar="NAME", help="card for the floors of serving"
    )
    parser.add_argument(
        "--exchange-times",
        type=Path,
        default=None,
        metavar="FILE",
        help="record of `bench kernels --collectives`, for the floors of several ranks; default: "
        "the exchanges are measured first",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("versus"), help="for records, tables and logs"
    )


def _add_engines(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--model", required=True, help="folder of the checkpoint that all engines load"
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="sglang or vllm, and the interpreter that has it (or a script that starts one)",
    )
    group.add_argument(
        "--options",
        action="append",
        default=[],
        metavar="NAME[.KIND]=WORDS",
        help="more arguments of an engine; KIND static or serving: for this run alone (glowplug: "
        "also collectives)",
    )
    group.add_argument(
        "--one-gpu",
        action="store_true",
        help=f"also measure this engine on one GPU ({ONE_GPU})",
    )
    group.add_argument(
        "--together",
        action="store_true",
        help="load all at once, then measure each while the others are suspended",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        help="seconds for an engine to load, and again to be measured",
    )


def _add_static(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("static batches")
    group.add_argument(
        "--batch-size",
        type=int,
        nargs="*",
        default=None,
        help="numbers of sequences; without a value: none; default: 1 8 32 128, none with drafts",
    )
    group.add_argument(
        "--input-len", type=int, default=1024, help="prompt tokens, also when serving"
    )
    group.add_argument("--output-len", type=int, default=64, help="tokens to generate")
    group.add_argument("--repeat", type=int, default=3, help="measured runs of each batch size")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument(
        "--serving", type=int, nargs="*", default=[], metavar="CONCURRENCY", help="e.g. 1 32 256"
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        default=None,
        help="requests at each concurrency; default: four times as many",
    )
    group.add_argument("--serving-output-len", type=int, default=256, help="tokens of each answer")
    group.add_argument(
        "--offline", action="store_true", help="also measure our offline engine on the same load"
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts of all engines, when serving")
    group.add_argument(
        "--draft-steps",
        type=int,
        default=None,
        metavar="N",
        help="draft chains of N tokens with the checkpoint's own next-token layer",
    )
    group.add_argument(
        "--simulate-accept-length",
        type=float,
        default=None,
        metavar="TOKENS",
        help="let every engine accept drafts so that a verify step gains this many tokens on "
        "average, for checkpoints whose drafts have no meaning",
    )


def run(args: argparse.Namespace) -> int:
    """Measure this engine and others in turns and write the tables.

    Returns:
        Exit status 0; 1 if an engine failed (the tables lack it); 2 if the comparison cannot begin.
    """
    if args.batch_size is None:
        args.batch_size = [] if args.draft_steps else BATCH_SIZES
    try:
        comparison = _comparison(args)
    except (GlowplugError, OSError, ValueError) as error:
        print(f"glowplug bench versus: {error}", file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        comparison.exchanges()
        if args.batch_size:
            comparison.static()
        if args.serving:
            comparison.serve()
    except (RuntimeError, OSError, ValueError, KeyError, GlowplugError) as error:
        print(
            f"glowplug bench versus: {error} (earlier results are in {args.output_dir})",
            file=sys.stderr,
        )
        return 1
    return 1 if comparison.failed else 0


def _comparison(args: argparse.Namespace) -> Comparison:
    """Return the comparison that the options describe, not yet started.

    Raises:
        GlowplugError: the model cannot be read.
        OSError: the file of ``--exchange-times`` cannot be read.
        ValueError: an option has a wrong value, or an engine is not installed.
    """
    drafts = _drafts(args)
    layout = layout_of(args, [pair.partition("=")[0] for pair in args.peer], bool(args.batch_size))
    if args.one_gpu and layout.ranks == 1:
        raise ValueError("--one-gpu measures one GPU beside several: give --tp-size 2, or more")
    engines = interpreters(args.peer, args.one_gpu)
    options = _options(args.options, engines)
    versions = {
        name: __version__ if name in (OURS, ONE_GPU) else version(ENGINES[name], python)
        for name, python in engines.items()
    }
    _check_sizes(args)
    measured_card(args.floor_card)
    model = load_plugins().read_model(args.model).facts
    if args.exchange_times:
        times = ExchangeTimes.read(args.exchange_times)
        for batch in (*args.batch_size, *args.serving):
            for exchange in step_exchanges(model, layout.mesh, batch):
                times.seconds(exchange)
    return Comparison(args, engines, options, versions, model, layout, drafts)


def _drafts(args: argparse.Namespace) -> ComparedDrafts | None:
    """Return the drafts of all engines; None without drafts.

    Raises:
        ValueError: the options do not fit together.
    """
    steps: int | None = args.draft_steps
    length: float | None = args.simulate_accept_length
    if steps is None:
        if length is not None:
            raise ValueError("--simulate-accept-length is for drafts: give --draft-steps as well")
        return None
    if steps < 1:
        raise ValueError("--draft-steps must be at least 1")
    if length is not None and not 1 <= length <= steps + 1:
        raise ValueError(
            f"--simulate-accept-length {length:g}: a verify step with {steps} drafts gains 1 to "
            f"{steps + 1} tokens"
        )
    if args.batch_size:
        raise ValueError(
            "static batches are measured without drafts, as SGLang's tool does: leave --batch-size "
            "out, and give --serving"
        )
    return ComparedDrafts(steps, length)


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError if there is nothing to measure or a size is wrong."""
    if not args.batch_size and not args.serving:
        raise ValueError("nothing to measure: give --batch-size or --serving")
    sizes = (*args.batch_size, *args.serving, args.input_len, args.output_len, args.repeat)
    if min(sizes) < 1:
        raise ValueError("sizes, lengths and repetitions must be at least 1")
    if args.serving and len(args.num_prompts or args.serving) != len(args.serving):
        raise ValueError("--num-prompts must have one value for each value of --serving")


def _options(given: list[str], engines: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """Parse ``--options`` into a mapping from (engine, kind) to command-line arguments.

    ``engines``: names of the measured engines.

    Raises:
        ValueError: unknown engine or kind.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for pair in given:
        target, equals, words = pair.partition("=")
        name, _, kind = target.partition(".")
        kinds = (*KINDS, COLLECTIVES) if name == OURS else KINDS
        if not equals or name not in ENGINES or kind not in ("", *kinds):
            raise ValueError(
                f"--options {pair}: expected NAME=WORDS or NAME.KIND=WORDS, with NAME one of "
                f"{', '.join(ENGINES)} and KIND one of {', '.join(kinds)}"
            )
        _check_measured(name, engines)
        for one in (kind,) if kind else kinds:
            found.setdefault((name, one), []).extend(shlex.split(words))
    return found


def _check_measured(name: str, engines: Collection[str]) -> None:
    """Raise ValueError if the engine ``name`` is none of the measured ``engines``."""
    if name not in engines:
        how = "--one-gpu" if name == ONE_GPU else f"--peer {name}=PYTHON"
        raise ValueError(f"--options {name}: {name} is not measured; give {how} as well")

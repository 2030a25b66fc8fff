"""``glowplug bench versus``: this engine and its peers on one checkpoint and device, with floors.

Measures static batches, then servers under load (``--serving``), one engine at a time. With
``--together`` all engines load at once; the caller has to limit their memory (``--options``).
Writes tables, records and the log of every engine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from glowplug import __version__
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.bench import peers
from glowplug.entrypoints.bench.load.local_server import free_port
from glowplug.entrypoints.bench.one_batch import MIN_CONTEXT
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.floor import measured_card
from glowplug.entrypoints.bench.others.own_load import OwnLoad
from glowplug.entrypoints.bench.others.peer_engines import (
    ENGINES,
    OURS,
    PeerEngine,
    ServedRun,
    StaticRun,
    interpreters,
    version,
)
from glowplug.entrypoints.bench.others.turns import Loaded, MeasuredProgram, answers, in_turns

KINDS = ("static", "serving")


def configure(parser: argparse.ArgumentParser) -> None:
    _add_engines(parser)
    _add_static(parser)
    _add_serving(parser)
    parser.add_argument(
        "--floor-card", default="H200", metavar="NAME", help="card of the serving floors"
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
        help="more options of an engine; KIND: only for its static or serving run",
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
        "--batch-size", type=int, nargs="*", default=[1, 8, 32, 128], help="without a value: none"
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
        help="requests at each level; default: four times as many",
    )
    group.add_argument("--serving-output-len", type=int, default=256, help="tokens of each answer")
    group.add_argument(
        "--offline", action="store_true", help="also measure our offline engine on the same load"
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison.

    Returns:
        Exit status 0; 1 if an engine failed (the tables lack it); 2 if the comparison cannot begin.
    """
    try:
        comparison = _comparison(args)
    except (GlowplugError, ValueError) as error:
        print(f"glowplug bench versus: {error}", file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    try:
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
    """Return the comparison that the command line describes.

    Raises:
        GlowplugError: the model cannot be read.
        ValueError: an option has a wrong value, or an engine is not installed.
    """
    engines = interpreters(args.peer)
    options = _options(args.options)
    versions = {OURS: __version__} | {
        name: version(ENGINES[name], python) for name, python in engines.items() if name != OURS
    }
    _check_sizes(args)
    measured_card(args.floor_card)
    model = load_plugins().read_model(args.model).facts
    return Comparison(args, engines, options, versions, model)


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise ValueError if there is nothing to measure or a size is wrong."""
    if not args.batch_size and not args.serving:
        raise ValueError("nothing to measure: give --batch-size or --serving")
    sizes = (*args.batch_size, *args.serving, args.input_len, args.output_len, args.repeat)
    if min(sizes) < 1:
        raise ValueError("sizes, lengths and repetitions must be at least 1")
    if args.serving and len(args.num_prompts or args.serving) != len(args.serving):
        raise ValueError("--num-prompts must have one value for each value of --serving")


def _options(given: list[str]) -> dict[tuple[str, str], list[str]]:
    """Parse ``--options`` into (engine, kind) -> words.

    Raises:
        ValueError: unknown engine or kind.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for pair in given:
        target, equals, words = pair.partition("=")
        name, _, kind = target.partition(".")
        if not equals or name not in ENGINES or kind not in ("", *KINDS):
            raise ValueError(
                f"--options {pair}: expected NAME=WORDS or NAME.KIND=WORDS, with NAME one of "
                f"{', '.join(ENGINES)} and KIND one of {', '.join(KINDS)}"
            )
        for one in (kind,) if kind else KINDS:
            found.setdefault((name, one), []).extend(shlex.split(words))
    return found


def _logged(mark: str, log: str) -> bool:
    return mark in log


def _url_answers(url: str, log: str) -> bool:
    return answers(url)


class Comparison:
    """One run of the command: starts the engines and writes their results."""

    def __init__(
        self,
        args: argparse.Namespace,
        engines: Mapping[str, str],
        options: Mapping[tuple[str, str], list[str]],
        versions: Mapping[str, str],
        model: ModelFacts,
    ) -> None:
        self._args = args
        self._engines = engines
        self._options = options
        self._versions = versions
        self._folder: Path = args.output_dir
        self._vocab = model.vocab_size
        self._context = min(
            model.max_positions, max(MIN_CONTEXT, args.input_len + args.serving_output_len)
        )
        self._commands: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}  #: (kind, engine) -> error

    # ---- static batches --------------------------------------------------------------------------

    def static(self) -> None:
        """Measure static batches on every engine and write the result."""
        files = {}
        starts = []
        found: dict[str, peers.Points] = {}
        for name in self._engines:
            engine = ENGINES[name]
            result = self._folder / f"static-{name}.json"
            result.unlink(missing_ok=True)  # a tool may append to it
            files[name] = self._log("static", name) if engine.in_log else result
            words = engine.static(self._static_run(result))
            starts.append(self._start(engine, "static", words, partial(_logged, engine.mark)))
        with closing(in_turns(starts, self._args.together, self._args.timeout)) as turns:
            for turn in turns:
                with self._recorded("static", turn.name):
                    turn.finish(self._args.timeout)
                    found[turn.name] = peers.points(files[turn.name])
        self._write("static", found, files[OURS])

    def _static_run(self, result: Path) -> StaticRun:
        """Return the static batches to measure. ``result``: file for the results."""
        args = self._args
        return StaticRun(
            model=args.model,
            batch_sizes=tuple(args.batch_size),
            input_len=args.input_len,
            output_len=args.output_len,
            vocab=self._vocab,
            repeat=args.repeat,
            result=result,
        )

    # ---- serving ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Measure a server of every engine under load and write the result."""
        args = self._args
        load = self._own_load()
        files = {name: self._folder / f"serving-{name}.jsonl" for name in self._engines}
        ports = {name: free_port() for name in self._engines}
        found: dict[str, peers.Points] = {}
        for file in files.values():
            file.unlink(missing_ok=True)
        starts = [self._server(ENGINES[name], port, load) for name, port in ports.items()]
        with closing(in_turns(starts, args.together, args.timeout)) as turns:
            for turn in turns:
                with self._recorded("serving", turn.name):
                    turn.check()
                    load.on_server(ENGINES[turn.name], ports[turn.name], files[turn.name])
                    found[turn.name] = peers.points(files[turn.name])
        beside: peers.Tables = {}
        if OURS in found:
            found[OURS] = peers.with_floors(found[OURS], files[OURS], args.model, args.floor_card)
            if args.offline:
                beside = self._beside_offline(found[OURS], load)
        runs = {name: peers.runs(files[name]) for name in found}
        self._write("serving", found, files[OURS], beside, runs)

    def _own_load(self) -> OwnLoad:
        """Return the requests for the servers; four per concurrent one unless the user says."""
        args = self._args
        counts = args.num_prompts or [4 * level for level in args.serving]
        prompts = dict(zip(args.serving, counts, strict=True))
        return OwnLoad(args.input_len, args.serving_output_len, prompts, self._folder, args.timeout)

    def _server(
        self, engine: PeerEngine, port: int, load: OwnLoad
    ) -> Callable[[], MeasuredProgram]:
        """Return the function that starts an engine's server on ``port``."""
        served = ServedRun(self._args.model, port, load.concurrency, self._context)
        url = f"http://127.0.0.1:{port}{engine.ready}"
        return self._start(engine, "serving", engine.server(served), partial(_url_answers, url))

    def _beside_offline(self, ours: peers.Points, load: OwnLoad) -> peers.Tables:
        """Return our server's results beside our offline engine's; {} if the latter failed."""
        with self._recorded("serving", "offline"):
            options = self._options.get((OURS, "serving"), [])
            result = load.offline(self._args.model, self._context, options)
            return peers.beside_offline(ours, result)
        return {}

    # ---- engines in turns ------------------------------------------------------------------------

    def _start(
        self, engine: PeerEngine, kind: str, words: list[str], loaded: Loaded
    ) -> Callable[[], MeasuredProgram]:
        """Return the function that starts this run; record the run's command."""
        command = [self._engines[engine.name], *words, *self._options.get((engine.name, kind), [])]
        self._commands[f"{engine.name}, {kind}"] = shlex.join(command)
        return partial(
            MeasuredProgram,
            engine.name,
            command,
            self._log(kind, engine.name),
            engine.environment,
            loaded,
        )

    @contextmanager
    def _recorded(self, kind: str, name: str) -> Iterator[None]:
        """Record and print an error of one engine, so that the others still run."""
        try:
            yield
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            self.failed[kind, name] = str(error)
            print(f"glowplug bench versus: {error}", file=sys.stderr, flush=True)

    def _log(self, kind: str, name: str) -> Path:
        return self._folder / f"{kind}-{name}.log"

    # ---- results ---------------------------------------------------------------------------------

    def _write(
        self,
        kind: str,
        engines: Mapping[str, peers.Points],
        ours: Path,
        beside: peers.Tables | None = None,
        runs: Mapping[str, object] | None = None,
    ) -> None:
        """Print the tables, and write them and the record.

        Args:
            kind: "static" or "serving".
            engines: results by engine.
            ours: file with this engine's results.
            beside: further tables.
            runs: all results of each engine, for the record.

        Raises:
            RuntimeError: this engine was not measured.
        """
        if OURS not in engines:
            raise RuntimeError(f"{kind}: {OURS} was not measured, so there is nothing to compare")
        tables = peers.comparison(engines) | (beside or {})
        text = peers.markdown(tables, list(engines))
        print(text, flush=True)
        (self._folder / f"{kind}.md").write_text(text + "\n", encoding="utf-8")
        record: dict[str, object] = {
            "conditions": self._conditions(kind, list(engines), ours),
            "tables": tables,
        }
        if runs:
            record["runs"] = runs
        report.write_json(self._folder / f"{kind}.json", record)

    def _conditions(self, kind: str, engines: Sequence[str], ours: Path) -> dict[str, object]:
        """Return the conditions of the measurement for the record."""
        order = (
            "all loaded at once, then each measured while the others were suspended: "
            if self._args.together
            else "one after another: "
        )
        machine = conditions_apart()
        found: dict[str, object] = {
            **machine,
            **peers.header(ours),
            "command": machine["command"],
            "versions": dict(self._versions),
            "order": order + ", ".join(engines),
            "commands": {
                name: text for name, text in self._commands.items() if name.endswith(kind)
            },
        }
        failed = {
            name: text.partition("\n")[0] for (of, name), text in self.failed.items() if of == kind
        }
        return found | ({"failed": failed} if failed else {})

"""``glowplug bench versus``: this engine and its peers on one checkpoint and device, with floors.

Measures static batches, then servers under load (``--serving``), one engine at a time. With
``--together`` all engines load at once; the caller has to limit their memory (``--options``).
Writes tables, records and the log of every engine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
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

WARM_PROMPTS = 64  #: requests of the warm-up pass over a server
WARM_TOKENS = 16  #: output tokens of each warm-up request
KINDS = ("static", "serving")


def configure(parser: argparse.ArgumentParser) -> None:
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
    group = parser.add_argument_group("static batches")
    group.add_argument(
        "--batch-size", type=int, nargs="*", default=[1, 8, 32, 128], help="without a value: none"
    )
    group.add_argument(
        "--input-len", type=int, default=1024, help="prompt tokens, also when serving"
    )
    group.add_argument("--output-len", type=int, default=64, help="tokens to generate")
    group.add_argument("--repeat", type=int, default=3, help="measured runs of each batch size")
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
    parser.add_argument(
        "--floor-card", default="H200", metavar="NAME", help="card of the serving floors"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("versus"), help="for records, tables and logs"
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison.

    Returns:
        Exit status 0; 1 if an engine failed (the tables lack it); 2 if the comparison cannot begin.
    """
    try:
        engines = interpreters(args.peer)
        options = _options(args.options)
        versions = {OURS: __version__} | {
            name: version(ENGINES[name], python) for name, python in engines.items() if name != OURS
        }
        if not args.batch_size and not args.serving:
            raise ValueError("nothing to measure: give --batch-size or --serving")
        if (
            min(*args.batch_size, *args.serving, args.input_len, args.output_len, args.repeat, 1)
            < 1
        ):
            raise ValueError("sizes, lengths and repetitions must be at least 1")
        if args.serving and len(args.num_prompts or args.serving) != len(args.serving):
            raise ValueError("--num-prompts must have one value for each value of --serving")
        measured_card(args.floor_card)
        model = load_plugins().read_model(args.model).facts
    except (GlowplugError, ValueError) as error:
        print(f"glowplug bench versus: {error}", file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(args, engines, options, versions, model)
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
        #: requests of each concurrency
        self._prompts = args.num_prompts or [4 * level for level in args.serving]
        self._context = min(
            model.max_positions, max(MIN_CONTEXT, args.input_len + args.serving_output_len)
        )
        self._commands: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}  #: (kind, engine) -> error

    # ---- static batches --------------------------------------------------------------------------

    def static(self) -> None:
        args = self._args
        files = {}
        starts = []
        found: dict[str, peers.Points] = {}
        for name in self._engines:
            engine = ENGINES[name]
            result = self._folder / f"static-{name}.json"
            result.unlink(missing_ok=True)  # a tool may append to it
            shapes = StaticRun(
                args.model,
                tuple(args.batch_size),
                args.input_len,
                args.output_len,
                self._vocab,
                args.repeat,
                result,
            )
            files[name] = self._log("static", name) if engine.in_log else result
            starts.append(
                self._start(engine, "static", engine.static(shapes), partial(_logged, engine.mark))
            )
        with closing(in_turns(starts, args.together, args.timeout)) as turns:
            for turn in turns:
                with self._recorded("static", turn.name):
                    turn.finish(args.timeout)
                    found[turn.name] = peers.points(files[turn.name])
        self._write("static", found, files[OURS])

    # ---- serving ---------------------------------------------------------------------------------

    def serve(self) -> None:
        args = self._args
        ports = {}
        starts = []
        found: dict[str, peers.Points] = {}
        files = {name: self._folder / f"serving-{name}.jsonl" for name in self._engines}
        for name in self._engines:
            engine = ENGINES[name]
            port = free_port()
            ports[name] = port
            files[name].unlink(missing_ok=True)
            served = ServedRun(args.model, port, max(args.serving), self._context)
            url = f"http://127.0.0.1:{port}{engine.ready}"
            starts.append(
                self._start(engine, "serving", engine.server(served), partial(_url_answers, url))
            )
        with closing(in_turns(starts, args.together, args.timeout)) as turns:
            for turn in turns:
                with self._recorded("serving", turn.name):
                    turn.check()
                    self._load_on(ENGINES[turn.name], ports[turn.name], files[turn.name])
                    found[turn.name] = peers.points(files[turn.name])
        if OURS in found:
            found[OURS] = peers.with_floors(found[OURS], files[OURS], args.model, args.floor_card)
        beside: peers.Tables = {}
        if args.offline and OURS in found:
            with self._recorded("serving", "offline"):
                beside = peers.beside_offline(found[OURS], self._offline())
        self._write(
            "serving", found, files[OURS], beside, {name: peers.runs(files[name]) for name in found}
        )

    def _load_on(self, engine: PeerEngine, port: int, result: Path) -> None:
        """Load one server: a warm-up pass that is not recorded, then all levels."""
        levels = map(str, self._args.serving)
        counts = map(str, self._prompts)
        for log, tokens, words in (
            (
                f"warm-{engine.name}",
                WARM_TOKENS,
                ["--num-prompts", str(WARM_PROMPTS), "--max-concurrency", str(WARM_PROMPTS)],
            ),
            (
                f"load-{engine.name}",
                self._args.serving_output_len,
                [
                    "--num-prompts",
                    *counts,
                    "--max-concurrency",
                    *levels,
                    "--output-file",
                    str(result),
                ],
            ),
        ):
            self._run_bench(
                log,
                [
                    "serving",
                    "--backend",
                    engine.backend,
                    "--base-url",
                    f"http://127.0.0.1:{port}",
                    "--random-input-len",
                    str(self._args.input_len),
                    "--random-output-len",
                    str(tokens),
                    "--random-range-ratio",
                    "1",
                    "--disable-tqdm",
                    *words,
                ],
            )

    def _offline(self) -> Path:
        args = self._args
        result = self._folder / "offline-glowplug.jsonl"
        result.unlink(missing_ok=True)
        count = dict(zip(args.serving, self._prompts))[max(args.serving)]
        self._run_bench(
            "offline",
            [
                "offline",
                "--model",
                args.model,
                "--num-prompts",
                str(count),
                "--input-len",
                str(args.input_len),
                "--output-len",
                str(args.serving_output_len),
                "--context-length",
                str(self._context),
                "--max-running-requests",
                str(max(args.serving)),
                "--output-file",
                str(result),
                *self._options.get((OURS, "serving"), []),
            ],
        )
        return result

    def _run_bench(self, name: str, words: list[str]) -> None:
        """Run one of our own bench commands with a log of the given name.

        Raises:
            RuntimeError: it failed.
        """
        command = [sys.executable, "-m", "glowplug", "bench", *words]
        with MeasuredProgram(
            f"bench {words[0]}", command, self._folder / f"{name}.log", {}
        ) as turn:
            turn.finish(self._args.timeout)

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
        """Print and write the tables; RuntimeError if this engine was not measured."""
        if OURS not in engines:
            raise RuntimeError(f"{kind}: {OURS} was not measured, so there is nothing to compare")
        found = peers.comparison(engines) | (beside or {})
        tables = peers.markdown(found, list(engines))
        print(tables, flush=True)
        (self._folder / f"{kind}.md").write_text(tables + "\n", encoding="utf-8")
        order = (
            "all loaded at once, then each measured while the others were suspended: "
            if self._args.together
            else "one after another: "
        ) + ", ".join(engines)
        machine = conditions_apart()
        conditions = {
            **machine,
            **peers.header(ours),
            "command": machine["command"],
            "versions": dict(self._versions),
            "order": order,
            "commands": {
                name: text for name, text in self._commands.items() if name.endswith(kind)
            },
        }
        failed = {
            name: text.partition("\n")[0] for (of, name), text in self.failed.items() if of == kind
        }
        report.write_json(
            self._folder / f"{kind}.json",
            {
                "conditions": conditions | ({"failed": failed} if failed else {}),
                "tables": found,
                **({"runs": runs} if runs else {}),
            },
        )

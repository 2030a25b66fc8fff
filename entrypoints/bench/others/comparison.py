"""The comparison of this engine with its peers: engines in turns, tables, records and logs."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.entrypoints.bench import peers
from glowplug.entrypoints.bench.load.local_server import free_port
from glowplug.entrypoints.bench.one_batch import MIN_CONTEXT
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions_apart
from glowplug.entrypoints.bench.others.floor import measured_card
from glowplug.entrypoints.bench.others.layout import ONE_GPU, ONE_RANK, OURS, RankLayout
from glowplug.entrypoints.bench.others.own_load import OwnLoad
from glowplug.entrypoints.bench.others.peer_engines import (
    ENGINES,
    ComparedDrafts,
    PeerEngine,
    ServedRun,
    StaticRun,
)
from glowplug.entrypoints.bench.others.step_floor import about_floor
from glowplug.entrypoints.bench.others.turns import Loaded, MeasuredProgram, answers, in_turns
from glowplug.entrypoints.bench.ranks.exchange_times import (
    EXCHANGE,
    ExchangeTimes,
    step_exchanges,
)


def _logged(mark: str, log: str) -> bool:
    return mark in log


def _url_answers(url: str, log: str) -> bool:
    return answers(url)


class Comparison:
    """One run of ``glowplug bench versus``: starts the engines and writes their results.

    Args:
        args: options of the command.
        engines: interpreter by engine.
        options: further command-line arguments by (engine, kind of run).
        versions: version by engine.
        model: facts of the checkpoint.
        layout: how the ranks of every engine share the model.
        drafts: the drafts of every engine's server; None: none.

    Attributes:
        failed: errors by (kind, engine).
    """

    def __init__(
        self,
        args: argparse.Namespace,
        engines: Mapping[str, str],
        options: Mapping[tuple[str, str], list[str]],
        versions: Mapping[str, str],
        model: ModelFacts,
        layout: RankLayout = ONE_RANK,
        drafts: ComparedDrafts | None = None,
    ) -> None:
        self._args = args
        self._engines = engines
        self._options = options
        self._versions = versions
        self._folder: Path = args.output_dir
        self._model = model
        self._layout = layout
        self._drafts = drafts
        self._times: Path | None = args.exchange_times
        self._context = min(
            model.max_positions, max(MIN_CONTEXT, args.input_len + args.serving_output_len)
        )
        self._commands: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}

    def _layout_of(self, engine: str) -> RankLayout:
        """Return the layout of an engine: the command's, or one rank."""
        return ONE_RANK if engine == ONE_GPU else self._layout

    # ---- exchanges between ranks -----------------------------------------------------------------

    def exchanges(self) -> None:
        """Measure the exchanges between ranks that the floors need, unless their times are given.

        If that fails, the floors are those without exchanges.
        """
        if self._times is not None or self._layout.ranks == 1:
            return
        result = self._folder / "collectives.json"
        result.unlink(missing_ok=True)
        words = self._exchange_words(result)
        start = self._start(ENGINES[OURS], "collectives", words, partial(_logged, ""))
        with self._recorded("collectives", OURS), start() as program:
            program.finish(self._args.timeout)
            self._times = result

    def _exchange_words(self, result: Path) -> list[str]:
        """Return the arguments that measure the exchanges of all steps. ``result``: file for them.

        The steps are those of the batch sizes and of the concurrencies.
        """
        args = self._args
        sizes: dict[bool, set[int]] = {True: set(), False: set()}
        for batch in (*args.batch_size, *args.serving):
            for one in step_exchanges(self._model, self._layout.mesh, batch):
                sizes[one.operation == EXCHANGE].add(one.size)
        return [
            *("-m", "glowplug", "bench", "kernels", "--collectives", "--model", args.model),
            *("--collective-bytes", *map(str, sorted(sizes[False]))),
            *("--exchange-tokens", *map(str, sorted(sizes[True]))),
            *self._layout.ours(),
            *("--output-file", str(result)),
        ]

    # ---- static batches --------------------------------------------------------------------------

    def static(self) -> None:
        """Measure static batches on every engine and write the results."""
        files = {}
        starts = []
        for name in self._engines:
            engine = ENGINES[name]
            result = self._folder / f"static-{name}.json"
            result.unlink(missing_ok=True)  # a tool may append to it
            files[name] = self._log("static", name) if engine.in_log else result
            words = engine.static(self._static_run(name, result))
            starts.append(self._start(engine, "static", words, partial(_logged, engine.mark)))

        def measure(turn: MeasuredProgram) -> peers.Points:
            turn.finish(self._args.timeout)
            return peers.points(files[turn.name])

        self._write("static", self._in_turns("static", starts, measure), files[OURS])

    def _static_run(self, engine: str, result: Path) -> StaticRun:
        """Return the static batches that an engine measures. ``result``: file for results."""
        args = self._args
        layout = self._layout_of(engine)
        return StaticRun(
            model=args.model,
            batch_sizes=tuple(args.batch_size),
            input_len=args.input_len,
            output_len=args.output_len,
            vocab=self._model.vocab_size,
            repeat=args.repeat,
            result=result,
            layout=layout,
            exchange_times=self._times if layout.ranks > 1 else None,
        )

    # ---- serving ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Measure a server of every engine under load and write the results."""
        load = self._own_load()
        files = {name: self._folder / f"serving-{name}.jsonl" for name in self._engines}
        ports = {name: free_port() for name in self._engines}
        for file in files.values():
            file.unlink(missing_ok=True)
        starts = [self._server(ENGINES[name], port, load) for name, port in ports.items()]

        def measure(turn: MeasuredProgram) -> peers.Points:
            turn.check()
            load.on_server(ENGINES[turn.name], ports[turn.name], files[turn.name])
            return peers.points(files[turn.name])

        found = self._in_turns("serving", starts, measure)
        beside = self._with_floors_and_offline(found, files[OURS], load) if OURS in found else {}
        runs = {name: peers.runs(files[name]) for name in found}
        self._write("serving", found, files[OURS], beside, runs)

    def _own_load(self) -> OwnLoad:
        """Return the load on the servers, by default 4 requests for each unit of concurrency."""
        args = self._args
        return OwnLoad(
            input_len=args.input_len,
            output_len=args.serving_output_len,
            levels=tuple(args.serving),
            prompts=tuple(args.num_prompts or (4 * level for level in args.serving)),
            folder=self._folder,
            timeout=args.timeout,
        )

    def _server(
        self, engine: PeerEngine, port: int, load: OwnLoad
    ) -> Callable[[], MeasuredProgram]:
        """Return a function that starts an engine's server on ``port``."""
        served = ServedRun(
            self._args.model,
            port,
            load.concurrency,
            self._context,
            self._layout_of(engine.name),
            self._drafts,
        )
        if self._drafts is not None:
            more = engine.draft_environment(self._drafts)
            engine = replace(engine, environment={**engine.environment, **more})
        url = f"http://127.0.0.1:{port}{engine.ready}"
        return self._start(engine, "serving", engine.server(served), partial(_url_answers, url))

    def _with_floors_and_offline(
        self, found: dict[str, peers.Points], ours: Path, load: OwnLoad
    ) -> peers.Tables:
        """Add the floors (least times) to our server's result, and compare it with offline runs.

        Args:
            found: results by engine; this engine's is replaced.
            ours: file with the result of this engine's server.
            load: the requests.

        Returns:
            Further tables; {} if the offline engine was not measured.
        """
        args = self._args
        card = replace(
            measured_card(args.floor_card), mesh=self._layout.mesh, exchanges=self._read_times()
        )
        found[OURS] = peers.with_floors(found[OURS], ours, args.model, card)
        if args.offline:
            with self._recorded("serving", "offline"):
                drafts = self._drafts.ours_offline() if self._drafts else []
                more = self._options.get((OURS, "serving"), [])
                options = [*self._layout.ours(), *drafts, *more]
                result = load.offline(args.model, self._context, options)
                return peers.beside_offline(found[OURS], result)
        return {}

    def _read_times(self) -> ExchangeTimes | None:
        """Return the times of the exchanges between ranks; None without them."""
        return ExchangeTimes.read(self._times) if self._times else None

    # ---- engines in turns ------------------------------------------------------------------------

    def _start(
        self, engine: PeerEngine, kind: str, words: list[str], loaded: Loaded
    ) -> Callable[[], MeasuredProgram]:
        """Record the command of an engine's run and return a function that starts the run.

        Args:
            engine: the engine.
            kind: "static" or "serving".
            words: the arguments after the interpreter.
            loaded: see :class:`MeasuredProgram`.
        """
        own = OURS if engine.name == ONE_GPU else engine.name
        more = self._options.get((engine.name, kind)) or self._options.get((own, kind), [])
        command = [self._engines[engine.name], *words, *more]
        self._commands[f"{engine.name}, {kind}"] = shlex.join(command)
        return partial(
            MeasuredProgram,
            engine.name,
            command,
            self._log(kind, engine.name),
            engine.environment,
            loaded,
        )

    def _in_turns(
        self,
        kind: str,
        starts: Sequence[Callable[[], MeasuredProgram]],
        measure: Callable[[MeasuredProgram], peers.Points],
    ) -> dict[str, peers.Points]:
        """Start the engines and measure one at a time.

        Args:
            kind: "static" or "serving".
            starts: functions that start the engines.
            measure: measures a loaded engine and returns its result.

        Returns:
            The result of each engine that did not fail.
        """
        found = {}
        with closing(in_turns(starts, self._args.together, self._args.timeout)) as turns:
            for turn in turns:
                with self._recorded(kind, turn.name):
                    found[turn.name] = measure(turn)
        return found

    @contextmanager
    def _recorded(self, kind: str, name: str) -> Iterator[None]:
        """Record and print an error raised in this context, instead of passing it on.

        The other engines can then still be measured.

        Args:
            kind: "static" or "serving".
            name: the engine that runs in the context.
        """
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
        """Print the tables of results, and write them and the record to files.

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
        """Return the conditions of the measurement for the record.

        The conditions are the machine, the engines' versions and commands, and the order of the
        runs.
        """
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
            "layout": self._layout.mesh,
            "drafts": None if self._drafts is None else asdict(self._drafts),
            "floor": about_floor(self._layout.ranks, self._read_times()),
            "order": order + ", ".join(engines),
            "commands": {
                name: text
                for name, text in self._commands.items()
                if name.endswith((kind, "collectives"))
            },
        }
        failed = {
            name: text.partition("\n")[0] for (of, name), text in self.failed.items() if of == kind
        }
        return found | ({"failed": failed} if failed else {})

"""Runs a task on one engine or two, and writes the results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glowplug.core.errors import EngineDead, GlowplugError, PlanRefused
from glowplug.entrypoints.bench.load.load import progress
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.bench.others.report import write_json
from glowplug.entrypoints.cli.exit_codes import FAILED, OK, REFUSED, SECOND_SIGNAL
from glowplug.entrypoints.evaluation.compare import check_same_questions, compared, read_result
from glowplug.entrypoints.evaluation.in_process import InProcessAnswers
from glowplug.entrypoints.evaluation.options import (
    Engine,
    InProcess,
    Server,
    engine_of,
    without_version,
)
from glowplug.entrypoints.evaluation.questions import Answer, EvalTask, Question
from glowplug.entrypoints.evaluation.result import Record, result
from glowplug.entrypoints.evaluation.server import ServerAnswers
from glowplug.entrypoints.evaluation.show import comparison_text, result_text


def evaluate(task: EvalTask, program: str, args: argparse.Namespace) -> int:
    """Put a task's questions to the engines, print and write the result; return the exit code.

    Args:
        task: the task.
        program: name of the command, for errors.
        args: options of the command.

    Returns:
        0 if every question was answered, with at least the accuracy of ``--min-accuracy``; 1 if
        not; 2 if the run could not start; 130 if it was interrupted.
    """
    try:
        engine = engine_of(args)
        other = second_engine(args, engine)
        questions = task.questions(args)
        first = _answered(task, args, questions, engine)
        if other is None or first["interrupted"]:
            return _finish(args, [first])
        if isinstance(other, Path):
            second = read_result(other)
            check_same_questions(first, second, other)
        else:
            second = _answered(task, args, questions, other)
        return _finish(args, [first, second])
    except PlanRefused as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (GlowplugError, OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return REFUSED


def second_engine(args: argparse.Namespace, engine: Engine) -> Engine | Path | None:
    """Return the engine, or the result file, that the first engine is compared with.

    Raises:
        ValueError: the options contradict each other, or name no engine.
        ConfigError: the configuration of the second engine could not be read.
    """
    given = args.compare
    if args.compare_set:
        if given is not None or not isinstance(engine, InProcess):
            raise ValueError(
                "--compare-set changes the configuration of an engine in this process: give that "
                "engine with --model, and leave out --base-url and --compare"
            )
        changed = argparse.Namespace(**vars(args))
        changed.overrides = [*args.overrides, *args.compare_set]
        return InProcess(engine_config(changed))
    if given is None:
        return None
    if "://" in given:
        return Server(without_version(given), None, args.compare_api_key)
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"--compare {given}: neither a URL nor a file")
    if path.suffix == ".json" and _is_result(path):
        return path
    others = argparse.Namespace(**vars(args))
    others.engine_flags = []
    others.overrides = []
    others.config = given
    return InProcess(engine_config(others))


def _is_result(path: Path) -> bool:
    """Return whether a JSON file is a result; otherwise it is a configuration."""
    try:
        read_result(path)
    except ValueError:
        return False
    return True


def _answered(
    task: EvalTask, args: argparse.Namespace, questions: Sequence[Question], engine: Engine
) -> Record:
    """Put all questions to one engine and return the result, complete or interrupted."""
    settings = {**task.describe(args), "parallel": args.parallel}
    answers: dict[int, Answer] = {}
    opened = (
        ServerAnswers(engine, args.request_timeout)
        if isinstance(engine, Server)
        else InProcessAnswers(engine.config)
    )
    with opened as asked:
        finished, close = progress(len(questions), not args.disable_tqdm)
        started = time.perf_counter()
        try:
            asked.run(questions, args.parallel, answers, finished)
        except KeyboardInterrupt:
            if not answers:
                raise
        except EngineDead as error:
            for index in range(len(questions)):
                answers.setdefault(index, Answer(error=f"EngineDead: {error}"))
        finally:
            seconds = time.perf_counter() - started
            close()
        label = (asked.label, asked.model)
        return result(task, settings, questions, answers, label, seconds)


def _finish(args: argparse.Namespace, results: Sequence[Record]) -> int:
    """Print and write the results of one engine or two, and return the exit code."""
    document: dict[str, Any] = results[0]
    for one in results:
        print(result_text(one, args.show), flush=True)
    if len(results) > 1:
        first, second = results
        comparison = compared(first, second)
        print(comparison_text(comparison, first["engine"], second["engine"]))
        document = {"first": first, "second": second, "comparison": comparison}
    if args.output_file:
        write_json(args.output_file, document)
    if any(one["interrupted"] for one in results):
        return SECOND_SIGNAL
    least = args.min_accuracy or 0.0
    bad = any(one["failed"] or one["accuracy"] < least for one in results)
    return FAILED if bad else OK

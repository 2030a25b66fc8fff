"""``glowplug eval``: accuracy of an engine in this process or of a running OpenAI server.

Every sub-command is a task: a set of questions, and a function that grades their answers.
"""

from __future__ import annotations

import argparse
from functools import partial

from glowplug.entrypoints.cli.usage import without_command
from glowplug.entrypoints.evaluation import golden, gsm8k, mmlu, options, tasks
from glowplug.entrypoints.evaluation.questions import EvalTask

TASKS: dict[str, EvalTask] = {
    task.name: task for task in (gsm8k.TASK, mmlu.TASK, tasks.TASK, golden.TASK)
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to ``parser``."""
    commands = parser.add_subparsers(dest="task", metavar="TASK")
    for name, task in TASKS.items():
        command = commands.add_parser(name, help=task.summary, description=task.summary)
        task.configure(command.add_argument_group("questions"))
        command.set_defaults(evaluate=partial(_evaluate, task, command.prog))
        options.configure(command)


def run(args: argparse.Namespace) -> int:
    """Run the chosen task, or list the tasks if none was given; return the exit code."""
    if args.task is None:
        return without_command(
            "glowplug eval", {name: task.summary for name, task in TASKS.items()}
        )
    code: int = args.evaluate(args)
    return code


def _evaluate(task: EvalTask, program: str, args: argparse.Namespace) -> int:
    from glowplug.entrypoints.evaluation.evaluate import evaluate

    return evaluate(task, program, args)

"""A terminated command ends the programs that it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import LIMIT, until

#: a command that waits for a program, which waits for a process of its own
COMMAND = """
import sys
from pathlib import Path

from glowplug.entrypoints.bench.others.turns import MeasuredProgram
from glowplug.entrypoints.cli import main

PROGRAM = '''
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
'''

def configure(parser):
    pass

def run(args):
    log = Path(sys.argv[1])
    with MeasuredProgram("waiting", [sys.executable, "-c", PROGRAM], log, {}) as program:
        program.wait(600.0)
    return 0

main.COMMANDS["wait"] = main.Command("__main__", "wait", starts_programs=True)
raise SystemExit(main.main(["wait"]))
"""


def test_sigterm_ends_what_a_command_started(tmp_path: Path) -> None:
    log = tmp_path / "waiting.log"
    command = subprocess.Popen([sys.executable, "-c", COMMAND, str(log)])
    try:
        pid = int(until(lambda: log.exists() and log.read_text().strip(), "the program has begun"))
        child = psutil.Process(pid)
        command.terminate()
        assert command.wait(LIMIT) == 128 + 15
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its end")
    finally:
        command.kill()


@pytest.mark.parametrize("name", ["bench", "ablate", "eval"])
def test_measuring_commands_end_their_programs(name: str) -> None:
    from glowplug.entrypoints.cli.main import COMMANDS

    assert COMMANDS[name].starts_programs

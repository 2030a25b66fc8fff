"""A server process over the fake engine, for what needs a process: signals and exit codes.

    python -m tests.e2e.fake_server PORT STEP_SECONDS LOAD_SECONDS DRAIN_TIMEOUT
"""
from __future__ import annotations

import sys

from glowplug.core.options import LogOptions
from glowplug.core.protocols import Executor
from glowplug.entrypoints.server.logs import set_up_logging
from glowplug.entrypoints.server.serve import bind, serve_until_done
from tests.e2e.fake_engine import FakeExecutor, make_plan, make_tokenizer


def main() -> int:
    port, step, load, drain = int(sys.argv[1]), *(float(text) for text in sys.argv[2:5])
    plan = make_plan(server={"drain_timeout": drain})
    set_up_logging(LogOptions())

    def make() -> Executor:
        executor = FakeExecutor(step_seconds=step, load_seconds=load)
        executor.start(plan)
        return executor

    with bind("127.0.0.1", port) as listener:
        return serve_until_done(plan, make_tokenizer(), (), listener=listener, make=make)


if __name__ == "__main__":
    raise SystemExit(main())

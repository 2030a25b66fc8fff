"""A server process over the fake engine, for tests that need a process: signals and exit codes.

    python -m tests.e2e.fake_server PORT DRAIN_TIMEOUT LOADING HELD

The model does not become ready while the file LOADING exists, and no sequence gets a token while
HELD does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from glowplug.core.config.operation_options import LogOptions
from glowplug.core.protocols import Executor
from glowplug.entrypoints.server.logs import set_up_logging
from glowplug.entrypoints.server.serve import bind, serve_until_done
from tests.e2e.fake_engine import FakeExecutor, make_plan, make_tokenizer
from tests.support.waiting import LOOK


def main() -> int:
    port, drain, loading, held = (
        int(sys.argv[1]),
        float(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]),
    )
    plan = make_plan(server={"drain_timeout": drain})
    set_up_logging(LogOptions())

    def make() -> Executor:
        while loading.exists():
            time.sleep(LOOK)
        executor = FakeExecutor(step_seconds=LOOK, held=held.exists)
        executor.start(plan)
        return executor

    with bind("127.0.0.1", port) as listener:
        return serve_until_done(plan, make_tokenizer(), (), listener=listener, make=make)


if __name__ == "__main__":
    raise SystemExit(main())

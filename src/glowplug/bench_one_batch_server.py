"""``python -m glowplug.bench_one_batch_server`` is ``glowplug bench one-batch-server``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "one-batch-server"]
    raise SystemExit(main())

"""``python -m glowplug.bench_offline_throughput`` is ``glowplug bench offline``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "offline"]
    raise SystemExit(main())

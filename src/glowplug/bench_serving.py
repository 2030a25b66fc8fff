"""``python -m glowplug.bench_serving`` is ``glowplug bench serving``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "serving"]
    raise SystemExit(main())

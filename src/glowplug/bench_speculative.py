"""``python -m glowplug.bench_speculative`` is ``glowplug bench speculative``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "speculative"]
    raise SystemExit(main())

"""``python -m glowplug.export_deepseek_nextn`` is ``glowplug export-nextn``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["export-nextn"]
    raise SystemExit(main())

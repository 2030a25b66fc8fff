"""``python -m glowplug.launch_server`` is ``glowplug serve``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    raise SystemExit(main())

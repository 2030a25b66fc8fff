"""``python -m glowplug.launch_server`` is ``glowplug serve``."""
import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))

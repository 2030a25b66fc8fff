"""``python -m glowplug`` is the ``glowplug`` command."""

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

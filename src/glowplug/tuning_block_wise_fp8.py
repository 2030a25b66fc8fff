"""``python -m glowplug.tuning_block_wise_fp8`` is ``glowplug tune block_wise_fp8``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["tune", "block_wise_fp8"]
    raise SystemExit(main())

"""``python -m glowplug.tuning_fused_moe_triton`` is ``glowplug tune fused_moe_triton``."""

import sys

from glowplug.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["tune", "fused_moe_triton"]
    raise SystemExit(main())

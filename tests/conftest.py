"""Triton kernels are interpreted where no NVIDIA driver is; Triton decides when a kernel's module is first imported."""
from __future__ import annotations

import os
from pathlib import Path

DRIVER = Path("/dev/nvidiactl")

if not DRIVER.exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

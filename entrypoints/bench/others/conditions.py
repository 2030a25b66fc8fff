"""The conditions of a measurement: command, date, versions, card. Stored with every result."""

from __future__ import annotations

import datetime
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import glowplug

PACKAGES = ("torch", "triton", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "deep-gemm")


def conditions(device: str) -> dict[str, Any]:
    """Return the conditions under which this process measures, for a record.

    The conditions are the command, the date, the versions of glowplug, Python and installed
    packages, and the card.

    Args:
        device: "cpu" or "cuda".
    """
    from glowplug.core.facts.machine import installed

    found: dict[str, Any] = {
        "command": shlex.join(["glowplug", *sys.argv[1:]]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "glowplug": glowplug.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }
    return found | (_card() if device == "cuda" else {"card": f"cpu ({platform.machine()})"})


def conditions_apart() -> dict[str, Any]:
    """Return the conditions, cards included, without creating a CUDA context in this process.

    Processes that start others to measure on the cards, and do not use the cards themselves, call
    this function instead of ``conditions``.
    """
    from glowplug.core.facts.machine import cuda_devices

    cards = [card.name for card in cuda_devices()]
    several = f"{len(cards)} x " if len(cards) > 1 else ""
    return conditions("cpu") | ({"card": several + cards[0]} if cards else {})


def _commit() -> str:
    """Return the git commit of this source tree; "" if it is not a checkout."""
    root = Path(__file__).resolve().parents[3]
    return (
        _line(["git", "-C", str(root), "rev-parse", "--short", "HEAD"])
        if (root / ".git").exists()
        else ""
    )


def _card() -> dict[str, Any]:
    import torch

    driver = _line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {"card": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}


def _line(command: list[str]) -> str:
    """Return the first line that a command prints; "" if it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""

"""``glowplug collect-env``: versions, devices, folders and variables, for a bug report.

Values of secrets are left out: variables whose names say so, and passwords in addresses.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import glowplug
from glowplug.core.facts.hub_cache import hub_cache
from glowplug.core.facts.machine import installed, this_machine
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.entrypoints.cli.exit_codes import OK

TOOL_SECONDS = 20  #: time limit of nvidia-smi
#: beginnings of the names of variables that change how the engine runs
PREFIXES = (
    "GLOWPLUG_ CUDA_ CUBLAS_ NVIDIA_ NCCL_ UCX_ GLOO_ TORCH PYTORCH_ TRITON_ HF_ HUGGINGFACE_ "
    "TOKENIZERS_ OMP_ MKL_ OTEL_ SGLANG_ RAY_ SLURM_"
).split()
#: other such variables
NAMES = frozenset(
    "LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
    "GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT CXX XDG_CACHE_HOME XDG_DATA_HOME HTTP_PROXY "
    "HTTPS_PROXY NO_PROXY".split()
)
_SECRET = re.compile(
    r"(^|_)TOKEN(_|$)|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|HEADERS|(^|_)(API_?)?KEY", re.I
)
#: name and password in an address
_LOGIN = re.compile(r"(://)[^/@\s]*@")
HIDDEN = "***"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="load an additional plugin module",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    found = report(load_plugins(extra=args.plugin))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for section, values in found.items():
            print(f"{section}:")
            _print_values(values)
    return OK


def report(plugins: PluginSet) -> dict[str, Any]:
    """Return the report: section -> values."""
    return {
        "glowplug": {
            "version": glowplug.__version__,
            "folder": str(Path(glowplug.__file__).parent),
            "commit": _commit(Path(__file__).resolve().parent),
            "plugins": [
                f"{source.name} ({source.origin})"
                for source in plugins.sources
                if not source.name.startswith("glowplug.")
            ],
        },
        "system": _system(),
        "devices": _devices(),
        "torch": _torch(),
        "packages": _packages(plugins),
        "folders": _folders(),
        "environment": variables(os.environ),
    }


def _system() -> dict[str, Any]:
    machine = this_machine()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu_name(),
        "cpu cores": machine.cpu_cores,
        "memory GiB": round(machine.cpu_memory / (1 << 30), 1),
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def _devices() -> dict[str, Any]:
    """Return the visible devices, the driver and the links between devices."""
    found: dict[str, Any] = {
        "visible": [
            f"{card.name}, {card.memory >> 30} GiB, SM{card.compute}"
            for card in this_machine().devices
        ],
        "driver": _tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    if len(found["visible"]) > 1:
        found["links"] = _tool("nvidia-smi", "topo", "-m")
    return found


def _torch() -> dict[str, Any]:
    """Return what torch itself reports; the reason if it cannot be imported."""
    try:
        import torch
    except Exception as error:  # NOTE: a broken installation raises errors of many kinds
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "version": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "CUDA available": torch.cuda.is_available(),
        "cuDNN": torch.backends.cudnn.version() if torch.version.cuda else None,
        "threads": torch.get_num_threads(),
    }


def _packages(plugins: PluginSet) -> dict[str, str]:
    """Return the versions of the packages that the engine and its plugins use; "" for none."""
    try:
        stated = importlib.metadata.requires("glowplug") or []
    except importlib.metadata.PackageNotFoundError:
        stated = []
    needed = (re.match(r"[A-Za-z0-9._-]+", line) for line in stated if "extra ==" not in line)
    names = {match.group().lower().replace("_", "-") for match in needed if match}
    return {name: installed(name) for name in sorted(names | plugins.packages)}


def _folders() -> dict[str, str]:
    """Return the folders that the engine reads and writes, and the free space of each."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser()
    folders = {
        "tuned tables": os.environ.get("GLOWPLUG_CONFIG_DIR") or data / "glowplug" / "tables",
        "models of the hub": hub_cache(),
        "kernels of triton": os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache",
        "programs of inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or cache / "glowplug" / "inductor",
        "temporary files": os.environ.get("TMPDIR") or "/tmp",
    }
    return {name: _folder(Path(path).expanduser()) for name, path in folders.items()}


def _folder(path: Path) -> str:
    """Return a folder's path and the free space of its disk, or that it does not exist."""
    if not path.is_dir():
        return f"{path} (does not exist)"
    return f"{path} ({shutil.disk_usage(path).free / (1 << 30):.1f} GiB free)"


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how the engine runs, without secrets."""
    return {
        name: HIDDEN if _SECRET.search(name) else _LOGIN.sub(rf"\1{HIDDEN}@", value)
        for name, value in sorted(environment.items())
        if name.startswith(tuple(PREFIXES)) or name.upper() in NAMES
    }


def _commit(folder: Path) -> str:
    """Return the commit of the checkout that ``folder`` is in; "" for an installed package."""
    if not any((parent / ".git").exists() for parent in folder.parents):
        return ""
    return _tool("git", "-C", str(folder), "describe", "--always", "--dirty")


def _tool(name: str, *arguments: str) -> str:
    """Return the output of a tool; "" if it is missing or fails."""
    path = shutil.which(name)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _print_values(values: Mapping[str, Any]) -> None:
    """Print the values of a section, one on each line."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        items = (
            value if isinstance(value, list) else str("" if value is None else value).split("\n")
        )
        for number, item in enumerate(items or ["none"]):
            print(f"  {name if number == 0 else '':{width}}  {item or 'none'}")

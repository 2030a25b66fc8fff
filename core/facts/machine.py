"""Facts of this machine and of installed distributions, and fact sheets of other machines.

The module imports neither torch nor a CUDA library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from glowplug.core.errors import FactsError
from glowplug.core.facts.model_facts import DeviceFacts, HardwareFacts, SoftwareFacts

#: valid name of a distribution
PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
SHEETS = Path(__file__).absolute().parent / "sheets"  #: folder of the shipped fact sheets
FORMER_KEYS = {"interconnect"}  #: keys that fact sheets may still have; they have no effect
#: arguments of nvidia-smi
QUERY = ["--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]

#: part of a GPU's name -> memory bandwidth in bytes per second (vendor's figures)
BANDWIDTH = {
    "H200": 4.8e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "A100": 2.0e12,
    "L40": 8.64e11,
}


@functools.cache
def this_machine() -> HardwareFacts:
    """Return the CPU cores, memory and NVIDIA devices that this process may use.

    They are read once per process.
    """
    devices = cuda_devices()
    return HardwareFacts(devices=devices, cpu_cores=usable_cores(), cpu_memory=_memory())


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    The number is that of the CPU affinity, or the control group's quota if the quota is lower.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        return max(1, min(affinity, -(-int(quota[0]) // int(quota[1]))))
    return max(1, affinity)


def _memory() -> int:
    """Return the bytes of memory that this process may use.

    The number is the machine's memory, or the control group's limit if that is lower.
    """
    limits = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        value = _text(name).strip()
        if value.isdigit():
            limits.append(int(value))
    if not limits and hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=8 << 30)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _words(path: str) -> list[str]:
    return _text(path).split()


def cuda_devices() -> tuple[DeviceFacts, ...]:
    """Return the visible NVIDIA devices in CUDA's order, as nvidia-smi reports them.

    CUDA_VISIBLE_DEVICES is taken into account. The result is () if the driver is not installed.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, *QUERY], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    if done.returncode != 0:
        return ()
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in done.stdout.splitlines()
        if line.count(",") == 4
    ]
    return tuple(_device(row) for row in _visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _visible(rows: list[list[str]], visible: str | None) -> list[list[str]]:
    """Return the rows that CUDA_VISIBLE_DEVICES selects, in its order.

    As in CUDA, the first unknown name ends the list.

    Args:
        rows: cells of each device: index, uuid, name, memory in MiB, compute capability.
        visible: value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if visible is None:
        return rows
    chosen = []
    for wanted in filter(None, (part.strip() for part in visible.split(","))):
        match = [row for row in rows if wanted == row[0] or row[1].startswith(wanted)]
        if not match:
            break
        chosen.append(match[0])
    return chosen


def _device(row: list[str]) -> DeviceFacts:
    """Return the facts of a device from its row of nvidia-smi's table."""
    name = row[2]
    memory = row[3]
    compute = row[4]
    bandwidth = next((value for part, value in BANDWIDTH.items() if part in name), 0.0)
    digits = compute.replace(".", "")
    return DeviceFacts(
        name=name,
        memory=int(float(memory)) << 20 if memory[:1].isdigit() else 0,
        compute=int(digits) if digits.isdigit() else 0,
        bandwidth=bandwidth,
    )


@functools.cache
def installed(name: str) -> str:
    """Return the version of a distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def search_path() -> tuple[tuple[str, int], ...]:
    """Return the entries of ``sys.path`` with their modification times in ns, 0 if they are absent.

    A time changes when something is added to a folder or removed from it.
    """
    return tuple((os.path.abspath(entry), _changed(entry)) for entry in sys.path)


def _changed(entry: str) -> int:
    try:
        return os.stat(entry or ".").st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=4)
def entry_points(
    group: str, path: tuple[tuple[str, int], ...]
) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of a group, by name.

    The result is kept because reading the files of all distributions takes 10 ms in a full
    environment.

    Args:
        group: name of the group.
        path: ``search_path()``; a result is valid for one value of it.
    """
    found = importlib.metadata.entry_points(group=group)
    return tuple(sorted(found, key=lambda point: point.name))


def module_owners(module: str) -> list[str]:
    """Return the names of the installed distributions that ship a top-level module."""
    found = (_owners_in(*entry).get(module, ()) for entry in search_path())
    return [name for names in found for name in names]


@functools.lru_cache(maxsize=64)
def _owners_in(folder: str, changed: int) -> Mapping[str, list[str]]:
    """Return the names of a folder's distributions by the top-level modules that they ship.

    The result is kept because reading the file lists of all distributions takes a third of a second
    in a full environment.

    Args:
        folder: an entry of ``search_path()``.
        changed: its modification time; a result is valid for one value of it.
    """
    found: dict[str, list[str]] = {}
    for one in importlib.metadata.distributions(path=[folder]):
        declared = (one.read_text("top_level.txt") or "").split()
        sources = [file for file in one.files or [] if file.suffix == ".py"]
        tops = {file.parts[0] if len(file.parts) > 1 else file.stem for file in sources}
        for top in declared or tops:
            found.setdefault(top, []).append(one.name)
    return found


def software(names: Iterable[str]) -> SoftwareFacts:
    """Return the software facts of this environment.

    Args:
        names: distributions whose versions are wanted; those that are not installed are left out.

    Returns:
        The versions of distributions and of Python, and the C++ compiler: the one that the variable
        CXX names, else g++ or clang++.
    """
    found = {name: version for name in sorted(set(names)) if (version := installed(name))}
    named = os.environ.get("CXX")
    cxx = next(filter(None, map(shutil.which, (named,) if named else ("g++", "clang++"))), "")
    return SoftwareFacts(python=platform.python_version(), packages=found, cxx=cxx)


def sheet_names() -> list[str]:
    """Return the names of the shipped fact sheets."""
    return sorted(path.stem for path in SHEETS.glob("*.json"))


def read_sheet(name: str) -> HardwareFacts:
    """Return the hardware facts of a fact sheet.

    The sheet's ``packages`` is an object of package versions, or the path of a JSON file with such
    an object, relative to the sheet.

    Args:
        name: name of a shipped sheet ("8xh200") or path of a JSON file.

    Raises:
        FactsError: the sheet cannot be read or is not valid.
    """
    path = SHEETS / f"{name.removesuffix('.json')}.json"
    if not path.is_file():
        path = Path(name).expanduser()
    example = "write the fields of HardwareFacts; core/facts/sheets holds examples"
    try:
        raw = msgspec.json.decode(path.read_bytes())
        if isinstance(raw, dict) and isinstance(raw.get("packages"), str):
            raw["packages"] = _packages_file(path, raw["packages"])
        sheet = msgspec.convert(raw, HardwareFacts)
        unknown = _unknown_keys(raw)
    except OSError as error:
        raise FactsError(
            f"facts sheet {name!r} could not be read: {error.strerror}",
            f"write a file, or one of {', '.join(sheet_names())}",
        ) from None
    except msgspec.DecodeError as error:
        raise FactsError(f"facts sheet {path} is not valid: {error}", example) from None
    if unknown:
        raise FactsError(f"facts sheet {path}: unknown key {unknown[0]!r}", example)
    try:
        return (
            sheet if sheet.packages is None else replace(sheet, packages=normalised(sheet.packages))
        )
    except ValueError as error:
        raise FactsError(
            f"facts sheet {path}: {error}",
            '"packages": {"NAME": "VERSION"}, as `glowplug facts` writes '
            'them ("" for one that is not installed)',
        ) from None


def _packages_file(sheet: Path, name: str) -> Any:
    """Return the content of the JSON file ``name`` beside a sheet.

    Raises:
        FactsError: the file cannot be read.
    """
    try:
        return msgspec.json.decode((sheet.parent / name).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FactsError(
            f"facts sheet {sheet}: packages: {name!r} could not be read: {reason}",
            'a JSON file {"NAME": "VERSION"} beside the sheet, or the table itself',
        ) from None


def normalised(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the packages that a sheet states, by normalised package name.

    An entry with an empty version states that the package is not installed.

    Raises:
        ValueError: an entry's name is not the name of a distribution, its version is not a
            version, or it is stated twice.
    """
    from packaging.version import InvalidVersion, Version  # imported here because it is slow

    found: dict[str, str] = {}
    for name, version in packages.items():
        if not PACKAGE_NAME.fullmatch(name):
            raise ValueError(f"packages: {name!r} is not the name of a package")
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if plain in found:
            raise ValueError(f"packages: {plain} is stated twice")
        found[plain] = version.strip()
        try:
            Version(version or "0")
        except InvalidVersion:
            raise ValueError(f"packages: {version!r}, of {name}, is not a version") from None
    return found


def own_sheet(packages: Iterable[str]) -> HardwareFacts:
    """Return the facts of this machine, for a fact sheet.

    Args:
        packages: distributions whose versions the sheet states, "" for those not installed.
    """
    machine = this_machine()
    held = sorted({card.name for card in machine.devices})
    name = (
        f"{len(machine.devices)} x {', '.join(held)}"
        if held
        else (f"CPU, {machine.cpu_cores} cores, {machine.cpu_memory >> 30} GiB")
    )
    return replace(
        machine,
        name=name,
        packages={package: installed(package) for package in sorted(set(packages))},
    )


def _unknown_keys(sheet: dict[str, Any]) -> list[str]:
    """Return the unknown keys of a sheet and of its devices, sorted."""
    known = FORMER_KEYS | {f.name for f in fields(HardwareFacts)}
    card = {f.name for f in fields(DeviceFacts)}
    return sorted(
        {
            *(set(sheet) - known),
            *(key for device in sheet.get("devices", ()) for key in set(device) - card),
        }
    )

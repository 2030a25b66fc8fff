"""Tables of the fastest GEMM providers, with the versions that they were measured with. No torch.

A file is ``{"versions": {package: version}, "fastest": {problem: {rows: provider}}}``. A table is
used with the minor version of Triton that it was measured with, because tile sizes of our own
kernels are too. With other versions of libraries it is used, and the plan names them. A file
without versions (only the part "fastest") is used like one of the present versions.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from glowplug.core.facts.machine import installed
from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import NoTable

Table = Mapping[str, Mapping[str, str]]  #: {"N=2112,K=7168": {rows: fastest provider}}
TRITON = "triton"  #: package of our own kernels' compiler


@dataclass(frozen=True)
class ProviderTable:
    """A table of the fastest providers on one GPU.

    Attributes:
        fastest: the fastest provider by problem and rows.
        versions: version of each package at the measurement; {}: unknown.
    """

    fastest: Table = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def unfit(self, triton: str) -> str:
        """Return why the table is not used; "" if it is. ``triton``: version; "": not installed."""
        measured = self.versions.get(TRITON, "")
        if not measured or not triton or tuned_tables.minor(measured) == tuned_tables.minor(triton):
            return ""
        return (
            f"measured with Triton {tuned_tables.minor(measured)}, "
            f"here is {tuned_tables.minor(triton)}"
        )

    def changed(self, packages: Mapping[str, str]) -> list[str]:
        """Return the libraries whose installed version is another than the measured one, as text.

        ``packages``: installed versions by package.
        """
        return [
            f"{name} {version} (here {packages[name]})"
            for name, version in self.versions.items()
            if name != TRITON and packages.get(name) and release(packages[name]) != version
        ]


NO_TABLE = ProviderTable()


def file_name(kind: str, card: str) -> str:
    """Return the file name of a table: ``kind`` names the weight format, ``card`` the GPU."""
    return f"{kind},device_name={tuned_tables.spelt(card)}.json"


@cache
def provider_table(kind: str, card: str) -> ProviderTable:
    """Return the table of the GPU ``card``, which is empty if there is none.

    ``kind``: prefix of the table's file name.
    """
    return tuned_tables.first_readable(file_name(kind, card), read) or NO_TABLE


def read(path: Path) -> ProviderTable:
    """Return the table in the file ``path``.

    Raises:
        NoTable: the file is no such table.
    """
    found = tuned_tables.contents(path)
    fastest = found.get("fastest", {} if "versions" in found else found)
    for problem, row in fastest.items():
        if not isinstance(row, dict) or not all(
            rows.isdecimal() and isinstance(name, str) for rows, name in row.items()
        ):
            raise NoTable(f"{path} is not a table of providers: {problem} has no provider by rows")
    return ProviderTable(fastest, found.get("versions", {}))


def versions_here(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of ``packages`` and of Triton and torch, by name.

    They have no local part: torch 2.11.0+cu130 and 2.11.0 count as one version.
    """
    names = dict.fromkeys((TRITON, "torch", *packages))
    found = {name: installed(name) or "" for name in names}
    return {name: release(version) for name, version in found.items() if version}


def release(version: str) -> str:
    """Return ``version`` without its local part."""
    return version.partition("+")[0]


def begun(path: Path, versions: Mapping[str, str]) -> ProviderTable:
    """Return the table that a tuner continues when it writes to ``path``.

    It is the one in the file, or the packaged one of the same name. Measurements with other
    versions are not continued: they are replaced.

    Args:
        path: the file.
        versions: installed versions, from :func:`versions_here`.

    Raises:
        NoTable: the file is no table.
    """
    for place in (path, tuned_tables.FOLDER / path.name):
        if place.is_file() and place.stat().st_size:
            found = read(place)
            same = not found.versions or dict(found.versions) == dict(versions)
            return ProviderTable(found.fastest, versions) if same else ProviderTable({}, versions)
    return ProviderTable({}, versions)


def rows_done(path: Path, problem: str, versions: Mapping[str, str]) -> tuple[int, ...]:
    """Return the row counts of ``problem`` that need not be measured; arguments as in ``begun``."""
    return tuple(int(rows) for rows in begun(path, versions).fastest.get(problem, ()))


def note_provider(
    path: Path, problem: str, rows: int, name: str, versions: Mapping[str, str]
) -> None:
    """Add the fastest provider ``name`` for ``rows`` rows of ``problem`` to the table at ``path``.

    Several processes may write the table at the same time.

    ``versions``: installed versions, from :func:`versions_here`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fastest = dict(begun(path, versions).fastest)
        known = {int(key): value for key, value in fastest.get(problem, {}).items()} | {rows: name}
        fastest[problem] = {str(key): value for key, value in sorted(known.items())}
        tuned_tables.write(path, {"versions": dict(versions), "fastest": fastest})
    provider_table.cache_clear()

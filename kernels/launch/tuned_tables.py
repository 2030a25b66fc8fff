"""Tuned launch configurations: JSON tables, one per problem, card and Triton version.

A table maps a number of rows, as a string, to a configuration. A problem without a table for this
card uses the kernel's own rule: configurations measured on other cards are not used. Tables are
read without torch or Triton.

A table in the user's folder (:func:`user_folder`) replaces the packaged one of the same name. A
file that is no table is ignored with a warning, so that the packaged one, or the rule, applies.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).resolve().parent.parent / "configs"  #: packaged tables
VARIABLE = "GLOWPLUG_CONFIG_DIR"  #: environment variable that names the user's folder
FP8 = "fp8_w8a8"  #: dtype of block FP8 weights and activations in file names
CUBLAS = "cublas"  #: value of "way" in an LM head table where none of our kernels is faster
Config = Mapping[str, Any]
Measured = TypeVar("Measured")


def device_name() -> str:
    """Return the current card's name as table files spell it; "cpu" without a card."""
    import torch

    return spelt(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def triton_version() -> str:
    """Return Triton's major and minor version."""
    import triton

    return minor(triton.__version__)


def spelt(card: str) -> str:
    """Return the name of a card as the names of table files spell it."""
    return card.replace(" ", "_")


def minor(version: str) -> str:
    """Return the major and minor part of a version of Triton, as in file names of tables."""
    return ".".join(version.split(".")[:2])


def file_name(
    problem: str,
    dtype: str,
    block_shape: tuple[int, int] | None = None,
    machine: tuple[str, str] | None = None,
) -> str:
    """Return the file name of a tuned table.

    Args:
        problem: sizes of the problem, such as "N=2112,K=7168" or "E=257,N=2048,H=7168"
        dtype: dtype as file names spell it
        block_shape: shape of FP8 weight blocks
        machine: (name of a card, version of Triton); None: those of this machine
    """
    card, version = (
        (spelt(machine[0]), minor(machine[1])) if machine else (device_name(), triton_version())
    )
    blocks = f",block_shape={list(block_shape)}" if block_shape else ""
    return f"{problem},device_name={card},dtype={dtype}{blocks},triton={version}.json"


def problem(columns: int, depth: int) -> str:
    """Return the name of the GEMM [rows, depth] x [columns, depth]^T in tables and file names."""
    return f"N={columns},K={depth}"


def head_file_name(vocab: int, hidden: int, machine: tuple[str, str] | None = None) -> str:
    """Return the file name of the table for the LM head: float32 logits from bfloat16.

    Its weight is [vocab, hidden]; ``machine`` as in :func:`file_name`.
    """
    return file_name(problem(vocab, hidden), "bfloat16_to_float32", machine=machine)


def user_folder() -> Path:
    """Return the user's folder of tables, which need not exist.

    It is the one that ``GLOWPLUG_CONFIG_DIR`` names, or ``glowplug/tables`` in the user's data
    folder (``XDG_DATA_HOME``, by default ``~/.local/share``).
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "glowplug" / "tables"


def folders() -> tuple[Path, Path]:
    """Return the folders of tables, the one that takes precedence first."""
    return user_folder(), FOLDER


def path_to_write(name: str) -> Path:
    """Return the path to which measurements for the table ``name`` are written.

    It is in the user's folder if ``GLOWPLUG_CONFIG_DIR`` is set, if that folder has the table
    already, or if the folder of packaged tables cannot be written.
    """
    own = user_folder() / name
    named = bool(os.environ.get(VARIABLE))
    return own if named or own.is_file() or not is_writable(FOLDER) else FOLDER / name


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)


def names() -> list[str]:
    """Return the file names in both folders of tables, without repetitions."""
    found = (path.name for folder in folders() for path in folder.glob("*.json"))
    return sorted(set(found))


def unreadable() -> list[str]:
    """Return a message for each file in the folders of tables that is no table."""
    paths = (path for folder in folders() for path in sorted(folder.glob("*.json")))
    found = (_fault(path, path.stat().st_mtime_ns if path.exists() else 0) for path in paths)
    return [fault for fault in found if fault]


@lru_cache(maxsize=1024)
def _fault(path: Path, changed: int) -> str:
    """Return why the file ``path`` is no table; "" if it is one.

    ``changed``: its modification time in ns. Results are kept until it changes, because reading all
    tables takes a fifth of the time of a plan.
    """
    try:
        contents(path)
    except NoTable as error:
        return str(error)
    return ""


class NoTable(ValueError):
    """A file is not a table of measurements. The message names the file."""


def contents(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file ``path``.

    Raises:
        NoTable: the file cannot be read, or is no JSON object whose values are objects.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoTable(f"{path} is not a table of measurements: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise NoTable(f"{path} is not a table of measurements: it maps nothing to objects")
    return found


def by_rows(path: Path) -> dict[int, Config]:
    """Return the table in the file ``path``, in ascending order of rows.

    Raises:
        NoTable: the file is no such table.
    """
    found = contents(path)
    try:
        return {int(rows): found[rows] for rows in sorted(found, key=int)}
    except ValueError as error:
        raise NoTable(f"{path} is not a table of measurements by rows: {error}") from None


def first_readable(name: str, read: Callable[[Path], Measured]) -> Measured | None:
    """Return what ``read`` makes of the table ``name``; None if no folder has it.

    A file for which ``read`` raises NoTable is ignored with a warning.
    """
    for folder in folders():
        path = folder / name
        if path.is_file():
            try:
                return read(path)
            except NoTable as error:
                logging.getLogger("glowplug").warning("%s; it is ignored", error)
    return None


@cache
def table(name: str) -> dict[int, Config] | None:
    """Return the table in file ``name``, in ascending order of rows; None if there is no file."""
    return first_readable(name, by_rows)


def begun(path: Path) -> dict[int, Config]:
    """Return the measurements that a tuner continues when it writes to ``path``.

    They are those of the file, or of the packaged table of the same name; {} if there is neither.

    Raises:
        NoTable: the file is no table; measuring anew must not overwrite it unasked.
    """
    for found in (path, FOLDER / path.name):
        if found.is_file():
            return by_rows(found)
    return {}


def keep(path: Path, table: Mapping[int, Config]) -> None:
    """Write ``table`` to ``path`` atomically, so that a killed run keeps the earlier file."""
    write(path, dict(sorted(table.items())))


def write(path: Path, values: Mapping[Any, Any]) -> None:
    """Write ``values`` to ``path`` as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(values), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def measured_for(
    name: str, rows: int, fits: Callable[[Config], bool] = lambda config: True
) -> Config | None:
    """Return the configuration for ``rows`` in the table ``name``, as :func:`near` does.

    Only configurations that ``fits`` accepts are considered.
    """
    return near({key: each for key, each in (table(name) or {}).items() if fits(each)}, rows)


def near(measured: Mapping[int, Measured], rows: int) -> Measured | None:
    """Return the value measured for the count nearest to ``rows``.

    Returns:
        None if the largest measured count is less than half of ``rows``: what is fastest with few
            rows can be slow with many, and a tuner that ran out of time has measured few rows only.
    """
    return nearest(measured, rows) if measured and rows <= 2 * max(measured) else None


def nearest(table: Mapping[int, Measured], rows: int) -> Measured:
    """Return the value for the count nearest to ``rows``; of two equally near, for the larger."""
    return table[min(table, key=lambda measured: (abs(measured - rows), -measured))]

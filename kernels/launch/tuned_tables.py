"""Tuned launch configurations: JSON tables beside the kernels, one a problem, card and Triton
version.

A table maps a number of rows, as a string, to a configuration. A problem without one for this card
uses the kernel's
own rule: configurations measured elsewhere are not trusted. Tables are read without torch or
Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).resolve().parent.parent / "configs"
FP8 = "fp8_w8a8"  #: weights and activations in block FP8, in names of files
CUBLAS = "cublas"  #: a head's "way" at numbers of rows for which no kernel of ours is faster
Config = Mapping[str, Any]
Measured = TypeVar("Measured")


def device_name() -> str:
    """The current card as file names spell it; "cpu" without one."""
    import torch

    return spelt(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def triton_version() -> str:
    import triton

    return minor(triton.__version__)


def spelt(card: str) -> str:
    """As in names of files."""
    return card.replace(" ", "_")


def minor(version: str) -> str:
    """Major and minor version, which tables are made for."""
    return ".".join(version.split(".")[:2])


def file_name(
    problem: str,
    dtype: str,
    block_shape: tuple[int, int] | None = None,
    machine: tuple[str, str] | None = None,
) -> str:
    """``problem``: its sizes, "N=2112,K=7168" or "E=257,N=2048,H=7168". ``machine``: name of a card
    and version of Triton; None: this one's."""
    card, version = (
        (spelt(machine[0]), minor(machine[1])) if machine else (device_name(), triton_version())
    )
    blocks = f",block_shape={list(block_shape)}" if block_shape else ""
    return f"{problem},device_name={card},dtype={dtype}{blocks},triton={version}.json"


def problem(columns: int, depth: int) -> str:
    """A product [rows, depth] x [columns, depth]^T, as tables and their files name it."""
    return f"N={columns},K={depth}"


def head_file_name(vocab: int, hidden: int, machine: tuple[str, str] | None = None) -> str:
    """Of the head's scores: float32 from bfloat16."""
    return file_name(problem(vocab, hidden), "bfloat16_to_float32", machine=machine)


@cache
def table(name: str) -> dict[int, Config] | None:
    """The table in file ``name``, rows in ascending order; None: there is none."""
    path = FOLDER / name
    if not path.is_file():
        return None
    return {
        int(rows): config
        for rows, config in sorted(json.loads(path.read_text()).items(), key=lambda i: int(i[0]))
    }


def keep(path: Path, table: Mapping[int, Config]) -> None:
    """Write ``table`` to ``path``, whole or not at all: a run that is killed leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    part.replace(path)


def measured_for(
    name: str, rows: int, fits: Callable[[Config], bool] = lambda config: True
) -> Config | None:
    """The configuration for ``rows`` in the table of this name, of those that ``fits``; None where
    no more than half as many were measured, since tiles for few rows are no good for many."""
    found = {measured: config for measured, config in (table(name) or {}).items() if fits(config)}
    return nearest(found, rows) if found and rows <= 2 * max(found) else None


def nearest(table: Mapping[int, Measured], rows: int) -> Measured:
    """What was measured for the number of rows nearest to ``rows``; the larger of two as near."""
    return table[min(table, key=lambda measured: (abs(measured - rows), -measured))]

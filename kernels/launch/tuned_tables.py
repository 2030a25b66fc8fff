"""Tuned launch configurations: JSON tables, one per problem, card and Triton version.

A table maps a number of rows, as a string, to a configuration. A problem without a table for this
card uses the kernel's own rule: configurations measured on other cards are not used. Tables are
read without torch or Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).resolve().parent.parent / "configs"
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


@cache
def table(name: str) -> dict[int, Config] | None:
    """Return the table in file ``name``, in ascending order of rows; None if there is no file."""
    path = FOLDER / name
    if not path.is_file():
        return None
    return {
        int(rows): config
        for rows, config in sorted(json.loads(path.read_text()).items(), key=lambda i: int(i[0]))
    }


def keep(path: Path, table: Mapping[int, Config]) -> None:
    """Write ``table`` to ``path`` atomically, so that a killed run keeps the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
    part.replace(path)


def measured_for(
    name: str, rows: int, fits: Callable[[Config], bool] = lambda config: True
) -> Config | None:
    """Return the configuration for ``rows`` in the table ``name``.

    Only configurations that ``fits`` accepts are considered.

    Returns:
        the nearest measured configuration; None if the largest measured number of rows is less than
            half of ``rows``, since tiles for few rows are bad for many
    """
    found = {measured: config for measured, config in (table(name) or {}).items() if fits(config)}
    return nearest(found, rows) if found and rows <= 2 * max(found) else None


def nearest(table: Mapping[int, Measured], rows: int) -> Measured:
    """Return the value for the count nearest to ``rows``; of two equally near, for the larger."""
    return table[min(table, key=lambda measured: (abs(measured - rows), -measured))]

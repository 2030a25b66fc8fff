"""SGLang's all-reduce beside this engine's, for ``bench kernels --collectives``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench import peer_scripts
from glowplug.entrypoints.bench.others.layout import SGLANG
from glowplug.entrypoints.bench.others.peer_engines import ENGINES, interpreters, version
from glowplug.entrypoints.bench.ranks.exchange_times import ALL_REDUCE

SCRIPT = Path(peer_scripts.__file__).with_name("sglang_all_reduce.py")
LIMIT = 300.0  #: seconds for SGLang to compile its kernels and measure all sizes
LOG_LINES = 3  #: last lines of the output that name the reason of a failure


def given(peers: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return SGLang's interpreter and its version, from values ``sglang=PYTHON``.

    Returns:
        (None, {}) for no values.

    Raises:
        ValueError: SGLang is not installed there, or another engine is named.
    """
    python = interpreters(peers).get(SGLANG)
    if python is None:
        if peers:
            raise ValueError(f"--peer {peers[0]}: only exchanges of sglang are measured")
        return None, {}
    return python, {SGLANG: version(ENGINES[SGLANG], python)}


def all_reduce_rows(python: str, ranks: int, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield SGLang's rows of captured all-reduces, by its own communicators.

    Args:
        python: interpreter that has SGLang, or a script that starts one.
        ranks: number of GPUs.
        sizes: bytes of the tensors; those of less than two numbers are left out.

    Raises:
        GlowplugError: SGLang failed or reached the limit.
    """
    words = [python, str(SCRIPT), "--ranks", str(ranks), "--bytes"]
    words += [str(size) for size in sizes if size >= 4]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GlowplugError(str(error)) from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-LOG_LINES:]
        raise GlowplugError(f"exit status {done.returncode}: {' | '.join(last)}")
    for line in done.stdout.splitlines():
        if line.startswith('{"bytes"'):
            yield _row(json.loads(line), ranks)


def _row(found: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return a line of the script as a row of ``bench kernels --collectives``."""
    traffic = 2 * found["bytes"] * (ranks - 1) / ranks
    return {
        "provider": SGLANG,
        "operation": ALL_REDUCE,
        "axis": "tp",
        "ranks": ranks,
        "tokens": 0,
        **found,
        "gb_s": traffic / found["us"] / 1e3,
        "captured": True,
    }

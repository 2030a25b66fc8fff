"""Tuning on several GPUs: one process per GPU, on this host or in a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_workers(labels: Sequence[str], gpus: int, seconds: float, ray: bool) -> None:
    """Run this process's ``tune`` command once per GPU, each with its own share of the tables.

    Args:
        labels: labels of the tables to tune.
        gpus: number of GPUs.
        seconds: time limit of each run.
        ray: run the commands as tasks of a Ray cluster instead of processes of this host.

    Raises:
        ValueError: fewer GPUs are visible than ``gpus``, Ray is missing, or a process failed.
    """
    shares = [list(labels[start::gpus]) for start in range(gpus)]
    commands = [_command(share, seconds) for share in shares if share]
    if ray:
        _by_ray(commands)
        return
    running = [
        subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": card})
        for command, card in zip(commands, _cards(gpus))
    ]
    failed = [process.args for process in running if process.wait()]
    if failed:
        raise ValueError(f"{len(failed)} of {len(running)} tuning processes failed")


def _cards(count: int) -> list[str]:
    """Return the names of the first ``count`` visible GPUs for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else [str(number) for number in range(count)]
    if len(cards) < count:
        raise ValueError(
            f"--gpus {count}: only {len(cards)} are visible (CUDA_VISIBLE_DEVICES={visible})"
        )
    return cards[:count]


def _command(labels: list[str], seconds: float) -> list[str]:
    """Return this process's command line, limited to one GPU and the tables ``labels``.

    The appended options override earlier ones: the last value of an option counts.
    """
    words = [word for word in sys.argv[1:] if word != "--ray"]
    return [
        sys.executable,
        "-m",
        "glowplug",
        *words,
        "--gpus",
        "1",
        "--max-minutes",
        f"{seconds / 60:.3f}",
        "--tables",
        *labels,
    ]


def _by_ray(commands: list[list[str]]) -> None:
    """Run each command as a Ray task with one GPU.

    Tables that a task wrote on another host are then written on this host as well.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(
            "--ray needs Ray: pip install 'glowplug[ray]', or leave --ray out"
        ) from None
    ray.init(ignore_reinit_error=True, log_to_driver=True)
    task: Any = ray.remote(num_gpus=1)(_task)
    for written in ray.get([task.remote(command) for command in commands]):
        for name, text in written.items():
            Path(name).write_text(text)


def _task(command: list[str]) -> dict[str, str]:
    """Run one command; return the text of each table that the command has written, by path."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = {
        line.split(" in ", 1)[1].split(", missing")[0]
        for line in done.stdout.splitlines()
        if " in /" in line
    }
    return {path: Path(path).read_text() for path in paths if Path(path).is_file()}

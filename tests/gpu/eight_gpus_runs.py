"""The runs of several GPUs: command lines, each with a limit of its own, and their measurement."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from glowplug.entrypoints.cli.exit_codes import exit_at_sigterm
from tests.gpu.eight_gpus import (
    ACCEPT_LENGTH,
    EAGER,
    TINY,
    V3,
    V3_16,
    V3_SLICE,
    Setup,
    layouts,
    of_ablation,
    of_lite,
    of_v3,
    write_model,
)

RANDOM = ("--load-format", "dummy")
ENDING = 30.0  #: seconds for a program to end by itself after its limit
LOG_LINES = 20  #: last lines of a failed run's log that the record keeps


@dataclass(frozen=True)
class Load:
    """Sizes of the measurements.

    Attributes:
        batches: sequences of the static batches.
        prompt: tokens of a prompt.
        output: tokens of an answer of a server.
        steps: tokens that a static batch generates.
        concurrency: requests at a time.
        requests: requests at each concurrency, as a multiple of it.
        ablation: prompts, their tokens and answers' tokens of a row of the ablation.
        bytes: sizes of the exchanged tensors.
        model: the model of all setups; "": their own.
        capture: graphs are captured in every row of the ablation.
    """

    batches: tuple[int, ...]
    prompt: int
    output: int
    steps: int
    concurrency: tuple[int, ...]
    requests: int
    ablation: tuple[int, int, int]
    bytes: tuple[int, ...]
    model: str = ""
    capture: bool = False


LARGE = Load(
    (1, 8, 32, 128),
    1024,
    256,
    64,
    (1, 32, 256, 1024),
    4,
    (1024, 760, 460),  # the mean lengths of the published ablation
    tuple(4096 << power for power in range(12)),  # 4 KB to 8 MB
)
SMALL = Load((1, 2), 16, 4, 4, (1, 2), 1, (4, 16, 4), (4096,), TINY)


@dataclass(frozen=True)
class Run:
    """A program that is measured.

    Attributes:
        name: name in the record.
        words: arguments after the interpreter.
        result: file with its results, JSON or lines of JSON.
        limit: seconds after which it is ended.
    """

    name: str
    words: tuple[str, ...]
    result: Path
    limit: float


def command(run: Run) -> str:
    """Return the command line of a run."""
    return shlex.join(("python", *run.words))


def runs(
    folder: Path, ranks: int, load: Load, tokenizer: Path, sglang: str | None
) -> Iterator[Run]:
    """Yield the runs of a machine with ``ranks`` GPUs, the most important ones first.

    Args:
        folder: place of models and results.
        tokenizer: folder of the models' tokenizer.
        ranks: number of GPUs.
        load: sizes of the measurements.
        sglang: interpreter that has SGLang; None: it is not measured.
    """
    own = {8: V3, 4: V3_16, 2: V3_SLICE}[ranks]
    setups = list(of_v3(load.model or own, ranks))
    if ranks == 4 and not load.model:
        setups += of_lite(ranks)
    for model in {setup.model for setup in setups}:
        write_model(model, folder, tokenizer)
    yield from _exchanges(folder, setups[0].model, ranks, load)
    for setup in setups:
        yield _static(folder, setup, load)
        yield _served(folder, setup, load, sglang)
    for setup in of_ablation(load.model or own, ranks):
        yield _ablation(folder, setup, load)


def _exchanges(folder: Path, model: str, ranks: int, load: Load) -> Iterator[Run]:
    """Yield the runs that time the exchanges of tensors, and of experts' tokens."""
    names = list(layouts(ranks).items())
    for what, (_, layout) in {"all-reduce": names[0], "expert exchange": names[-1]}.items():
        result = folder / f"{what.replace(' ', '-')}.json"
        words = (
            *("-m", "glowplug", "bench", "kernels", "--collectives"),
            *("--model", str(folder / model)),
            *layout.ours(),
            *("--collective-bytes", *map(str, load.bytes), "--output-file", str(result)),
        )
        yield Run(f"{what}, {ranks} ranks", words, result, 600.0)


def _file(folder: Path, setup: Setup, kind: str) -> Path:
    return folder / f"{setup.name}, {kind}".replace(", ", "-").replace(" ", "_")


def _static(folder: Path, setup: Setup, load: Load) -> Run:
    """Return the run of static batches of this engine."""
    result = _file(folder, setup, "static").with_suffix(".json")
    simulated = (
        *("--set", "speculative.adaptive=false"),
        *("--simulate-accept-length", str(ACCEPT_LENGTH)),
    )
    words = (
        *("-m", "glowplug", "bench", "one-batch"),
        *("--model", str(folder / setup.model), *RANDOM, *setup.options),
        *("--batch-size", *map(str, load.batches), "--input-len", str(load.prompt)),
        *("--output-len", str(load.steps), *(simulated if setup.drafts else ())),
        *("--save", str(result)),
    )
    return Run(f"{setup.name}, static", words, result, 1200.0)


def _served(folder: Path, setup: Setup, load: Load, sglang: str | None) -> Run:
    """Return the run of servers, and of static batches where SGLang's tool has the layout."""
    assert setup.layout is not None, "a setup of the ablation has no layout of other engines"
    target = _file(folder, setup, "versus")
    static = sglang is not None and not setup.drafts and setup.layout.groups == 1
    words = [
        *("-m", "glowplug", "bench", "versus"),
        *("--model", str(folder / setup.model), *setup.layout.ours()),
        *("--batch-size", *(map(str, load.batches) if static else ())),
        *("--output-len", str(load.steps)),
        *("--serving", *map(str, load.concurrency), "--input-len", str(load.prompt)),
        *("--num-prompts", *(str(load.requests * level) for level in load.concurrency)),
        *("--serving-output-len", str(load.output)),
        *("--options", f"glowplug.static={shlex.join(RANDOM)}"),
        *("--options", f"glowplug.serving={shlex.join(RANDOM)}"),
        *("--output-dir", str(target), "--timeout", "1800"),
    ]
    if setup.drafts:
        words += ["--draft-steps", "1", "--simulate-accept-length", str(ACCEPT_LENGTH)]
    if sglang is not None:
        words += ["--peer", f"sglang={sglang}", "--options", f"sglang={shlex.join(RANDOM)}"]
    limit = 3600.0 if sglang is None else 7200.0
    return Run(f"{setup.name}, serving", tuple(words), target / "serving.json", limit)


def _ablation(folder: Path, setup: Setup, load: Load) -> Run:
    """Return the run of a row of the published ablation: offline throughput."""
    result = _file(folder, setup, "offline").with_suffix(".jsonl")
    prompts, length, output = load.ablation
    options = [word for word in setup.options if word != EAGER or not load.capture]
    words = (
        *("-m", "glowplug", "bench", "offline"),
        *("--model", str(folder / setup.model), *RANDOM, *options),
        *("--num-prompts", str(prompts), "--random-input-len", str(length)),
        *("--random-output-len", str(output), "--output-file", str(result)),
    )
    return Run(setup.name, words, result, 1200.0)


# ---- measurement ---------------------------------------------------------------------------------


def measure(run: Run, folder: Path, limit: float) -> dict[str, Any]:
    """Run a program and return its entry of the record. SIGTERM ends it, too.

    Args:
        run: the program.
        folder: place of its log.
        limit: seconds after which it is ended.
    """
    run.result.unlink(missing_ok=True)
    log = folder / "logs" / f"{run.result.parent.name}-{run.result.stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file, exit_at_sigterm():
        program = subprocess.Popen(
            [sys.executable, *run.words],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = _status(program, limit)
        finally:
            _end(program)
    found: dict[str, Any] = {
        "state": "limit" if status is None else "failed" if status else "done",
        "date": datetime.now().isoformat(timespec="seconds"),
        "command": command(run),
        "seconds": round(time.monotonic() - began, 1),
        "limit": limit,
    }
    if status:
        found["status"] = status
    if found["state"] != "done":
        found["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    if run.result.exists():
        found["result"] = _read(run.result)
    return found


def _status(program: subprocess.Popen[bytes], limit: float) -> int | None:
    """Return the exit status of a program; None if it reached its limit."""
    try:
        return program.wait(limit)
    except subprocess.TimeoutExpired:
        return None


def _end(program: subprocess.Popen[bytes]) -> None:
    """End a program and the processes that it started, first with SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(program.pid, number)
        with suppress(subprocess.TimeoutExpired):
            program.wait(ENDING)


def _read(file: Path) -> Any:
    """Return the content of a file of JSON, or of lines of JSON."""
    text = file.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]

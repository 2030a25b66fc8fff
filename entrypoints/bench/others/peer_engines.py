"""How this engine, SGLang and vLLM are started on one checkpoint for ``glowplug bench versus``.

Peers run in their own interpreters, so that nobody's pins meet; what they measure with is their own
tool where they have one (SGLang's ``bench_one_batch``) and ``vllm_steps.py`` beside this file where
they have none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS = "glowplug"  #: this engine's name among them


@dataclass(frozen=True)
class StaticRun:
    """Shapes of the static batches: lengths in tokens, ids below ``vocab``; ``result``: where the
    figures go.
    """

    model: str
    batch_sizes: tuple[int, ...]
    input_len: int
    output_len: int
    vocab: int
    repeat: int
    result: Path


@dataclass(frozen=True)
class ServedRun:
    """A server on ``port`` for as many requests at a time as ``concurrency``, of ``context`` tokens
    at most.
    """

    model: str
    port: int
    concurrency: int
    context: int


@dataclass(frozen=True)
class PeerEngine:
    """Attributes:
    name: as in ``--peer``.
    distribution: whose version is recorded.
    mark: what a static run's log says right before it begins to measure.
    ready: the server's route that answers 200 once it is loaded.
    backend: of ``glowplug bench serving``.
    static: argv behind the interpreter for static batches.
    server: argv behind the interpreter for a server.
    in_log: a static run's figures are in its log, and in no file.
    environment: for both.
    """

    name: str
    distribution: str
    mark: str
    ready: str
    backend: str
    static: Callable[[StaticRun], list[str]]
    server: Callable[[ServedRun], list[str]]
    in_log: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _ours_static(run: StaticRun) -> list[str]:
    return [
        "-m",
        "glowplug",
        "bench",
        "one-batch",
        "--model",
        run.model,
        *_shapes(run, "--batch-size"),
        "--repeat",
        str(run.repeat),
        "--save",
        str(run.result),
    ]


def _ours_server(run: ServedRun) -> list[str]:
    return [
        "-m",
        "glowplug",
        "serve",
        "--model",
        run.model,
        "--port",
        str(run.port),
        "--context-length",
        str(run.context),
        "--max-running-requests",
        str(run.concurrency),
    ]


def _sglang_static(run: StaticRun) -> list[str]:
    """Each batch size twice, and of a point's two runs the better one counts: the first warms its
    shape up.
    """
    twice = [size for size in run.batch_sizes for _ in range(2)]
    return [
        "-m",
        "sglang.bench_one_batch",
        "--model-path",
        run.model,
        "--batch-size",
        *map(str, twice),
        "--input-len",
        str(run.input_len),
        "--output-len",
        str(run.output_len),
        "--cuda-graph-bs",
        *map(str, run.batch_sizes),
        "--piecewise-cuda-graph-tokens",
        str(run.input_len),
        "--result-filename",
        str(run.result),
    ]


def _sglang_server(run: ServedRun) -> list[str]:
    return [
        "-m",
        "sglang.launch_server",
        "--model-path",
        run.model,
        "--port",
        str(run.port),
        "--context-length",
        str(run.context),
        "--max-running-requests",
        str(run.concurrency),
        "--cuda-graph-max-bs",
        str(run.concurrency),
    ]


def _vllm_static(run: StaticRun) -> list[str]:
    script = Path(__file__).with_name("vllm_steps.py")
    return [
        str(script),
        run.model,
        *_shapes(run, "--batch-size"),
        "--vocab-size",
        str(run.vocab),
        "--repeat",
        str(run.repeat),
    ]


def _vllm_server(run: ServedRun) -> list[str]:
    return [
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        run.model,
        "--port",
        str(run.port),
        "--max-model-len",
        str(run.context),
        "--max-num-seqs",
        str(run.concurrency),
    ]


def _shapes(run: StaticRun, sizes: str) -> list[str]:
    return [
        sizes,
        *map(str, run.batch_sizes),
        "--input-len",
        str(run.input_len),
        "--output-len",
        str(run.output_len),
    ]


ENGINES = {
    engine.name: engine
    for engine in (
        PeerEngine(
            OURS, "glowplug", "Warmup (batch", "/ready", "glowplug", _ours_static, _ours_server
        ),
        PeerEngine(
            "sglang",
            "sglang",
            "Warmup ...",
            "/health",
            "sglang-oai",
            _sglang_static,
            _sglang_server,
            environment={"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
        ),
        PeerEngine(
            "vllm",
            "vllm",
            "engine loaded",
            "/health",
            "vllm",
            _vllm_static,
            _vllm_server,
            in_log=True,
            environment={"VLLM_NO_USAGE_STATS": "1"},
        ),
    )
}


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """Engine -> interpreter, ours first, from ``NAME=PYTHON``. ValueError for an engine that is not
    known.
    """
    found = {OURS: sys.executable}
    for pair in given:
        name, equals, python = pair.partition("=")
        if not equals or not python or name not in ENGINES or name in found:
            known = ", ".join(sorted(set(ENGINES) - {OURS}))
            raise ValueError(f"--peer {pair}: expected NAME=PYTHON, each of {known} once")
        found[name] = python
    return found


def version(engine: PeerEngine, python: str) -> str:
    """Of the engine that an interpreter has. ValueError where it has none."""
    code = f"import importlib.metadata as m; print('version', m.version({engine.distribution!r}))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except OSError as error:
        raise ValueError(f"--peer {engine.name}={python}: {error}") from error
    said = [
        line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("version ")
    ]
    if done.returncode or not said:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(
            f"--peer {engine.name}={python}: {engine.distribution} is not installed there ({last})"
        )
    return said[-1]

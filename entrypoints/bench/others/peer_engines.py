"""Command lines that start this engine, SGLang and vLLM for ``glowplug bench versus``.

Each peer runs in an interpreter of its own, so that the pinned dependencies cannot conflict. Static
batches are measured with the peer's own tool where there is one (SGLang's ``bench_one_batch``),
else with a script of ``bench.peer_scripts``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from glowplug.core.step.draft_counts import rates_of_length
from glowplug.entrypoints.bench import peer_scripts
from glowplug.entrypoints.bench.others.drafts import simulation_settings
from glowplug.entrypoints.bench.others.layout import (
    ONE_GPU,
    ONE_RANK,
    OURS,
    SGLANG,
    VLLM,
    RankLayout,
)


@dataclass(frozen=True)
class StaticRun:
    """The static batches that each engine measures.

    Attributes:
        model: folder of the checkpoint.
        batch_sizes: number of sequences of each batch.
        input_len: prompt tokens.
        output_len: tokens to generate.
        vocab: upper bound of the random token ids.
        repeat: measured runs of each shape.
        result: file for the results.
        layout: how the ranks share the model.
        exchange_times: record of measured exchanges between the ranks, for this engine's floors;
            None for none.
    """

    model: str
    batch_sizes: tuple[int, ...]
    input_len: int
    output_len: int
    vocab: int
    repeat: int
    result: Path
    layout: RankLayout = ONE_RANK
    exchange_times: Path | None = None


@dataclass(frozen=True)
class ComparedDrafts:
    """The drafts of every engine: chains by the checkpoint's own next-token layer.

    Attributes:
        steps: drafts of a verify step.
        accept_length: accept length that every engine simulates; None: each its own.
    """

    steps: int
    accept_length: float | None = None

    def ours(self) -> list[str]:
        """Return the options of ``glowplug serve``."""
        words = self._fixed()
        if self.accept_length is None:
            return words
        for setting in simulation_settings(rates_of_length(self.accept_length)):
            words += ["--set", setting]
        return words

    def _fixed(self) -> list[str]:
        """Return the options of drafts whose size is always that of the other engines."""
        words = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(self.steps)]
        return [*words, "--set", "speculative.adaptive=false"]

    def ours_offline(self) -> list[str]:
        """Return the options of ``glowplug bench offline``."""
        words = self._fixed()
        if self.accept_length is None:
            return words
        return [*words, "--simulate-accept-length", str(self.accept_length)]

    def sglang(self) -> list[str]:
        """Return the options of SGLang's server; ``sglang_environment`` has the acceptance."""
        return [
            *("--speculative-algorithm", "NEXTN"),
            *("--speculative-num-steps", str(self.steps)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(self.steps + 1)),
        ]

    def sglang_environment(self) -> dict[str, str]:
        """Return the environment variables by which SGLang simulates the acceptance.

        NOTE: with SGLang's default token mode every accepted token has one and the same id, so that
        all rows would choose the same experts.
        """
        if self.accept_length is None:
            return {}
        return {
            "SGLANG_SIMULATE_ACC_LEN": str(self.accept_length),
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }

    def vllm(self) -> list[str]:
        """Return the options of vLLM's server."""
        config: dict[str, object] = {"method": "mtp", "num_speculative_tokens": self.steps}
        if self.accept_length is not None:
            config["rejection_sample_method"] = "synthetic"
            config["synthetic_acceptance_length"] = self.accept_length
        return ["--speculative-config", json.dumps(config)]


@dataclass(frozen=True)
class ServedRun:
    """The server that each engine starts.

    Attributes:
        model: folder of the checkpoint.
        port: TCP port.
        concurrency: most requests at a time.
        context: most tokens of a request.
        layout: how the ranks share the model.
        drafts: its drafts; None: none.
    """

    model: str
    port: int
    concurrency: int
    context: int
    layout: RankLayout = ONE_RANK
    drafts: ComparedDrafts | None = None


@dataclass(frozen=True)
class PeerEngine:
    """An engine to compare, and the commands that run it.

    Attributes:
        name: the name in ``--peer``.
        distribution: the package whose version is recorded.
        mark: text that a static run writes to its log right before it begins to measure.
        ready: route of the server that answers with status 200 once the model is loaded.
        backend: backend of ``glowplug bench serving`` for this server.
        static: makes the arguments after the interpreter for static batches.
        server: makes the arguments after the interpreter for a server.
        in_log: True if the results of a static run are in its log instead of a file.
        environment: additional environment variables of both kinds of run.
        draft_environment: makes those of a server with drafts.
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
    draft_environment: Callable[[ComparedDrafts], Mapping[str, str]] = lambda drafts: {}


def _ours_static(run: StaticRun) -> list[str]:
    """Return the arguments of ``glowplug bench one-batch``."""
    times = [] if run.exchange_times is None else ["--exchange-times", str(run.exchange_times)]
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
        *run.layout.ours(),
        *times,
    ]


def _ours_server(run: ServedRun) -> list[str]:
    """Return the arguments of ``glowplug serve``."""
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
        *run.layout.ours(),
        *(run.drafts.ours() if run.drafts else []),
    ]


def _sglang_static(run: StaticRun) -> list[str]:
    """Return the arguments for SGLang's ``bench_one_batch``, with each batch size twice.

    The first run of a batch size warms it up. The better run counts.
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
        *run.layout.sglang(),
    ]


def _sglang_server(run: ServedRun) -> list[str]:
    """Return the arguments of SGLang's server."""
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
        *run.layout.sglang(),
        *(run.drafts.sglang() if run.drafts else []),
    ]


def _vllm_static(run: StaticRun) -> list[str]:
    """Return the arguments of ``vllm_steps.py``."""
    script = Path(peer_scripts.__file__).with_name("vllm_steps.py")
    return [
        str(script),
        run.model,
        *_shapes(run, "--batch-size"),
        "--vocab-size",
        str(run.vocab),
        "--repeat",
        str(run.repeat),
        *run.layout.vllm(),
    ]


def _vllm_server(run: ServedRun) -> list[str]:
    """Return the arguments of vLLM's server."""
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
        *run.layout.vllm(),
        *(run.drafts.vllm() if run.drafts else []),
    ]


def _shapes(run: StaticRun, sizes: str) -> list[str]:
    """Return options for the batch sizes and lengths. ``sizes``: name of the batch-size option."""
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
            SGLANG,
            "sglang",
            "Warmup ...",
            "/health",
            "sglang-oai",
            _sglang_static,
            _sglang_server,
            environment={"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"},
            draft_environment=ComparedDrafts.sglang_environment,
        ),
        PeerEngine(
            VLLM,
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


ENGINES[ONE_GPU] = replace(ENGINES[OURS], name=ONE_GPU)


def interpreters(given: Sequence[str], one_gpu: bool = False) -> dict[str, str]:
    """Parse ``NAME=PYTHON`` pairs into Python interpreters by engine, this engine first.

    ``one_gpu``: True: this engine on one GPU is one more engine.

    Raises:
        ValueError: an engine is unknown or given twice, or a pair is malformed.
    """
    found = dict.fromkeys((OURS, ONE_GPU)[: 1 + one_gpu], sys.executable)
    for pair in given:
        name, equals, python = pair.partition("=")
        if not equals or not python or name not in (SGLANG, VLLM) or name in found:
            known = f"{SGLANG}, {VLLM}"
            raise ValueError(
                f"--peer {pair}: expected NAME=PYTHON, with each of {known} at most once"
            )
        found[name] = python
    return found


def version(engine: PeerEngine, python: str) -> str:
    """Return the version of the engine that is installed for an interpreter.

    Raises:
        ValueError: the engine is not installed there, or the interpreter cannot be run.
    """
    code = f"import importlib.metadata as m; print('version', m.version({engine.distribution!r}))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except OSError as error:
        raise ValueError(f"--peer {engine.name}={python}: {error}") from error
    versions = [
        line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("version ")
    ]
    if done.returncode or not versions:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(
            f"--peer {engine.name}={python}: {engine.distribution} is not installed there ({last})"
        )
    return versions[-1]

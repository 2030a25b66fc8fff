"""The load of ``glowplug bench versus`` on servers, run with this project's own benchmarks.

The same requests are sent to every engine's server, and to this engine without a server.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glowplug.entrypoints.bench.others.peer_engines import PeerEngine
from glowplug.entrypoints.bench.others.turns import MeasuredProgram

WARM_PROMPTS = 64  #: requests of the warm-up pass over a server
WARM_TOKENS = 16  #: output tokens of each warm-up request


@dataclass(frozen=True)
class OwnLoad:
    """A load of requests of equal length, sent at several concurrencies one after the other.

    Attributes:
        input_len: prompt tokens of a request.
        output_len: output tokens of a request.
        levels: the concurrencies.
        prompts: number of requests at each level.
        folder: folder of the logs.
        timeout: seconds that one benchmark may take.
    """

    input_len: int
    output_len: int
    levels: tuple[int, ...]
    prompts: tuple[int, ...]
    folder: Path
    timeout: float

    @property
    def concurrency(self) -> int:
        """The highest of the load's concurrencies."""
        return max(self.levels)

    def on_server(self, engine: PeerEngine, port: int, result: Path) -> None:
        """Send a server a warm-up pass that is not recorded, then the load at every concurrency.

        Args:
            engine: the engine that serves.
            port: TCP port of its server.
            result: file for the results.

        Raises:
            RuntimeError: the benchmark failed.
        """
        warm = ["--num-prompts", str(WARM_PROMPTS), "--max-concurrency", str(WARM_PROMPTS)]
        self._serving(f"warm-{engine.name}", engine, port, WARM_TOKENS, warm)
        levels = [
            "--num-prompts",
            *map(str, self.prompts),
            "--max-concurrency",
            *map(str, self.levels),
            "--output-file",
            str(result),
        ]
        self._serving(f"load-{engine.name}", engine, port, self.output_len, levels)

    def offline(self, model: str, context: int, options: Sequence[str]) -> Path:
        """Run the requests of the highest concurrency on this engine without a server.

        Args:
            model: folder of the checkpoint.
            context: longest sequence in tokens.
            options: further options of the benchmark.

        Returns:
            The file with the result.

        Raises:
            RuntimeError: the benchmark failed.
        """
        result = self.folder / "offline-glowplug.jsonl"
        result.unlink(missing_ok=True)
        words = {
            "--model": model,
            "--num-prompts": dict(zip(self.levels, self.prompts))[self.concurrency],
            "--input-len": self.input_len,
            "--output-len": self.output_len,
            "--context-length": context,
            "--max-running-requests": self.concurrency,
            "--output-file": result,
        }
        self._run("offline", ["offline", *_options(words), *options])
        return result

    def _serving(
        self, log: str, engine: PeerEngine, port: int, output_len: int, more: Sequence[str]
    ) -> None:
        """Run ``bench serving`` on a server. ``more``: further options of ``bench serving``."""
        words = {
            "--backend": engine.backend,
            "--base-url": f"http://127.0.0.1:{port}",
            "--random-input-len": self.input_len,
            "--random-output-len": output_len,
            "--random-range-ratio": 1,
        }
        self._run(log, ["serving", *_options(words), "--disable-tqdm", *more])

    def _run(self, log: str, words: Sequence[str]) -> None:
        """Run a ``glowplug bench`` command. ``words``: its arguments; ``log``: name of the log."""
        command = [sys.executable, "-m", "glowplug", "bench", *words]
        path = self.folder / f"{log}.log"
        with MeasuredProgram(f"bench {words[0]}", command, path, {}) as program:
            program.finish(self.timeout)


def _options(values: dict[str, object]) -> list[str]:
    """Return ``values``, a mapping from option name to value, as command-line arguments."""
    return [word for name, value in values.items() for word in (name, str(value))]

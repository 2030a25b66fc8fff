"""Every admitted combination of plugins on one GPU, each started on a small random model and
compared with plain torch.

In 16 and 8 bits greedy tokens may differ at a near tie, so the reference (float32, torch, eager, no
speculation) scores a combination's tokens in the same context. Tokens of a correct engine are the
reference's best or nearly as good, and its log-probabilities differ from the reference's only by
the error of the number format.

``python -m tests.gpu.combinations --output docs/benchmarks/gpu-combinations.json --jobs 6`` runs
all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glowplug import LLM, SamplingParams
from glowplug.core.plugin.registry import load_plugins
from tests.gpu.cells import (
    AGREEING,
    DENSE,
    KINDS,
    KV_TOKENS,
    VOCAB,
    Cell,
    admitted,
    matrix,
    pairwise,
    write_models,
)
from tests.gpu.record import left_by

PAGE, TOKENS = 64, 24


def prompts() -> list[list[int]]:
    """Return prompts of lengths around the page size, half of them with a common beginning of more
    than a page.
    """
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 2 * PAGE).tolist()
    lengths = (1, 5, PAGE - 1, PAGE, PAGE + 1, 100, 2 * PAGE + 3, 20)
    return [
        (shared[: length - 1] + rng.integers(2, VOCAB, length).tolist())[:length]
        if i % 2
        else rng.integers(2, VOCAB, length).tolist()
        for i, length in enumerate(lengths)
    ]


class Reference:
    """Plain torch in float32, one engine for each model and format of its weights; it scores the
    tokens of other engines.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._engines: dict[str, LLM] = {}
        self._known: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}

    def engine(self, cell: Cell) -> LLM:
        """Return the engine for ``cell``'s weights; quantising while loading gives weights of
        its own.
        """
        model, name = cell.model, cell.weights
        if name not in self._engines:
            config = Cell(
                model,
                "torch_mha" if model in KINDS else "torch_mla",
                ops="torch",
                radix=False,
                overlap=False,
            ).config(self._folder, self._device)
            config |= {"dtype": "float32", "memory": {"kv_tokens": 4 * KV_TOKENS}}
            for scheme in (scheme for word, scheme in DENSE.items() if word in name):
                config["quantization"] = scheme
            self._engines[name] = LLM(**config, plugins=AGREEING)
        return self._engines[name]

    def score(self, cell: Cell, prompt: list[int], tokens: list[int]) -> list[tuple[float, float]]:
        """Return (log-probability, the best one) at each of ``tokens`` after ``prompt``."""
        key = cell.weights, (*prompt, *tokens)
        if key not in self._known:
            params = SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True
            )
            scored = self.engine(cell).generate([[*prompt, *tokens]], params)[0].prompt_logprobs
            assert scored is not None
            first = len(prompt) - 1
            self._known[key] = [
                (own, best[0]) for own, best in zip(scored.token[first:], scored.top[first:])
            ]
        return self._known[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


@dataclass(frozen=True)
class Outcome:
    """The result of one cell.

    Attributes:
        same: Share of tokens that are the reference's very best.
        regret: See Bound.
        shift: See Bound.
        accepted: Tokens that a verified row yields.
    """

    same: float
    regret: float
    shift: float
    accepted: float
    seconds: float


def run(cell: Cell, reference: Reference, folder: Path, device: str) -> Outcome:
    """Start an engine, serve two waves of prompts and compare. Raise AssertionError, or any error
    of the engine.
    """
    started = time.monotonic()
    asked = prompts()
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(**cell.config(folder, device), plugins=AGREEING) as llm:
        first = llm.generate(asked, greedy)
        again = llm.generate(asked, greedy.replace(logprobs=1))
        stats = llm.stats
        llm.control("check")
    regrets, shifts = [], []
    for prompt, plain, scored in zip(asked, first, again):
        assert len(plain.token_ids) == len(scored.token_ids) == TOKENS, (
            f"{cell.name}: a request ended early"
        )
        assert scored.logprobs is not None
        known = reference.score(cell, prompt, plain.token_ids)
        regrets += [best - own for own, best in known]
        known = reference.score(cell, prompt, scored.token_ids)
        shifts += [abs(said - own) for said, (own, _) in zip(scored.logprobs.token, known)]
    verified = stats.drafted_tokens / max(1, cell.steps)
    outcome = Outcome(
        float(np.mean(np.array(regrets) < 1e-6)),
        float(np.mean(regrets)),
        float(np.median(shifts)),
        1 + stats.accepted_tokens / verified if verified else 1.0,
        time.monotonic() - started,
    )
    bound = cell.bound(device)
    assert outcome.regret <= bound.regret, (
        f"{cell.name}: tokens are {outcome.regret:.3f} worse than the reference's"
    )
    assert outcome.shift <= bound.shift, (
        f"{cell.name}: log-probabilities are {outcome.shift:.3f} off"
    )
    return outcome


# ---- the whole matrix ----------------------------------------------------------------------------

Done = tuple[Cell, Outcome | None, str]  #: a cell, its result, or the reason why there is none

_state: dict[str, Any] = {}


def _prepare(device: str) -> None:
    folder = write_models(Path(tempfile.mkdtemp(prefix="glowplug-cells-")))
    _state.update(folder=folder, device=device, reference=Reference(folder, device))


def attempt(cell: Cell) -> Done:
    try:
        return cell, run(cell, _state["reference"], _state["folder"], _state["device"]), ""
    except Exception as error:
        return cell, None, f"{type(error).__name__}: {error}"[:400]


def whole(cells: Sequence[Cell], device: str, jobs: int, seconds: float) -> Iterator[Done]:
    """Yield results as they are ready, until ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    if jobs == 1:
        _prepare(device)
        for cell in cells:
            if time.monotonic() > deadline:
                return
            yield attempt(cell)
        return
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _prepare, (device,)
    ) as pool:
        waiting = [pool.submit(attempt, cell) for cell in cells]
        for done in as_completed(waiting):
            if not done.cancelled():
                yield done.result()
            if time.monotonic() > deadline:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def summary(done: Sequence[Done], by: str) -> dict[str, dict[str, float]]:
    """Return by one axis the runs, the failures, and the worst values of the bounded figures."""
    found: dict[str, dict[str, float]] = {}
    for cell, outcome, _ in done:
        entry = found.setdefault(
            str(getattr(cell, by)),
            {"run": 0, "failed": 0, "worst_regret": 0, "worst_shift": 0, "least_same": 1},
        )
        entry["run"] += 1
        entry["failed"] += outcome is None
        if outcome is not None:
            entry |= {
                "worst_regret": max(entry["worst_regret"], round(outcome.regret, 4)),
                "worst_shift": max(entry["worst_shift"], round(outcome.shift, 4)),
                "least_same": min(entry["least_same"], round(outcome.same, 3)),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="cells whose names match this")
    parser.add_argument(
        "--pairs", action="store_true", help="a sample that covers every pair of values"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument(
        "--left-by",
        type=Path,
        help="of a run's output: only cells that it did not reach, or saw fail",
    )
    options = parser.parse_args()
    started, plugins = time.time(), load_plugins(AGREEING)
    with tempfile.TemporaryDirectory() as folder:
        cells = [
            cell for cell in matrix(plugins, options.device) if re.search(options.only, cell.name)
        ]
        fitting, reasons = admitted(cells, plugins, write_models(Path(folder)), options.device)
    chosen = (
        pairwise(fitting, 1) if options.pairs else random.Random(1).sample(fitting, len(fitting))
    )
    if options.left_by:
        left = left_by(options.left_by)
        chosen = [cell for cell in chosen if cell.name in left]
    print(f"{len(cells)} cells, {len(fitting)} admitted, {len(chosen)} to run", flush=True)
    from glowplug.entrypoints.bench.others.conditions import conditions
    from glowplug.entrypoints.bench.others.report import write_json

    said = conditions(options.device) | {
        "command": "python -m tests.gpu.combinations " + " ".join(sys.argv[1:]),
        "cells": len(cells),
        "admitted": len(fitting),
        "refused": reasons,
    }
    done: list[Done] = []
    found = said | record(done, chosen, started)
    for cell, outcome, why in whole(chosen, options.device, options.jobs, options.seconds):
        done.append((cell, outcome, why))
        if why:
            print("FAILED", cell.name, why, flush=True)
        found = said | record(done, chosen, started)
        if options.output:  # written as results come: a stopped run keeps them
            write_json(options.output, found)
    print(
        json.dumps(
            {key: found[key] for key in ("cells", "admitted", "run", "failed", "seconds", "by")}
        )
    )
    return 1 if found["failed"] else 0


def record(done: Sequence[Done], chosen: Sequence[Cell], started: float) -> dict[str, Any]:
    """Return the record of the cells run so far; ``complete`` once all ``chosen`` ones were run,
    which are otherwise named in ``not_run``.
    """
    failures = {cell.name: why for cell, _, why in done if why}
    run = {cell for cell, _, _ in done}
    return {
        "complete": len(done) == len(chosen),
        "run": len(done),
        "failed": len(failures),
        "failures": failures,
        "not_run": [cell.name for cell in chosen if cell not in run],
        "seconds": round(time.time() - started),
        "by": {
            axis: summary(done, axis)
            for axis in ("model", "attention", "graphs", "steps", "quantization")
        },
    }


if __name__ == "__main__":
    sys.exit(main())

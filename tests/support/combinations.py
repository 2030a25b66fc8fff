"""Every combination of ranks, exchanges, drafts and scheduling that fits four ranks, against one
rank without any; and every layout of 8 and of 16 ranks.

``python -m tests.support.combinations --output docs/benchmarks/combinations.json`` runs the whole
matrix, ``--parts layouts`` only the layouts of 8 and 16 ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glowplug.core.errors import PlanRefused
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.step.messages import Abort, Submit, packed_ids
from glowplug.core.step.request import SamplingParams
from glowplug.core.testing.harness.drive import Collected
from glowplug.core.testing.harness.ranks import THREADS, RankSet, rank_plan
from tests.support.layouts import layout
from tests.support.tiny import write_config

VOCAB = 158  #: not divisible by four
SEED = 1  #: of SHAPE's weights: the reference's closest decision is far from a tie
PAGE, ROWS, KV_TOKENS, CONTEXT = 4, 5, 96, 84
#: least distance between the best two log-probabilities of a greedy token; float32 sums differ by
#: 1e-5
GAP = 1e-3
ABORTED = 7  #: the request that is aborted midway
SHAPE = {"vocab_size": VOCAB, "num_nextn_predict_layers": 1}
#: heads and experts for 16 ranks
WIDE_SHAPE = {
    **SHAPE,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
}
WIDE_SEED = 3
MANY = (8, 16)  #: numbers of ranks whose layouts are tested with few other options


@dataclass(frozen=True)
class Combination:
    """One cell. ``ep`` and ``dp`` of 0 are off; ``exchange`` is ep_moe's, ``copies`` its number of
    redundant experts; ``topk`` above 1 drafts trees.
    """

    tp: int = 1
    ep: int = 0
    dp: int = 0
    steps: int = 0
    radix: bool = True
    chunked: bool = False
    overlap: bool = True
    exchange: str = "auto"
    copies: int = 0
    topk: int = 1

    @property
    def fits(self) -> bool:
        """Return whether groups and blocks divide the tp ranks; moving tokens to their experts'
        ranks needs whole experts.
        """
        whole = self.ep == self.tp or self.exchange in ("auto", "all_gather")
        return self.tp % max(1, self.ep) == 0 and self.tp % max(1, self.dp) == 0 and whole

    @property
    def name(self) -> str:
        said = [
            f"tp{self.tp}",
            f"ep{self.ep}" if self.ep else "",
            f"dp{self.dp}" if self.dp else "",
            f"nextn{self.steps}" if self.steps else "",
            f"topk{self.topk}" if self.topk > 1 else "",
            "" if self.radix else "no_radix",
            "chunked" if self.chunked else "",
            "" if self.overlap else "no_overlap",
            self.exchange if self.exchange != "auto" else "",
            f"copies{self.copies}" if self.copies else "",
        ]
        return "-".join(part for part in said if part)

    def config(self, folder: Path, **more: Any) -> dict[str, Any]:
        experts: dict[str, Any] = {"exchange": self.exchange} if self.exchange != "auto" else {}
        if self.copies:
            experts["redundant_experts"] = self.copies
        parallel = layout(self.tp, self.ep, self.dp, **experts)
        config: dict[str, Any] = {
            "model": str(folder),
            "skip_tokenizer": True,
            "dtype": "float32",
            "device": "cpu",
            "context_length": CONTEXT,
            "memory": {"kv_tokens": KV_TOKENS},
            "attention": {"page_size": PAGE},
            "cache": {"use": "radix" if self.radix else "none"},
            "scheduler": {
                "max_running_requests": ROWS,
                "chunk_size": 7 if self.chunked else CONTEXT,
                "overlap": self.overlap,
            },
        }
        if parallel:
            config["parallel"] = parallel
        if self.steps:
            config["speculative"] = {
                "use": "nextn",
                "adaptive": False,
                "steps": self.steps,
                "topk": self.topk,
            }
        return {**config, **more}


def matrix() -> list[Combination]:
    """Return the whole matrix, admitted or not."""
    axes = (
        (1, 2, 4),
        (0, 2, 4),
        (0, 2, 4),
        (0, 1, 2, 3),
        (True, False),
        (False, True),
        (True, False),
    )
    return [Combination(*values) for values in itertools.product(*axes)]


def exchanges() -> list[Combination]:
    """Return each exchange by name; the matrix leaves the choice to "auto"."""
    names = ("all_gather", "all_to_all", "all_to_all_static")
    layouts = ((2, 2, 0), (2, 2, 2), (4, 2, 2), (4, 4, 0), (4, 4, 2), (4, 4, 4))
    return [
        Combination(tp, ep, dp, steps, chunked=bool(steps), exchange=name)
        for (tp, ep, dp), steps, name in itertools.product(layouts, (0, 2), names)
    ]


def trees() -> list[Combination]:
    """Return drafts in the form of trees in every layout."""
    layouts = itertools.product((1, 2, 4), (0, 2, 4), (0, 2, 4))
    return [
        Combination(
            tp, ep, dp, steps, chunked=bool(steps % 2), overlap=steps != 2, topk=2 + steps % 3
        )
        for (tp, ep, dp), steps in itertools.product(layouts, (1, 2, 3))
    ]


def layouts() -> list[Combination]:
    """Return every layout of 8 and 16 ranks, with and without drafts."""
    sizes = (0, 2, 4, 8, 16)
    found = [
        Combination(tp, ep, dp, steps, chunked=bool(steps), overlap=steps != 1)
        for tp, ep, dp, steps in itertools.product(MANY, sizes, sizes, (0, 1, 3))
    ]
    return [one for one in found if one.fits and max(one.ep, one.dp) <= one.tp]


def sample(count: int, seed: int) -> list[Combination]:
    """Return admitted combinations of several ranks or with drafts, every layout about equally
    often.
    """
    rng = random.Random(seed)
    admitted = [one for one in matrix() + exchanges() + trees() if one.fits]
    by_layout: dict[tuple[int, int, int], list[Combination]] = {}
    for one in admitted:
        by_layout.setdefault((one.tp, one.ep, one.dp), []).append(one)
    layouts = list(itertools.islice(itertools.cycle(sorted(by_layout)), count))
    return [rng.choice(by_layout[layout]) for layout in layouts]


# ---- the requests --------------------------------------------------------------------------------


def requests() -> Iterator[tuple[int, Submit]]:
    """Return (turn, request): uneven prompts, half of which share a beginning; more than there are
    rows; several waves.
    """
    rng = np.random.default_rng(17)
    shared = rng.integers(2, VOCAB, 24).tolist()
    lengths = [1, 2, 4, 5, 8, 13, 17, 21, 24, 25, 30, 33, 38, 41]
    outputs = [30, 3, 17, 36, 1, 24, 33, 9, 40, 28, 2, 20, 31, 7]
    for i, (length, most) in enumerate(zip(lengths, outputs, strict=True)):
        own = rng.integers(2, VOCAB, length).tolist()
        prompt = (shared[: length - 1] + own)[:length] if i % 2 else own
        params: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
        if i % 7 == 5:  # drawn, with every feature that reads earlier tokens
            params = {
                "temperature": 0.9,
                "top_p": 0.95,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.4,
            }
        elif i % 7 == 2:  # greedy, without repeating itself, drafts included
            params |= {"frequency_penalty": 0.8, "repetition_penalty": 1.2}
        turn = 0 if i < 8 else 3 * (i - 6)
        stops = list(range(2, 14)) if i % 3 == 0 else []
        yield (
            turn,
            Submit(
                i + 1,
                packed_ids(prompt),
                SamplingParams(max_tokens=most, seed=i, **params),
                stop_ids=stops,
            ),
        )


def drive(ranks: RankSet) -> dict[int, Collected]:
    """Submit the waves, abort one request midway, and run to the end; every page must be free again
    on every rank.
    """
    waves: dict[int, list[Any]] = {}
    for turn, request in requests():
        waves.setdefault(turn, []).append(request)
    waves.setdefault(14, []).append(Abort([ABORTED]))
    for turn in range(max(waves) + 1):
        ranks.turn(waves.get(turn, []))
    collected = ranks.run()
    ranks.check_idle()
    ranks.control("check")
    return collected


@cache
def plugins() -> PluginSet:
    return load_plugins([THREADS, "tests.plugins.agreeing"], entry_points=False)


@dataclass(frozen=True)
class Reference:
    """The results of one rank without speculation; ``gap`` is that of the closest greedy
    decision.
    """

    folder: Path
    collected: dict[int, Collected]
    gap: float
    preemptions: int
    weights: dict[str, Any]


def reference(folder: Path, shape: Mapping[str, int] = SHAPE, seed: int = SEED) -> Reference:
    """Run the smallest possible engine on the same requests.

    ``shape`` changes the model's configuration; ``seed`` is that of its weights.
    """
    write_config(folder, "v3", **shape)
    weights = {"use": "agreeing", "seed": seed}
    gaps: list[float] = []
    config = Combination().config(folder, weights=weights)
    with RankSet(rank_plan(config, plugins()), plugins()) as ranks:
        note_gaps(ranks, gaps)
        collected = drive(ranks)
        preemptions = ranks.engines[0].scheduler.load().preemptions
        return Reference(folder, collected, min(gaps), preemptions, weights)


def note_gaps(ranks: RankSet, gaps: list[float]) -> None:
    """Record the distance between the best two tokens of each logits row."""
    model = ranks.engines[0].runner.model
    logits = model.logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
        top = scores.topk(2).values
        gaps.extend((top[:, 0] - top[:, 1]).tolist())
        return scores

    model.logits = noted  # type: ignore[method-assign]


def run(one: Combination, known: Reference, **more: Any) -> dict[int, Collected]:
    """Run a combination and compare. Raise the plan's PlanRefused, or AssertionError where results
    differ.

    ``more`` replaces sections of the configuration.
    """
    config = one.config(known.folder, **{"weights": known.weights, **more})
    with RankSet(rank_plan(config, plugins()), plugins()) as ranks:
        collected = drive(ranks)
    for id, want in known.collected.items():
        got = collected[id]
        if id == ABORTED:  # its length depends on the number of tokens that a step yields
            short, long = sorted((got.tokens, want.tokens), key=len)
            assert long[: len(short)] == short, (
                f"{one.name}: request {id} differs before it is aborted"
            )
            continue
        assert got.tokens == want.tokens, (
            f"{one.name}: request {id} yields {got.tokens}, not {want.tokens}"
        )
        assert got.finished == want.finished, (
            f"{one.name}: request {id} ends {got.finished}, not {want.finished}"
        )
        assert np.allclose(got.logprobs, want.logprobs, atol=1e-3), (
            f"{one.name}: request {id}: log-probabilities"
        )
    return collected


# ---- the whole matrix ----------------------------------------------------------------------------

_known: dict[bool, Reference] = {}  #: references of this process: of the wide shape, of the other


def _prepare(folder: str) -> None:
    torch.set_num_threads(1)
    own = Path(folder) / f"{multiprocessing.current_process().pid}"
    _known[False] = reference(own)
    _known[True] = reference(own / "wide", WIDE_SHAPE, WIDE_SEED)


def outcome(one: Combination) -> tuple[str, str, str]:
    """Return (name, "same" | "refused" | "failed", why)."""
    try:
        run(one, _known[one.tp in MANY])
    except PlanRefused as refused:
        return one.name, "refused" if not one.fits else "failed", str(refused)
    except Exception as error:
        return one.name, "failed", f"{type(error).__name__}: {error}"
    return (
        one.name,
        "same" if one.fits else "failed",
        "" if one.fits else "was expected to be refused",
    )


def whole(cells: Sequence[Combination], jobs: int) -> dict[str, Any]:
    """Return counts, failures and seconds of ``cells``."""
    started = time.time()
    spawn = multiprocessing.get_context("spawn")
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, spawn, _prepare, (folder,)) as pool,
    ):
        for done in as_completed([pool.submit(outcome, one) for one in cells]):
            results.append(done.result())
            if results[-1][1] == "failed":
                print(*results[-1], flush=True)
            if len(results) % 50 == 0:
                print(f"{len(results)} of {len(cells)} cells", flush=True)
    kinds = [kind for _, kind, _ in results]
    return {
        "cells": len(results),
        "admitted": sum(one.fits for one in cells),
        "refused": kinds.count("refused"),
        "run": kinds.count("same") + kinds.count("failed"),
        "same_tokens": kinds.count("same"),
        "failed": kinds.count("failed"),
        "seconds": round(time.time() - started),
        "failures": sorted((name, why) for name, kind, why in results if kind == "failed"),
    }


PARTS = {"matrix": matrix, "exchanges": exchanges, "layouts": layouts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the outcome as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="cells whose names match this")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    found = {
        "command": "python -m " + " ".join(["tests.support.combinations", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "processes": options.jobs,
    }
    for part in options.parts:
        cells = [one for one in PARTS[part]() if re.search(options.only, one.name)]
        found[part] = whole(cells, options.jobs)
        print(
            part,
            json.dumps({key: value for key, value in found[part].items() if key != "failures"}),
            flush=True,
        )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(found[part]["failed"] for part in options.parts) else 0


if __name__ == "__main__":
    sys.exit(main())

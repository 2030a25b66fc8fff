"""Every admitted combination of plugins on one GPU, each booted on a small random model and held against plain torch.

The models have the head sizes that attention libraries are built for, one dense and one MoE layer, and weights of which
drafts hit now and then. In 16 and 8 bits greedy tokens may fall either way at a near tie, so a combination's tokens are
scored by the reference (float32, torch, eager, no speculation) on the very same context: a right engine's tokens are
the reference's best or as good as, and its log-probabilities are the reference's within what the number format costs.

``python -m tests.gpu_combinations --output docs/benchmarks/gpu-combinations.json --jobs 6`` runs all of them.
"""
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glowplug import LLM, PlanRefused, SamplingParams
from glowplug.core.plugins import PluginSet, load_plugins
from glowplug.core.resolve import plan as make_plan
from tests.tiny import CONFIGS

VOCAB, CONTEXT, PAGE, ROWS, KV_TOKENS, TOKENS, SEED = 509, 256, 64, 6, 2048, 24, 5
AGREEING = ("tests.agreeing",)
WEIGHTS = {"use": "agreeing", "seed": SEED, "spread": 1.2}
_MLA = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB, "torch_dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "v2": {**CONFIGS["v2"], **_MLA},
    "v3": {**CONFIGS["v3"], **_MLA, "q_lora_rank": 256, "num_nextn_predict_layers": 1},
    "v3_fp8": {**CONFIGS["v3_fp8"], **_MLA, "q_lora_rank": 256, "num_nextn_predict_layers": 1},
    "v2_awq": {**CONFIGS["v2"], **_MLA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                                                               "zero_point": True, "version": "gemm"}},
    "v3_int8": {**CONFIGS["v3"], **_MLA, "q_lora_rank": 256, "quantization_config": {"quant_method": "w8a8_int8"}},
    "llama": {**CONFIGS["llama"], "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 128, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": VOCAB,
              "torch_dtype": "bfloat16"},
}
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "head_dim", "q_lora_rank")
KINDS = {"llama": "mha"}
SCHEMES = {"v3_fp8": "block_fp8", "v2_awq": "awq", "v3_int8": "w8a8_int8"}  #: of checkpoints that come quantised
NARROW = {"v2_awq": "v2", "v3_int8": "v3"}  #: models of which each backend runs once, and whose sizes theirs are
#: how the reference keeps quantised weights: dequantised, and activations as they are
DENSE: dict[str, dict[str, Any]] = {"fp8": {"use": "block_fp8", "activations": "none"},
                                    "int8": {"use": "w8a8_int8", "activations": "none"},
                                    "awq": {"use": "awq", "dequantize": True}}


@dataclass(frozen=True)
class Bound:
    """What a number format may cost: ``regret`` is how far a chosen token's log-probability lies below the reference's
    best (mean over all tokens), ``shift`` how far the engine's own log-probability lies from the reference's (median).
    """

    regret: float
    shift: float


BOUNDS = {"exact": Bound(1e-3, 1e-3), "bfloat16": Bound(0.02, 0.03), "fp8": Bound(0.08, 0.12)}


@dataclass(frozen=True)
class Cell:
    """One combination. ``steps``: of NextN, 0 for none. ``provider``: who multiplies ("experts=cutlass")."""

    model: str
    attention: str
    quantization: str = "auto"
    ops: str = "auto"
    kv_dtype: str = "auto"
    absorbed: str = "auto"
    provider: str = "auto"
    graphs: str = "eager"
    steps: int = 0
    radix: bool = True
    chunked: bool = False
    overlap: bool = True

    @property
    def name(self) -> str:
        chosen = [value for value in (self.quantization, self.ops, self.kv_dtype) if value != "auto"]
        chosen += [f"absorbed_{self.absorbed}"] if self.absorbed != "auto" else []
        chosen += [self.provider.replace("=", "_")] if self.provider != "auto" else []
        said = [self.model, self.attention, *chosen, self.graphs, f"nextn{self.steps}" if self.steps else "",
                "" if self.radix else "no_radix", "chunked" if self.chunked else "",
                "" if self.overlap else "no_overlap"]
        return "-".join(part for part in said if part)

    @property
    def weights(self) -> str:
        """Name of the weights: of the model, as the scheme keeps them."""
        return f"{self.model}-{self.quantization}"

    def bound(self, device: str) -> Bound:
        if device == "cpu":
            return BOUNDS["exact"]
        rough = any(name in f"{self.weights} {self.kv_dtype}" for name in ("fp8", "int8"))
        return BOUNDS["fp8" if rough else "bfloat16"]

    def config(self, folder: Path, device: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model": str(folder / self.model), "skip_tokenizer": True, "device": device, "context_length": CONTEXT,
            "dtype": "float32" if device == "cpu" else "bfloat16", "memory": {"kv_tokens": KV_TOKENS},
            "attention": {"use": self.attention, "kv_dtype": self.kv_dtype,
                          **({} if self.absorbed == "auto" else {"absorbed": self.absorbed})}, "weights": WEIGHTS,
            "cache": {"use": "radix" if self.radix else "none"}, "graphs": {"use": self.graphs},
            "scheduler": {"max_running_requests": ROWS, "chunk_size": 48 if self.chunked else CONTEXT,
                          "overlap": self.overlap},
        }
        if self.quantization != "auto":
            found["quantization"] = {"use": self.quantization}
        if self.provider != "auto":
            option, _, value = self.provider.partition("=")
            found["quantization"] = {"use": SCHEMES[self.model], option: value}
        if self.ops != "auto":
            found["ops"] = {"use": self.ops}
        if self.steps:
            found["speculative"] = {"use": "nextn", "steps": self.steps}
        return found


def named(plugins: PluginSet, slot: str, device: str, kind: str = "") -> list[str]:
    """Components of a slot that run on ``device``, and of attention those of ``kind``."""
    return [component.name for component, _, _ in plugins.components(slot) if device in component.offers.devices
            and (not kind or kind in getattr(component.offers, "kinds", ()))]


def providers(plugins: PluginSet, scheme: str) -> list[str]:
    """Everybody whom the scheme's options can name, as ``option=value``."""
    options = next(component.options for component, _, _ in plugins.components("quantization")
                   if component.name == scheme)
    return [f"{option}={value}" for option in ("gemm", "experts") if option in options.model_fields
            for value in typing.get_args(options.model_fields[option].annotation) if value != "auto"]


def matrix(plugins: PluginSet, device: str) -> list[Cell]:
    """The whole of it, admitted or not."""
    found = []
    absorbing = [component.name for component, _, _ in plugins.components("attention")
                 if "absorbed" in component.options.model_fields and device in component.offers.devices]
    for model in MODELS:
        backends = named(plugins, "attention", device, KINDS.get(model, "mla"))
        if model in SCHEMES:
            own = "triton_mla" if "triton_mla" in backends else backends[0]
            found += [Cell(model, own, provider=provider, graphs=graph, steps=steps) for provider, graph, steps in
                      itertools.product(providers(plugins, SCHEMES[model]), named(plugins, "graphs", device),
                                        (0, 1) if model.startswith("v3") else (0,))]
        if model in NARROW:
            found += [Cell(model, backend, graphs=graph) for backend, graph in
                      itertools.product(backends, named(plugins, "graphs", device))]
            continue
        quantizations = ["auto"] if model.endswith("fp8") else ["auto", "block_fp8"]
        graphs = named(plugins, "graphs", device)
        switches = itertools.product((0, 1, 3), (True, False), (False, True), (True, False))
        for backend, quantization, graph, (steps, *rest) in itertools.product(backends, quantizations, graphs,
                                                                              list(switches)):
            found.append(Cell(model, backend, quantization, graphs=graph, steps=steps, radix=rest[0],
                              chunked=rest[1], overlap=rest[2]))
        found += [Cell(model, backend, "w8a8_int8", graphs=graph) for backend, graph in
                  itertools.product(backends, graphs) if not model.endswith("fp8")]
        found += [Cell(model, backend, ops=ops, graphs=graph) for backend, ops, graph in
                  itertools.product(backends, named(plugins, "ops", device), graphs)]
        found += [Cell(model, backend, absorbed="fp8", graphs=graph, steps=steps) for backend, graph, steps in
                  itertools.product(absorbing if model == "v3_fp8" else (), graphs, (0, 1))]
        found += [Cell(model, backend, kv_dtype="fp8_e4m3", graphs=graph, steps=steps) for backend, graph, steps in
                  itertools.product(backends, graphs, (0, 1))]
    return found


def admitted(cells: Sequence[Cell], plugins: PluginSet, folder: Path, device: str) -> tuple[list[Cell], dict[str, int]]:
    """Cells whose plan is made, and the reasons of the others with their counts."""
    kept, reasons = [], {}
    for cell in cells:
        try:
            make_plan(cell.config(folder, device), plugins=plugins, contributed={"executor.use": "inline"})
            kept.append(cell)
        except PlanRefused as refused:
            why = f"{refused.refusals[0].field}: {refused.refusals[0].reason}"
            reasons[why] = reasons.get(why, 0) + 1
    return kept, reasons


def pairwise(cells: Sequence[Cell], seed: int, most: int = 1 << 30) -> list[Cell]:
    """A sample in which every two values that occur together in a cell do so at least once, as far as ``most`` goes."""
    rng = random.Random(seed)
    pool = list(cells)
    rng.shuffle(pool)
    pairs = {cell: _pairs(cell) for cell in pool}
    open_ = set().union(*pairs.values()) if pool else set()
    chosen: list[Cell] = []
    while open_ and len(chosen) < most:
        best = max(pool, key=lambda cell: len(pairs[cell] & open_))
        chosen.append(best)
        open_ -= pairs[best]
    return chosen


def _pairs(cell: Cell) -> frozenset[Any]:
    values = list(asdict(cell).items())
    return frozenset(itertools.combinations(values, 2))


def write_models(folder: Path, small: bool = False) -> Path:
    """``small``: heads of no library's size, for a CPU."""
    for name, sized in MODELS.items():
        tiny = CONFIGS[NARROW.get(name, name)]
        config = {**sized, **{key: tiny[key] for key in SIZES if key in tiny}} if small else sized
        if small and name == "v2_awq":  # groups that its small matrices are whole numbers of
            config["quantization_config"] = {**config["quantization_config"], "group_size": 32}
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


# ---- running --------------------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    """Lengths around the page size, half of them with a common beginning of a page and more."""
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 2 * PAGE).tolist()
    lengths = (1, 5, PAGE - 1, PAGE, PAGE + 1, 100, 2 * PAGE + 3, 20)
    return [(shared[: length - 1] + rng.integers(2, VOCAB, length).tolist())[:length] if i % 2 else
            rng.integers(2, VOCAB, length).tolist() for i, length in enumerate(lengths)]


class Reference:
    """Plain torch in float32, one engine for each model and format of its weights; it scores tokens others chose."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._engines: dict[str, LLM] = {}
        self._known: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}

    def engine(self, cell: Cell) -> LLM:
        """That of ``cell``'s weights: quantised while loading they are other ones."""
        model, name = cell.model, cell.weights
        if name not in self._engines:
            config = Cell(model, "torch_mha" if model in KINDS else "torch_mla", ops="torch", radix=False,
                          overlap=False).config(self._folder, self._device)
            config |= {"dtype": "float32", "memory": {"kv_tokens": 4 * KV_TOKENS}}
            for scheme in (scheme for word, scheme in DENSE.items() if word in name):
                config["quantization"] = scheme
            self._engines[name] = LLM(**config, plugins=AGREEING)
        return self._engines[name]

    def score(self, cell: Cell, prompt: list[int], tokens: list[int]) -> list[tuple[float, float]]:
        """(its log-probability, the best one) at each of ``tokens`` behind ``prompt``."""
        key = cell.weights, (*prompt, *tokens)
        if key not in self._known:
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
            scored = self.engine(cell).generate([[*prompt, *tokens]], params)[0].prompt_logprobs
            assert scored is not None
            first = len(prompt) - 1
            self._known[key] = [(own, best[0]) for own, best in zip(scored.token[first:], scored.top[first:])]
        return self._known[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


@dataclass(frozen=True)
class Outcome:
    """Of one cell. ``same``: share of tokens that are the reference's very best; ``regret``, ``shift``: see Bound;
    ``accepted``: tokens a verified row yields."""

    same: float
    regret: float
    shift: float
    accepted: float
    seconds: float


def run(cell: Cell, reference: Reference, folder: Path, device: str) -> Outcome:
    """Boot, serve two waves of prompts, compare. AssertionError, or whatever the engine raises."""
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
        assert len(plain.token_ids) == len(scored.token_ids) == TOKENS, f"{cell.name}: a request ended early"
        assert scored.logprobs is not None
        known = reference.score(cell, prompt, plain.token_ids)
        regrets += [best - own for own, best in known]
        known = reference.score(cell, prompt, scored.token_ids)
        shifts += [abs(said - own) for said, (own, _) in zip(scored.logprobs.token, known)]
    verified = stats.drafted_tokens / max(1, cell.steps)
    outcome = Outcome(float(np.mean(np.array(regrets) < 1e-6)), float(np.mean(regrets)), float(np.median(shifts)),
                      1 + stats.accepted_tokens / verified if verified else 1.0, time.monotonic() - started)
    bound = cell.bound(device)
    assert outcome.regret <= bound.regret, f"{cell.name}: tokens are {outcome.regret:.3f} worse than the reference's"
    assert outcome.shift <= bound.shift, f"{cell.name}: log-probabilities are {outcome.shift:.3f} off"
    return outcome


# ---- the whole matrix -----------------------------------------------------------------------------------------------

Done = tuple[Cell, Outcome | None, str]  #: a cell, what came of it, or why nothing did

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
    """Outcomes as they come, until ``seconds`` are over."""
    deadline = time.monotonic() + seconds
    if jobs == 1:
        _prepare(device)
        for cell in cells:
            if time.monotonic() > deadline:
                return
            yield attempt(cell)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare, (device,)) as pool:
        waiting = [pool.submit(attempt, cell) for cell in cells]
        for done in as_completed(waiting):
            if not done.cancelled():
                yield done.result()
            if time.monotonic() > deadline:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def summary(done: Sequence[Done], by: str) -> dict[str, dict[str, float]]:
    """By one axis: runs, failures, and the worst of what is bounded."""
    found: dict[str, dict[str, float]] = {}
    for cell, outcome, _ in done:
        entry = found.setdefault(str(getattr(cell, by)), {"run": 0, "failed": 0, "worst_regret": 0, "worst_shift": 0,
                                                          "least_same": 1})
        entry["run"] += 1
        entry["failed"] += outcome is None
        if outcome is not None:
            entry |= {"worst_regret": max(entry["worst_regret"], round(outcome.regret, 4)),
                      "worst_shift": max(entry["worst_shift"], round(outcome.shift, 4)),
                      "least_same": min(entry["least_same"], round(outcome.same, 3))}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="cells whose names match this")
    parser.add_argument("--pairs", action="store_true", help="a sample that covers every pair of values")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    options = parser.parse_args()
    started, plugins = time.time(), load_plugins(AGREEING)
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell for cell in matrix(plugins, options.device) if re.search(options.only, cell.name)]
        fitting, reasons = admitted(cells, plugins, write_models(Path(folder)), options.device)
    chosen = pairwise(fitting, 1) if options.pairs else random.Random(1).sample(fitting, len(fitting))
    print(f"{len(cells)} cells, {len(fitting)} admitted, {len(chosen)} to run", flush=True)
    from glowplug.entrypoints.bench.conditions import conditions
    from glowplug.entrypoints.bench.report import write_json

    said = conditions(options.device) | {
        "command": "python -m tests.gpu_combinations " + " ".join(sys.argv[1:]), "cells": len(cells),
        "admitted": len(fitting), "refused": reasons}
    done: list[Done] = []
    found = said | record(done, chosen, started)
    for cell, outcome, why in whole(chosen, options.device, options.jobs, options.seconds):
        done.append((cell, outcome, why))
        if why:
            print("FAILED", cell.name, why, flush=True)
        found = said | record(done, chosen, started)
        if options.output:  # as it comes: who is stopped has what was run
            write_json(options.output, found)
    print(json.dumps({key: found[key] for key in ("cells", "admitted", "run", "failed", "seconds", "by")}))
    return 1 if found["failed"] else 0


def record(done: Sequence[Done], chosen: Sequence[Cell], started: float) -> dict[str, Any]:
    """Of the cells run by now; ``complete`` once all ``chosen`` ones were, which else are named in ``not_run``."""
    failures = {cell.name: why for cell, _, why in done if why}
    run = {cell for cell, _, _ in done}
    return {"complete": len(done) == len(chosen), "run": len(done), "failed": len(failures), "failures": failures,
            "not_run": [cell.name for cell in chosen if cell not in run],
            "seconds": round(time.time() - started),
            "by": {axis: summary(done, axis) for axis in ("model", "attention", "graphs", "steps", "quantization")}}


if __name__ == "__main__":
    sys.exit(main())

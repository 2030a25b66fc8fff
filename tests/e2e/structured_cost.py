"""The cost of masks: speed with a JSON schema against speed without, in pairs of runs.

``python -m tests.e2e.structured_record --part cost --device cuda --out x.json``. Both runs of a
pair have the same prompts, lengths and seeds, and follow each other at once, so that other work on
the machine slows both. Without drafts they also have the same number of steps. A share is the speed
with a schema over the speed without, the median of all pairs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from glowplug import LLM, SamplingParams
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from tests.e2e.structured import QUESTION

TOKENS = 128  #: tokens of each answer
BATCHES = (1, 32)
#: people, so many that no answer ends before the limit
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "role": {"enum": ["reader", "writer", "owner"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "role"],
        "additionalProperties": False,
    },
}


@dataclass
class Run:
    """One batch of answers.

    Attributes:
        seconds: wall time.
        cpu: seconds of the engine's thread, which is the caller's, on a processor.
        process: seconds of all threads of the process, those of the library included.
        steps: steps of the engine.
        tokens: tokens of the answers.
        bubble: share of the time of the steps in which the device waited for the host.
    """

    seconds: float
    cpu: float
    process: float
    steps: int
    tokens: int
    bubble: float


def one_run(llm: LLM, batch: int, schema: dict[str, Any] | None) -> Run:
    """Answer ``batch`` questions with ``TOKENS`` tokens each."""
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=TOKENS, ignore_eos=True, json_schema=schema, seed=seed
        )
        for seed in range(batch)
    ]
    before = settled_stats(llm)
    begun = time.perf_counter(), time.thread_time(), time.process_time()
    answers = llm.chat([QUESTION] * batch, params, enable_thinking=False)
    ended = time.perf_counter(), time.thread_time(), time.process_time()
    seconds, cpu, process = (end - start for start, end in zip(begun, ended))
    after = settled_stats(llm)
    tokens = sum(len(answer.token_ids) for answer in answers)
    assert tokens == batch * TOKENS, "every answer reaches the limit"
    spent = after.step_seconds - before.step_seconds
    bubble = (after.bubble_seconds - before.bubble_seconds) / spent if spent else 0.0
    return Run(seconds, cpu, process, after.steps - before.steps, tokens, bubble)


def engine(library: str, device: str, model: str, drafts: dict[str, Any]) -> LLM:
    config: dict[str, Any] = {
        "device": device,
        "grammar": {"use": library},
        "cache": {"use": "none"},
        "scheduler": {"max_running_requests": max(BATCHES)},
        "context_length": 512,
        **drafts,
    }
    if drafts:  # both runs of a pair draft as many tokens
        config["speculative"] = {**drafts["speculative"], "adaptive": False}
    if device != "cpu":
        config["graphs"] = {"use": "cuda_graph", "batch_sizes": list(BATCHES)}
        config["memory"] = {"kv_tokens": max(BATCHES) * 512}
    return LLM(model, **config)


def cost(
    library: str, device: str, model: str, drafts: dict[str, dict[str, Any]], pairs: int
) -> list[dict[str, Any]]:
    """Measure ``pairs`` pairs at each batch size, with each kind of drafts; print each row."""
    rows = []
    for name, config in drafts.items():
        with engine(library, device, model, config) as llm:
            for batch in BATCHES:
                for schema in (None, SCHEMA):
                    one_run(llm, batch, schema)  # warms up
                before = settled_stats(llm)
                found = [one_pair(llm, batch, number % 2 == 0) for number in range(pairs)]
                row = {"device": device, "model": model, "drafts": name, "batch": batch}
                wall = sum(masked.seconds for _, masked in found)
                rows.append(row | summary(found) | masks(before, settled_stats(llm), wall))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def one_pair(llm: LLM, batch: int, plain_first: bool) -> tuple[Run, Run]:
    """Return a run without and a run with the schema; ``plain_first``: in this order."""
    if plain_first:
        plain = one_run(llm, batch, None)
        return plain, one_run(llm, batch, SCHEMA)
    masked = one_run(llm, batch, SCHEMA)
    return one_run(llm, batch, None), masked


def summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Return the speeds, and the shares of the speed that are left with the schema."""

    def share(quantity: str, per: str) -> float:
        return median(
            (getattr(plain, quantity) / getattr(plain, per))
            / (getattr(masked, quantity) / getattr(masked, per))
            for plain, masked in pairs
        )

    sides = dict(zip(("without", "with"), zip(*pairs)))
    return {
        "pairs": len(pairs),
        "tokens_per_second": {
            name: round(median(run.tokens / run.seconds for run in runs), 1)
            for name, runs in sides.items()
        },
        "steps": {name: round(median(run.steps for run in runs)) for name, runs in sides.items()},
        "share_of_tokens_per_second": round(share("seconds", "tokens"), 4),
        "share_of_steps_per_second": round(share("seconds", "steps"), 4),
        "share_of_steps_per_cpu_second": round(share("cpu", "steps"), 4),
        "share_of_steps_per_cpu_second_of_all_threads": round(share("process", "steps"), 4),
        "share_of_steps_of_each_pair": [
            round(plain.seconds / plain.steps / (masked.seconds / masked.steps), 3)
            for plain, masked in pairs
        ],
        "bubble": {
            name: round(median(run.bubble for run in runs), 4) for name, runs in sides.items()
        },
    }


def masks(before: Stats, after: Stats, wall: float) -> dict[str, Any]:
    """Return the counters of masks between two statistics.

    ``wall``: seconds of the runs with a schema between them.
    """
    steps = after.masked_steps - before.masked_steps
    waited = after.mask_wait_seconds - before.mask_wait_seconds
    spent = after.mask_seconds - before.mask_seconds
    return {
        "masked_steps": steps,
        "mask_waits": after.mask_waits - before.mask_waits,
        "device_wait_us_per_masked_step": round(1e6 * waited / max(1, steps), 1),
        "host_us_per_masked_step": round(1e6 * spent / max(1, steps), 1),
        "masks_share_of_wall_time": round(spent / wall, 4),
    }

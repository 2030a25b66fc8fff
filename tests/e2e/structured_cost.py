"""The cost of masks: speed with a JSON schema against speed without, in pairs of runs.

``python -m tests.e2e.structured_record --part cost --device cuda --out x.json``. Both runs of a
pair have the same prompts, lengths and seeds, and follow each other at once, so that other work on
the machine slows both. Without drafts they also have the same number of steps. A share is the speed
with a schema over the speed without, the median of all pairs.

On the CPU each pair has a third run, which repeats the tokens of the run with the schema without a
grammar. It divides the share: that of the text is the speed of the third run over the speed without
a schema, and that of the masks the speed with the schema over the speed of the third run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from glowplug import LLM, SamplingParams
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.bench.others.draft_settings import settled_stats
from tests.e2e.structured import QUESTION
from tests.e2e.structured_repeat import Repeater, repeating

TOKENS = 128  #: tokens of each answer
BATCHES = (1, 32)
LENGTH = 512  #: most tokens of a sequence
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
        answers: the tokens of each answer.
    """

    seconds: float
    cpu: float
    process: float
    steps: int
    tokens: int
    bubble: float
    answers: list[list[int]]


@dataclass
class Pair:
    """Runs that follow each other.

    Attributes:
        plain: the run without a schema.
        masked: the run with the schema.
        repeated: the run that repeats the tokens of ``masked`` without a grammar; None: not made.
    """

    plain: Run
    masked: Run
    repeated: Run | None


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
    ids = [list(answer.token_ids) for answer in answers]
    tokens = sum(map(len, ids))
    assert tokens == batch * TOKENS, "every answer reaches the limit"
    spent = after.step_seconds - before.step_seconds
    bubble = (after.bubble_seconds - before.bubble_seconds) / spent if spent else 0.0
    return Run(seconds, cpu, process, after.steps - before.steps, tokens, bubble, ids)


def engine(library: str, device: str, model: str, drafts: dict[str, Any]) -> LLM:
    config: dict[str, Any] = {
        "device": device,
        "grammar": {"use": library},
        "cache": {"use": "none"},
        "scheduler": {"max_running_requests": max(BATCHES)},
        "context_length": LENGTH,
        **drafts,
    }
    if drafts:  # both runs of a pair draft as many tokens
        config["speculative"] = {**drafts["speculative"], "adaptive": False}
    if device != "cpu":
        config["graphs"] = {"use": "cuda_graph", "batch_sizes": list(BATCHES)}
        config["memory"] = {"kv_tokens": max(BATCHES) * LENGTH}
    return LLM(model, **config)


def cost(
    library: str, device: str, model: str, drafts: dict[str, dict[str, Any]], pairs: int
) -> list[dict[str, Any]]:
    """Measure ``pairs`` pairs at each batch size, with each kind of drafts; print each row."""
    rows = []
    for name, config in drafts.items():
        samplers = repeating(max(BATCHES), LENGTH) if device == "cpu" else nullcontext()
        with samplers as repeater, engine(library, device, model, config) as llm:
            for batch in BATCHES:
                for schema in (None, SCHEMA):
                    one_run(llm, batch, schema)  # warms up
                before = settled_stats(llm)
                found = [one_pair(llm, batch, number % 2 == 0, repeater) for number in range(pairs)]
                row = {"device": device, "model": model, "drafts": name, "batch": batch}
                wall = sum(pair.masked.seconds for pair in found)
                rows.append(row | summary(found) | masks(before, settled_stats(llm), wall))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def one_pair(llm: LLM, batch: int, plain_first: bool, repeater: Repeater | None) -> Pair:
    """Return the runs of a pair; ``plain_first``: the run without the schema comes first."""
    plain = one_run(llm, batch, None) if plain_first else None
    masked = one_run(llm, batch, SCHEMA)
    repeated = None
    if repeater is not None:
        repeater.answers = dict(enumerate(masked.answers))
        repeated = one_run(llm, batch, None)
        repeater.answers = {}
        assert repeated.answers == masked.answers, "the third run has the same text"
    return Pair(plain or one_run(llm, batch, None), masked, repeated)


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """Return the speeds, and the shares of the speed that are left with the schema."""
    plain = [pair.plain for pair in pairs]
    masked = [pair.masked for pair in pairs]
    repeated = [pair.repeated for pair in pairs if pair.repeated is not None]
    sides = {"without": plain, "with": masked}
    if repeated:
        sides["repeated"] = repeated

    def each(value: Callable[[Run], float], digits: int | None) -> dict[str, float]:
        return {name: round(median(map(value, runs)), digits) for name, runs in sides.items()}

    parts = {
        "share_of_steps_of_the_text": round(share(plain, repeated, "seconds", "steps"), 4),
        "share_of_steps_of_the_masks": round(share(repeated, masked, "seconds", "steps"), 4),
    } if repeated else {}  # fmt: skip
    return {
        "pairs": len(pairs),
        "tokens_per_second": each(lambda run: run.tokens / run.seconds, 1),
        "steps": each(lambda run: run.steps, None),
        "share_of_tokens_per_second": round(share(plain, masked, "seconds", "tokens"), 4),
        "share_of_steps_per_second": round(share(plain, masked, "seconds", "steps"), 4),
        "share_of_steps_per_cpu_second": round(share(plain, masked, "cpu", "steps"), 4),
        "share_of_steps_per_cpu_second_of_all_threads": round(
            share(plain, masked, "process", "steps"), 4
        ),
        "share_of_steps_of_each_pair": [
            round(share([one], [other], "seconds", "steps"), 3) for one, other in zip(plain, masked)
        ],
        **parts,
        "bubble": each(lambda run: run.bubble, 4),
    }


def share(fast: list[Run], slow: list[Run], quantity: str, per: str) -> float:
    """Return the speed of ``slow`` over that of ``fast``, the median of the pairs.

    Args:
        fast: runs.
        slow: the runs of the same pairs.
        quantity: the field of a run that the speed divides by.
        per: the field of a run that is counted.
    """
    return median(
        (getattr(one, quantity) / getattr(one, per))
        / (getattr(other, quantity) / getattr(other, per))
        for one, other in zip(fast, slow)
    )


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

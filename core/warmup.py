"""The self-test before Ready: one prefill and one decode step on the scratch page, of the largest admitted shapes.

It allocates what the first requests would allocate, pays first-use costs, and refuses a model whose logits are not
finite before any client can see it. Ranks take the same steps together; groups of ranks also one in which only the
first group has work.
"""
from __future__ import annotations

import numpy as np

from glowplug.core.batch import Batch, idle_batch, shape_of
from glowplug.core.errors import GlowplugError
from glowplug.core.offers import Mode
from glowplug.core.plan import EnginePlan
from glowplug.core.protocols import RequestRouter
from glowplug.core.runner import Runner

WARM_TOKENS = 2048  #: longest warm-up prefill; beyond it the cost is arithmetic, not first use


def warm_up(runner: Runner, plan: EnginePlan, router: RequestRouter | None = None) -> None:
    """GlowplugError when a step yields NaN."""
    for own in (_prefill, _decode):
        batch = own(plan)
        _run(runner, batch, batch)
    if router is not None:
        busy = _decode(plan, step=2)
        _run(runner, busy if router.group == 0 else idle_batch(), busy)


def _run(runner: Runner, batch: Batch, widest: Batch) -> None:
    """One step; ``widest`` is what the rank with the most work computes in it."""
    batch.agreed = shape_of(widest)
    if runner.launch(batch).wait().bad.any():
        raise GlowplugError("self-test: the model's logits are not finite (NaN or all -inf)")


def _prompt_length(plan: EnginePlan) -> int:
    return min(plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width, WARM_TOKENS)


def _prefill(plan: EnginePlan) -> Batch:
    length = _prompt_length(plan)
    ids = (np.arange(length, dtype=np.int64) * 7919 % plan.facts.model.vocab_size).astype(np.int32)
    return _scratch_batch(plan, Mode.PREFILL, 1, length, length, ids)


def _decode(plan: EnginePlan, step: int = 1) -> Batch:
    """Rows of width tokens; where lengths live on the device, the first of them is the prompt just computed, and
    ``step`` is the number of this step behind it."""
    width, rows = plan.sizes.width, min(plan.sizes.max_running, 8)
    mode, most = (Mode.DECODE, width) if width == 1 else (Mode.VERIFY, _prompt_length(plan) + step * width)
    return _scratch_batch(plan, mode, rows, width, most, np.zeros(0, np.int32))


def _scratch_batch(plan: EnginePlan, mode: Mode, rows: int, tokens: int, most: int, ids: np.ndarray) -> Batch:
    """``rows`` rows of ``tokens`` tokens whose cache is then ``most`` tokens long at most, all of it scratch."""
    decodes = 0 if mode is Mode.PREFILL else rows
    pages = np.zeros((rows, -(-(most + plan.sizes.lookahead) // plan.sizes.page_size)), np.int32)
    return Batch(
        step=0, mode=mode, rows=np.arange(rows, dtype=np.int32), epochs=np.zeros(rows, np.int64), num_decodes=decodes,
        query_lens=np.full(rows, tokens, np.int32), kv_lens=np.full(rows, most, np.int32),
        samples=np.ones(rows, np.bool_), prompt_ids=ids, pages=pages,
    )

"""Steps on the scratch page, before any request: the self-test, and the largest admitted steps, to
measure memory.

The self-test is a short prefill, a longer one and one decode step. It pays first-use costs and
refuses a model whose logits are not finite before any client can see it. Ranks take the same steps
together; groups of ranks also one in which only the first group has work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.plan.budget.step import SCORED
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.plugin.byte_costs import ROUND_TOKENS
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import RequestRouter
from glowplug.core.step.batch import Batch, idle_batch, shape_of
from glowplug.core.step.request import MAX_LOGPROBS, SamplingParams, Sequence

WARM_TOKENS = 2048  #: longest warm-up prefill; beyond it the cost is arithmetic, not first use
SHORT_TOKENS = 13  #: the shortest: other kernels, and a captured pass where there are some
FEW_PAGES = 2  #: enough of a pool for every step here
CACHED_CHUNKS = (
    1  #: chunks before the one whose memory is measured; backends read longer prefixes in pieces
)
#: steps with prompts between the captured and the largest ones, each with one decoding row more
BETWEEN = 24
EVEN = 16  #: kernels are compiled apart for numbers that it divides
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
    allowed_token_ids=[0, 1, 2],
    logit_bias={1: 1.0},
    max_tokens=1,
    seed=0,
)

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50},
    {"presence_penalty": 0.1},
    {"logprobs": 1},
)


def warm_up(runner: Runner, plan: EnginePlan, router: RequestRouter | None = None) -> None:
    """GlowplugError when a step yields NaN."""
    for own in (_short_prefill, _prefill, _decode):
        batch = own(plan)
        _run(runner, batch, batch)
    if router is not None:
        busy = _decode(plan, step=2)
        _run(runner, busy if router.group == 0 else idle_batch(), busy)


def most_tokens(runner: Runner, plan: EnginePlan) -> None:
    """Steps of as many tokens as there can be: long prompts, all of one after another's cached
    prefix, or all fresh, beside short ones; and of as many as may hold more than these."""
    sizes = plan.sizes
    longest = min(sizes.chunk_size, sizes.context_length - sizes.width)
    lengths = np.full(sizes.max_running, min(sizes.width, longest), np.int32)
    left = sizes.chunk_size
    for row in range(sizes.max_running):
        if left > lengths[row]:
            lengths[row] = min(left, longest)
            left -= int(lengths[row])
    for cached in (0, min(CACHED_CHUNKS * longest, sizes.context_length - sizes.width - longest)):
        _run_chunks(runner, plan, lengths, cached)
    for tokens in sizes.turns:
        if tokens < sizes.max_step_tokens:
            _run_prompts(runner, plan, tokens)


def _run_chunks(runner: Runner, plan: EnginePlan, lengths: NDArray[np.int32], cached: int) -> None:
    """A chunk of each row's length, the first behind ``cached`` tokens; none ends its prompt."""
    batch = _scratch_batch(
        plan,
        Mode.PREFILL,
        len(lengths),
        1,
        cached + int(lengths[0]),
        _ids(plan, int(lengths.sum())),
    )
    batch.query_lens = lengths.copy()
    batch.kv_lens = lengths.copy()
    batch.kv_lens[0] += cached
    batch.samples[:] = False
    batch.next_ids = np.zeros(len(lengths), np.int32)
    _run(runner, batch, batch)


def most_captured(runner: Runner, plan: EnginePlan, batch_sizes: Iterable[int]) -> None:
    """As many rows as graphs have at most, and have that may hold more than these, decode at the
    end of the longest sequence, and draw their tokens in each way by itself, as graphs hold
    them."""
    width = plan.sizes.width
    for rows in _most(batch_sizes, [turn // width for turn in plan.sizes.turns]):
        for way in WAYS:
            _run_joined(
                runner,
                _decoding(plan, rows, plan.sizes.context_length),
                SamplingParams(max_tokens=1, seed=0, **way),
            )


def most_passed(runner: Runner, plan: EnginePlan) -> None:
    """Steps of as many tokens as captured passes have at most, and have that may hold more than
    these.
    """
    for tokens in _most(plan.sizes.pass_tokens, plan.sizes.turns):
        _run_prompts(runner, plan, tokens)


def _most(counts: Iterable[int], turns: Iterable[int]) -> list[int]:
    """The largest of ``counts``, and of those up to each turn; falling."""
    among = set(counts)
    within = ([count for count in among if count <= turn] for turn in turns)
    return sorted({max(some) for some in (among, *within) if some}, reverse=True)


def _run_prompts(runner: Runner, plan: EnginePlan, tokens: int) -> None:
    """A step of so many tokens of fresh prompts, as long ones as there can be."""
    longest = min(plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width)
    whole, rest = divmod(tokens, longest)
    lengths = np.array([longest] * whole + [rest] * (rest > 0), np.int32)[: plan.sizes.max_running]
    _run_chunks(runner, plan, lengths, 0)


def most_logits(runner: Runner, plan: EnginePlan) -> None:
    """Every row decodes and asks for all that sampling offers; then a prompt is scored."""
    sizes = plan.sizes
    batch = _decoding(plan, sizes.max_running, min(sizes.context_length, WARM_TOKENS + sizes.width))
    _run_joined(runner, batch, EVERYTHING)
    _score_prompt(runner, plan)


def steps_between(runner: Runner, plan: EnginePlan) -> None:
    """Steps with prompts that no graph holds, of fewer and fewer tokens and beside fewer and fewer
    decoding rows.

    Which kernels run, and how they are compiled, depends on both numbers; no request is to wait for
    a compiler.
    NOTE: the largest first, since tensors that grow from step to step fit none of the blocks of the
    steps before.
    """
    for decodes, tokens in reversed(counts_between(plan.sizes)):
        runner.launch(_mixed(plan, decodes, tokens - decodes)).wait()  # of garbage, finite or not


def counts_between(sizes: Sizes) -> list[tuple[int, int]]:
    """(decoding rows, tokens) of those steps, ascending: every multiple of ROUND_TOKENS, and numbers
    between that are odd and divisible by EVEN in turn."""
    least = sizes.pass_tokens[-1] if sizes.pass_tokens else 0
    most = sizes.chunk_size
    steps = min(BETWEEN, sizes.max_running - 1)
    wholes = set(range(least // ROUND_TOKENS * ROUND_TOKENS + ROUND_TOKENS, most, ROUND_TOKENS))
    found = set(wholes)
    for count in range(1, steps + 1):
        tokens = least + (most - least) * count // BETWEEN
        near = round(tokens / ROUND_TOKENS) * ROUND_TOKENS
        if count % 2 and near in wholes and abs(near - tokens) * BETWEEN < most - least:
            continue  # one of them is as good
        found.add(tokens // EVEN * EVEN if count % 2 else tokens - 1 + tokens % 2)
    decodes = [min(number, steps) if sizes.width == 1 else 0 for number in range(1, len(found) + 1)]
    return [(rows, tokens) for rows, tokens in zip(decodes, sorted(found)) if tokens > rows]


def _mixed(plan: EnginePlan, decodes: int, tokens: int) -> Batch:
    """So many decoding rows and chunks of ``tokens`` prompt tokens, none of which ends its prompt."""
    sizes = plan.sizes
    longest = min(sizes.chunk_size, sizes.context_length - sizes.width)
    whole, rest = divmod(tokens, longest)
    chunks = ([longest] * whole + [rest] * (rest > 0))[: sizes.max_running - decodes]
    lengths = np.array([1] * decodes + chunks, np.int32)
    batch = _scratch_batch(plan, Mode.PREFILL, len(lengths), 1, chunks[0], _ids(plan, sum(chunks)))
    batch.num_decodes = decodes
    batch.query_lens = lengths
    batch.kv_lens = np.maximum(
        lengths, np.where(np.arange(len(lengths)) < decodes, chunks[0], 0)
    ).astype(np.int32)
    batch.samples[decodes:] = False
    batch.next_ids = np.zeros(len(chunks), np.int32)
    batch.agreed = shape_of(batch)
    return batch


def _run_joined(runner: Runner, batch: Batch, params: SamplingParams) -> None:
    """A step all of whose rows sample by ``params``."""
    batch.joined = [
        Sequence(id=-1, prompt=np.zeros(1, np.int32), params=params, row=int(row))
        for row in batch.rows
    ]
    try:
        _run(runner, batch, batch)
    finally:
        for row in batch.rows:
            runner.sampler.leave(int(row))


def _score_prompt(runner: Runner, plan: EnginePlan) -> None:
    whole = SCORED + 1  # the first token is not scored
    length = min(whole, plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width)
    batch = _scratch_batch(plan, Mode.PREFILL, 1, length, length, _ids(plan, length))
    batch.prompt_logprobs = np.ones(1, np.bool_)
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    table = runner.table.sequences
    kept = table[0]
    table[0] = Sequence(id=-1, prompt=batch.prompt_ids, params=params)
    try:
        _run(runner, batch, batch)
    finally:
        table[0] = kept


def _run(runner: Runner, batch: Batch, widest: Batch) -> None:
    """One step; ``widest`` is what the rank with the most work computes in it."""
    batch.agreed = shape_of(widest)
    if runner.launch(batch).wait().bad.any():
        raise GlowplugError(
            f"self-test: the model's logits are not finite (NaN or all -inf) in a {batch.mode.value} "
            f"step of {batch.num_rows} rows, {batch.num_tokens} tokens. Fix: another dtype, if its "
            "range is too small for this model; else the checkpoint is damaged: download it again"
        )


def _prompt_length(plan: EnginePlan) -> int:
    return min(plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width, WARM_TOKENS)


def _prefill(plan: EnginePlan) -> Batch:
    length = _prompt_length(plan)
    return _scratch_batch(plan, Mode.PREFILL, 1, length, length, _ids(plan, length))


def _short_prefill(plan: EnginePlan) -> Batch:
    length = min(SHORT_TOKENS, _prompt_length(plan))
    return _scratch_batch(plan, Mode.PREFILL, 1, length, length, _ids(plan, length))


def _ids(plan: EnginePlan, count: int) -> np.ndarray:
    """Token ids that differ, so that a router spreads them."""
    return (np.arange(count, dtype=np.int64) * 7919 % plan.facts.model.vocab_size).astype(np.int32)


def _decode(plan: EnginePlan, step: int = 1) -> Batch:
    """Rows of width tokens; where lengths live on the device, the first of them is the prompt just
    computed, and ``step`` is the number of this step behind it."""
    width = plan.sizes.width
    return _decoding(
        plan,
        min(plan.sizes.max_running, 8),
        width if width == 1 else _prompt_length(plan) + step * width,
    )


def _decoding(plan: EnginePlan, rows: int, most: int) -> Batch:
    width = plan.sizes.width
    mode = Mode.DECODE if width == 1 else Mode.VERIFY
    return _scratch_batch(plan, mode, rows, width, most, np.zeros(0, np.int32))


def _scratch_batch(
    plan: EnginePlan, mode: Mode, rows: int, tokens: int, most: int, ids: np.ndarray
) -> Batch:
    """``rows`` rows of ``tokens`` tokens whose cache is then ``most`` tokens long at most, all of
    it scratch.
    """
    decodes = 0 if mode is Mode.PREFILL else rows
    pages = np.zeros((rows, -(-(most + plan.sizes.lookahead) // plan.sizes.page_size)), np.int32)
    return Batch(
        step=0,
        mode=mode,
        rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int64),
        num_decodes=decodes,
        query_lens=np.full(rows, tokens, np.int32),
        kv_lens=np.full(rows, most, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_ids=ids,
        pages=pages,
    )

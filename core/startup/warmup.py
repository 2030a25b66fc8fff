"""Steps on the scratch page, run before any request.

The self-test is a short prefill, a longer one and one decode step. First-use costs arise in it
instead of in a request, and the start fails if the model's logits are not finite. Ranks run the
same steps together; groups of ranks also run one step in which only the first group has work.

The largest admitted steps are run to measure memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.engine.blame import result_fault
from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.plan.budget.step import SCORED
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.modes import Mode
from glowplug.core.protocols import RequestRouter
from glowplug.core.step.batch import Batch, StepResult, StepShape, idle_batch, shape_of
from glowplug.core.step.request import MAX_LOGPROBS, SamplingParams, Sequence

#: tokens of the longest self-test prefill; a longer one adds only arithmetic, no first-use cost
WARM_TOKENS = 2048
#: the same on a CPU, where 1024 tokens of the embedded model take two thirds of the start
WARM_TOKENS_ON_CPU = 256
#: tokens of the shortest self-test prefill; it runs other kernels, and a captured pass if any
SHORT_TOKENS = 13
FEW_PAGES = 2  #: pages of the KV pool that are enough for every step here
#: chunks cached before the chunk whose memory is measured; backends read longer prefixes in parts
CACHED_CHUNKS = 1
#: parameters that use every feature of the sampler at once
ALL_SAMPLING_FEATURES = SamplingParams(
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

#: sampling parameters, one for each sampling mode that graphs capture
SAMPLING_MODES: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50},
    {"presence_penalty": 0.1},
    {"logprobs": 1},
)


def warm_up(runner: Runner, plan: EnginePlan, router: RequestRouter | None = None) -> None:
    """Run the self-test: a short prefill, a longer one and a decode step on the scratch page.

    Args:
        router: the router of requests among groups of ranks; None: one group.

    Raises:
        GlowplugError: a step's logits are not finite, or its results break the contract.
    """
    for make_batch in (_short_prefill, _prefill, _decode):
        batch = make_batch(plan)
        fault = result_fault(plan, batch, _run(runner, batch))
        if fault:
            raise GlowplugError(f"self-test: {fault}")
    if router is not None:
        busy = _decode(plan, step=2)
        others = (0,) * (plan.sizes.groups - 1)
        shape = replace(
            shape_of(busy),
            group_tokens=(busy.num_tokens, *others),
            group_decodes=(busy.num_decodes, *others),
        )
        _run(runner, busy if router.group == 0 else idle_batch(), shape)


def most_tokens(runner: Runner, plan: EnginePlan) -> None:
    """Run the steps with the most tokens: long prompts beside short ones.

    There are two such steps. In the first one no prompt has cached tokens; in the second one the
    first row has a cached prefix. Then a prefill step runs at each smaller token count at which
    memory may peak (``Sizes.peak_tokens``).
    """
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
    for tokens in sizes.peak_tokens:
        if tokens < sizes.max_step_tokens:
            _run_prompts(runner, plan, tokens)


def _run_chunks(runner: Runner, plan: EnginePlan, lengths: NDArray[np.int32], cached: int) -> None:
    """Run a prefill step with a chunk of each length in ``lengths``; no chunk ends its prompt.

    Args:
        cached: number of cached tokens before the first row's chunk.
    """
    batch = scratch_batch(
        plan,
        Mode.PREFILL,
        len(lengths),
        1,
        cached + int(lengths[0]),
        spread_ids(plan, int(lengths.sum())),
    )
    batch.query_lens = lengths.copy()
    batch.kv_lens = lengths.copy()
    batch.kv_lens[0] += cached
    batch.samples[:] = False
    batch.next_ids = np.zeros(len(lengths), np.int32)
    _run(runner, batch)


def most_captured(runner: Runner, plan: EnginePlan, batch_sizes: Iterable[int]) -> None:
    """Run a decode step at every captured batch size at which memory may peak.

    All rows are at the maximum length. Each batch size runs once per captured sampling mode.
    """
    width = plan.sizes.width
    for rows in _most(batch_sizes, [peak // width for peak in plan.sizes.peak_tokens]):
        for way in SAMPLING_MODES:
            _run_joined(
                runner,
                _decoding(plan, rows, plan.sizes.context_length),
                SamplingParams(max_tokens=1, seed=0, **way),
            )


def most_passed(runner: Runner, plan: EnginePlan) -> None:
    """Run a prefill step at every captured token count at which memory may peak."""
    for tokens in _most(plan.sizes.pass_tokens, plan.sizes.peak_tokens):
        _run_prompts(runner, plan, tokens)


def _most(counts: Iterable[int], peaks: Iterable[int]) -> list[int]:
    """Return the largest count and, for each of ``peaks``, the largest count not above the peak.

    The result is in descending order, without repetitions.
    """
    distinct = set(counts)
    within = ([count for count in distinct if count <= peak] for peak in peaks)
    return sorted({max(group) for group in (distinct, *within) if group}, reverse=True)


def _run_prompts(runner: Runner, plan: EnginePlan, tokens: int) -> None:
    """Run a step of ``tokens`` tokens of fresh prompts, each as long as a chunk may be."""
    longest = min(plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width)
    whole, rest = divmod(tokens, longest)
    lengths = np.array([longest] * whole + [rest] * (rest > 0), np.int32)[: plan.sizes.max_running]
    _run_chunks(runner, plan, lengths, 0)


def most_logits(runner: Runner, plan: EnginePlan) -> None:
    """Run a decode step with all rows and sampling features, then score a prompt's tokens."""
    sizes = plan.sizes
    batch = _decoding(plan, sizes.max_running, min(sizes.context_length, WARM_TOKENS + sizes.width))
    _run_joined(runner, batch, ALL_SAMPLING_FEATURES)
    _score_prompt(runner, plan)


def _run_joined(runner: Runner, batch: Batch, params: SamplingParams) -> None:
    """Run a step whose rows all sample with ``params``."""
    batch.joined = [
        Sequence(id=-1, prompt=np.zeros(1, np.int32), params=params, row=int(row))
        for row in batch.rows
    ]
    try:
        _run(runner, batch)
    finally:
        for row in batch.rows:
            runner.sampler.leave(int(row))


def _score_prompt(runner: Runner, plan: EnginePlan) -> None:
    """Run a prefill step that computes log-probabilities of its prompt's tokens."""
    wanted = SCORED + 1  # the first token is not scored
    length = min(wanted, plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width)
    batch = scratch_batch(plan, Mode.PREFILL, 1, length, length, spread_ids(plan, length))
    batch.prompt_logprobs = np.ones(1, np.bool_)
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    table = runner.table.sequences
    kept = table[0]
    table[0] = Sequence(id=-1, prompt=batch.prompt_ids, params=params)
    try:
        _run(runner, batch)
    finally:
        table[0] = kept


def _run(runner: Runner, batch: Batch, agreed: StepShape | None = None) -> StepResult:
    """Run one step, check its logits and return its results.

    Args:
        agreed: the shape of the step on all ranks; None: that of ``batch``, which all ranks run.

    Raises:
        GlowplugError: the logits are not finite.
    """
    batch.agreed = agreed or shape_of(batch)
    result = runner.launch(batch).wait()
    if result.bad.any():
        raise GlowplugError(
            "self-test: the model's logits are not finite (NaN or all -inf) in a "
            f"{batch.mode.value} step of {batch.num_rows} rows, {batch.num_tokens} tokens. "
            "Fix: another dtype, if its range is too small for this model; "
            "else the checkpoint is damaged: download it again"
        )
    return result


def _prompt_length(plan: EnginePlan) -> int:
    """Return the number of tokens of the self-test's longest prompt."""
    most = WARM_TOKENS_ON_CPU if plan.device == "cpu" else WARM_TOKENS
    return min(plan.sizes.chunk_size, plan.sizes.context_length - plan.sizes.width, most)


def _prefill(plan: EnginePlan) -> Batch:
    """Return a prefill step with the longest prompt of the self-test."""
    length = _prompt_length(plan)
    return scratch_batch(plan, Mode.PREFILL, 1, length, length, spread_ids(plan, length))


def _short_prefill(plan: EnginePlan) -> Batch:
    """Return a prefill step with the shortest prompt of the self-test."""
    length = min(SHORT_TOKENS, _prompt_length(plan))
    return scratch_batch(plan, Mode.PREFILL, 1, length, length, spread_ids(plan, length))


def spread_ids(plan: EnginePlan, count: int) -> np.ndarray:
    """Return ``count`` token ids from the whole vocabulary, so that many experts are chosen."""
    return (np.arange(count, dtype=np.int64) * 7919 % plan.facts.model.vocab_size).astype(np.int32)


def _decode(plan: EnginePlan, step: int = 1) -> Batch:
    """Return a decode or verify step of up to 8 rows.

    With speculation, the first row continues the prompt that was just computed, because the device
    stores that row's length.

    Args:
        step: number of this step after the prompt, from 1; unused without speculation.
    """
    width = plan.sizes.width
    return _decoding(
        plan,
        min(plan.sizes.max_running, 8),
        width if width == 1 else _prompt_length(plan) + step * width,
    )


def _decoding(plan: EnginePlan, rows: int, most: int) -> Batch:
    """Return a decode or verify step of ``rows`` rows that have ``most`` cached tokens after it."""
    width = plan.sizes.width
    mode = Mode.DECODE if width == 1 else Mode.VERIFY
    return scratch_batch(plan, mode, rows, width, most, np.zeros(0, np.int32))


def scratch_batch(
    plan: EnginePlan, mode: Mode, rows: int, tokens: int, most: int, ids: np.ndarray
) -> Batch:
    """Return a batch that reads and writes cache entries in the scratch page alone.

    Args:
        rows: number of rows.
        tokens: number of tokens of each row in this step.
        most: number of cached tokens of each row after this step.
        ids: int32 token ids of the prefill rows, flattened.
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

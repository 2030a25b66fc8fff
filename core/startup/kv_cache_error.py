"""Measurement of the error of an 8-bit KV cache, before the real cache is made.

Start-up fails if the error is too large. The same steps run over two small pools, one in the plan's
format and one in the compute dtype. The first step computes prompts of random token ids. The second
step computes one more token after each prompt, whose logits are compared. It is a decode step, so
that the rounding in a backend's decode kernel (of queries, for example) is measured too; with
speculation, it is a prefill step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.engine.runner import Runner
from glowplug.core.engine.stream_probe import step_of
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.plan.plan import EnginePlan

CHECKED_DTYPES = frozenset({"fp8_e4m3", "fp8_e5m2"})  #: cache dtypes whose error is measured
MAX_PROMPTS = 8  #: prompts of a step
PROMPT_ROUNDS = 4  #: repetitions with other prompts
MAX_PROMPT_TOKENS = 256  #: longest prompt
MIN_PROMPT_TOKENS = 8  #: shortest prompt that is measured
#: callback that gives the runner's parts a pool of this layout and number of pages
Lend = Callable[[KVLayout, int], None]


@dataclass(frozen=True)
class CacheError:
    """The error of an 8-bit KV cache over all measured prompts.

    Attributes:
        prompts: number of prompts.
        tokens: number of tokens of each prompt.
        kl: median Kullback-Leibler divergence, in nats, of the logits over the 8-bit cache from
            those over the cache in the compute dtype.
        cosine: median cosine similarity of the two logit vectors.
        top1: share of prompts with the same best next token.
    """

    prompts: int
    tokens: int
    kl: float
    cosine: float
    top1: float

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.2g} nats, cosine {self.cosine:.6f}, the same best token in "
            f"{self.top1:.0%} of {self.prompts} prompts of {self.tokens} tokens"
        )


def check_cache(runner: Runner, plan: EnginePlan, lend: Lend) -> str | None:
    """Measure the error of the plan's KV cache format and compare it with ``attention.kv_error``.

    Args:
        lend: callback that gives the runner's parts a pool.

    Returns:
        A remark for the log on the error; None if the cache is not in an 8-bit format.

    Raises:
        GlowplugError: the error is larger than ``attention.kv_error``.
    """
    if plan.kv_dtype not in CHECKED_DTYPES:
        return None
    error = cache_error(runner, plan, lend)
    if error is None:
        return (
            f"the error of a cache in {plan.kv_dtype} was not measured: "
            f"sequences are shorter than {MIN_PROMPT_TOKENS} tokens"
        )
    bound = plan.choice("attention").options.get("kv_error")
    if bound is not None and not error.kl <= bound:
        raise GlowplugError(
            f"a KV cache in {plan.kv_dtype} changes this model's logits too much: {error}; "
            f'at most {bound:g} nats are allowed. Fix: attention.kv_dtype = "auto" (the cache in '
            f"{plan.dtype}), or a larger attention.kv_error "
            "(unset: the error is measured and logged, never refused)"
        )
    return f"{plan.kv_dtype} cache error: {error}"


def cache_error(runner: Runner, plan: EnginePlan, lend: Lend) -> CacheError | None:
    """Measure the error of the plan's KV cache format.

    Afterwards the caller must give the runner's parts a pool again.

    Returns:
        The error; None if no step holds prompts of ``MIN_PROMPT_TOKENS``.
    """
    prompts = _prompts(plan)
    if prompts is None:
        return None
    rows = prompts.shape[1]
    length = prompts.shape[2] - 1
    columns = -(-(length + _tokens_behind(plan)) // plan.sizes.page_size)
    pages = 1 + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    logits = []
    for layout in _layouts(runner, plan):
        lend(layout, 1 + pages.size)
        logits.append(torch.cat([_next_logits(runner, pages, ids) for ids in prompts]))
    kl, cosine, same = compared(*logits).cpu().numpy()
    return CacheError(
        kl.size, length, float(np.median(kl)), float(np.median(cosine)), float(same.mean())
    )


def _tokens_behind(plan: EnginePlan) -> int:
    """Return how many positions after a prompt's end the measured steps may use."""
    return 1 + plan.sizes.width + plan.sizes.lookahead


def _prompts(plan: EnginePlan) -> NDArray[np.int32] | None:
    """Return random prompts and their next tokens, int32 [rounds, rows, length + 1].

    None if no step holds prompts of ``MIN_PROMPT_TOKENS``.
    """
    sizes = plan.sizes
    rows = max(1, min(MAX_PROMPTS, sizes.max_running, sizes.chunk_size // (2 * MIN_PROMPT_TOKENS)))
    longest = sizes.context_length - _tokens_behind(plan)
    length = min(MAX_PROMPT_TOKENS, sizes.chunk_size // rows, longest)
    if length < MIN_PROMPT_TOKENS:
        return None
    random = np.random.default_rng(0)
    shape = (PROMPT_ROUNDS, rows, length + 1)
    return random.integers(0, plan.facts.model.vocab_size, shape).astype(np.int32)


def _layouts(runner: Runner, plan: EnginePlan) -> tuple[KVLayout, KVLayout]:
    """Return the cache's layout with all entries in the compute dtype, and the plan's layout."""
    planned = runner.attention.kv_layout()
    entries = tuple(replace(entry, dtype=plan.dtype) for entry in planned.entries)
    return replace(planned, entries=entries), planned


def _next_logits(runner: Runner, pages: NDArray[np.int32], ids: NDArray[np.int32]) -> Tensor:
    """Return the logits of each row's last token, computed over a cache of the tokens before it.

    Args:
        pages: page numbers of the rows, int32 [rows, pages].
        ids: token ids, int32 [rows, n + 1]: a prompt of n tokens, then the last token.

    Returns:
        float32 [rows, vocabulary].
    """
    runner.launch(step_of(pages, ids[:, :-1], ids.shape[1] - 1)).wait()
    return runner.logits(
        step_of(pages, ids[:, -1:], ids.shape[1], decode=runner.speculative.width() == 1)
    )


def compared(exact: Tensor, other: Tensor) -> Tensor:
    """Compare two sets of logits row by row.

    Args:
        exact: logits [rows, vocabulary] of the reference.
        other: logits [rows, vocabulary] to compare.

    Returns:
        float64 [3, rows]: divergence of ``other`` from ``exact``, cosine similarity, and 1 where
            the best token is the same, else 0. NaN is propagated.
    """
    exact = exact.double()
    other = other.double()
    before = exact.log_softmax(-1)
    after = other.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    cosine = torch.nn.functional.cosine_similarity(exact, other, dim=-1)
    return torch.stack([kl, cosine, (exact.argmax(-1) == other.argmax(-1)).double()])

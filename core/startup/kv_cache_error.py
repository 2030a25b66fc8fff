"""What an 8-bit KV cache costs this model, measured before the real cache is made; too much of it
refuses to start.

The same steps run over two small pools, one in the plan's format and one in the compute dtype:
prompts, and then one more token behind each, whose logits are compared. That step decodes, so that
what a backend's decoding kernel rounds beside the cache (its queries, say) counts; where drafts
run, it is one of prompts. Random token ids stand in for text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import GlowplugError
from glowplug.core.facts.kv_layout import KVLayout
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.step.batch import Batch, shape_of

NARROW = frozenset({"fp8_e4m3", "fp8_e5m2"})  #: cache dtypes that are held to it
#: prompts of a step, and how often with other ones
ROWS = 8
ROUNDS = 4
#: tokens of a prompt
LONGEST = 256
SHORTEST = 8
Lend = Callable[
    [KVLayout, int], None
]  #: gives the runner's parts a pool of this layout and number of pages


@dataclass(frozen=True)
class CacheError:
    """Over all prompts. ``kl``: median Kullback-Leibler divergence, in nats, of the logits over the
    narrow cache from those over the wide one; ``cosine``: median of both; ``top1``: share of
    prompts with the same best next token.
    """

    prompts: int
    tokens: int
    kl: float
    cosine: float
    top1: float

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.2g} nats, cosine {self.cosine:.6f}, the same best token in {self.top1:.0%} of "
            f"{self.prompts} prompts of {self.tokens} tokens"
        )


def check_cache(runner: Runner, plan: EnginePlan, lend: Lend) -> str | None:
    """A remark for the log; None where there is nothing to check. GlowplugError beyond
    ``attention.kv_error``.
    """
    if plan.kv_dtype not in NARROW:
        return None
    error = cache_error(runner, plan, lend)
    if error is None:
        return f"the error of a cache in {plan.kv_dtype} was not measured: sequences are shorter than {SHORTEST} tokens"
    bound = plan.choice("attention").options.get("kv_error")
    if bound is not None and not error.kl <= bound:
        raise GlowplugError(
            f"a KV cache in {plan.kv_dtype} changes what this model says too much: {error}; at most {bound:g} nats are "
            f'allowed. Fix: attention.kv_dtype = "auto" (the cache in {plan.dtype}), or a larger attention.kv_error '
            "(none: measured and logged, never refused)"
        )
    return f"{plan.kv_dtype} costs {error}"


def cache_error(runner: Runner, plan: EnginePlan, lend: Lend) -> CacheError | None:
    """None where prompts long enough fit into no step. Afterwards the runner's parts need a pool
    again.
    """
    sizes = plan.sizes
    rows = max(1, min(ROWS, sizes.max_running, sizes.chunk_size // (2 * SHORTEST)))
    behind = 1 + sizes.width + sizes.lookahead  # tokens behind a prompt that a step may touch
    length = min(LONGEST, sizes.chunk_size // rows, sizes.context_length - behind)
    if length < SHORTEST:
        return None
    each = -(-(length + behind) // sizes.page_size)
    pages = 1 + np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    ids = (
        np.random.default_rng(0)
        .integers(0, plan.facts.model.vocab_size, (ROUNDS, rows, length + 1))
        .astype(np.int32)
    )
    narrow = runner.attention.kv_layout()
    wide = replace(
        narrow, entries=tuple(replace(entry, dtype=plan.dtype) for entry in narrow.entries)
    )
    logits = []
    for layout in (wide, narrow):
        lend(layout, 1 + pages.size)
        logits.append(torch.cat([_next_logits(runner, pages, each_ids) for each_ids in ids]))
    kl, cosine, same = compared(*logits).cpu().numpy()
    return CacheError(
        kl.size, length, float(np.median(kl)), float(np.median(cosine)), float(same.mean())
    )


def _next_logits(runner: Runner, pages: NDArray[np.int32], ids: NDArray[np.int32]) -> Tensor:
    """Logits behind the last of ids [rows, n + 1], which reads those before it from the cache."""
    runner.launch(_batch(pages, ids[:, :-1], ids.shape[1] - 1)).wait()
    return runner.logits(
        _batch(pages, ids[:, -1:], ids.shape[1], decodes=runner.speculative.width() == 1)
    )


def compared(exact: Tensor, other: Tensor) -> Tensor:
    """Logits [rows, vocabulary] -> float64 [3, rows]: divergence of ``other`` from ``exact``,
    cosine, same best token. NaN stays."""
    exact = exact.double()
    other = other.double()
    before = exact.log_softmax(-1)
    after = other.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    cosine = torch.nn.functional.cosine_similarity(exact, other, dim=-1)
    return torch.stack([kl, cosine, (exact.argmax(-1) == other.argmax(-1)).double()])


def _batch(
    pages: NDArray[np.int32], ids: NDArray[np.int32], end: int, decodes: bool = False
) -> Batch:
    """Chunks ids [rows, n] of prompts, which end at ``end``."""
    rows, count = ids.shape
    batch = Batch(
        step=0,
        mode=Mode.DECODE if decodes else Mode.PREFILL,
        rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int64),
        num_decodes=rows if decodes else 0,
        query_lens=np.full(rows, count, np.int32),
        kv_lens=np.full(rows, end, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_ids=ids.ravel(),
        pages=pages,
    )
    batch.agreed = shape_of(batch)
    return batch

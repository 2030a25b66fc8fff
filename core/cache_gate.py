"""What an 8-bit KV cache costs this model, measured before the first request; too much of it refuses to start.

A step reads its own tokens as they are and everything before them from the cache. So the last token of a prompt is
computed twice: in one step with the whole prompt, and behind a prompt that is cached already. Both give the same logits
but for rounding, and the difference is what the cache's format costs. Random token ids stand in for text.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.batch import Batch, shape_of
from glowplug.core.errors import GlowplugError
from glowplug.core.offers import Mode
from glowplug.core.plan import EnginePlan
from glowplug.core.runner import Runner

NARROW = frozenset({"fp8_e4m3", "fp8_e5m2"})  #: cache dtypes that are held to it
ROWS, ROUNDS = 8, 4  #: prompts of a step, and how often with other ones
LONGEST, SHORTEST = 256, 8  #: tokens of a prompt


@dataclass(frozen=True)
class CacheError:
    """Over all prompts. ``kl``: median Kullback-Leibler divergence, in nats, of the logits behind cached tokens from
    those behind exact ones; ``cosine``: median of both; ``top1``: share of prompts with the same best next token."""

    prompts: int
    tokens: int
    kl: float
    cosine: float
    top1: float

    def __str__(self) -> str:
        return (f"KL {self.kl:.2g} nats, cosine {self.cosine:.6f}, the same best token in {self.top1:.0%} of "
                f"{self.prompts} prompts of {self.tokens} tokens")


def check_cache(runner: Runner, plan: EnginePlan) -> str | None:
    """A remark for the log; None where there is nothing to check. GlowplugError beyond ``attention.kv_error``."""
    if plan.kv_dtype not in NARROW:
        return None
    error = cache_error(runner, plan)
    if error is None:
        return f"the error of a cache in {plan.kv_dtype} was not measured: sequences are shorter than {SHORTEST} tokens"
    bound = plan.choice("attention").options.get("kv_error")
    if bound is not None and not error.kl <= bound:
        raise GlowplugError(
            f"self-test: a KV cache in {plan.kv_dtype} changes what this model says too much: {error}; at most "
            f'{bound:g} nats are allowed. Fix: attention.kv_dtype = "auto" (the cache in {plan.dtype}), or a larger '
            "attention.kv_error (none: measured and logged, never refused)")
    return f"a cache in {plan.kv_dtype} costs {error}"


def cache_error(runner: Runner, plan: EnginePlan) -> CacheError | None:
    """None where prompts long enough fit into no step. Pages from the first on are written: no sequence may hold any.
    """
    sizes = plan.sizes
    rows = max(1, min(ROWS, sizes.max_running, sizes.chunk_size // (2 * SHORTEST)))
    behind = 1 + sizes.width + sizes.lookahead  # tokens behind a prompt that a step may touch
    room = (sizes.num_pages - 1) // rows * sizes.page_size
    length = min(LONGEST, sizes.chunk_size // rows - 1, min(sizes.context_length, room) - behind)
    if length < SHORTEST:
        return None
    each = -(-(length + behind) // sizes.page_size)
    pages = 1 + np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    parts = [_differences(runner, plan, pages, length, seed) for seed in range(ROUNDS)]
    kl, cosine, same = torch.cat(parts, dim=1).cpu().numpy()
    return CacheError(kl.size, length, float(np.median(kl)), float(np.median(cosine)), float(same.mean()))


def _differences(runner: Runner, plan: EnginePlan, pages: NDArray[np.int32], length: int, seed: int) -> Tensor:
    """float64 [3, rows]: divergence, cosine and agreement of each row."""
    vocab, rows = plan.facts.model.vocab_size, len(pages)
    ids = np.random.default_rng(seed).integers(0, vocab, (rows, length + 1)).astype(np.int32)
    prompts = _batch(pages, ids[:, :length], length)
    drawn = runner.launch(prompts).wait().tokens[:, 0]
    ids[:, length] = drawn
    decodes = plan.sizes.width == 1  # the token just drawn is what a decode step of one token reads
    cached = runner.logits(_batch(pages, ids[:, length:], length + 1, decodes))
    exact = runner.logits(_batch(pages, ids, length + 1))
    return compared(exact, cached)


def compared(exact: Tensor, other: Tensor) -> Tensor:
    """Logits [rows, vocabulary] -> float64 [3, rows]: divergence of ``other`` from ``exact``, cosine, same best token.
    NaN stays."""
    exact, other = exact.double(), other.double()
    before, after = exact.log_softmax(-1), other.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    cosine = torch.nn.functional.cosine_similarity(exact, other, dim=-1)
    return torch.stack([kl, cosine, (exact.argmax(-1) == other.argmax(-1)).double()])


def _batch(pages: NDArray[np.int32], ids: NDArray[np.int32], end: int, decodes: bool = False) -> Batch:
    """Tokens ids [rows, n], which end at ``end``; those of decoding rows are on the device."""
    rows, count = ids.shape
    batch = Batch(
        step=0, mode=Mode.DECODE if decodes else Mode.PREFILL, rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int64), num_decodes=rows if decodes else 0, query_lens=np.full(rows, count, np.int32),
        kv_lens=np.full(rows, end, np.int32), samples=np.ones(rows, np.bool_),
        prompt_ids=np.zeros(0, np.int32) if decodes else ids.ravel(), pages=pages)
    batch.agreed = shape_of(batch)
    return batch

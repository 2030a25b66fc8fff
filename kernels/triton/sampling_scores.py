"""Log-probabilities of drawn tokens, without a copy of the logits."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glowplug.kernels.triton import dependent, sampling


@triton.jit
def _norms(logits, peaks, masses, norms, arrived, vocab, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
           DEPENDENT: tl.constexpr):
    dependent.begin(DEPENDENT)
    dependent.wait(DEPENDENT)
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    peak = tl.load(peaks + row)
    value = tl.load(logits + row.to(tl.int64) * stride + index, mask=index < vocab, other=float("-inf"))
    tl.store(masses + row * blocks + block, tl.sum(tl.exp(value - peak)))
    if sampling.finished(arrived, row, blocks):
        each = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + each, mask=each < blocks, other=0.0, cache_modifier=".cg")
        tl.store(norms + row, peak + tl.log(tl.sum(mass.to(tl.float64))).to(tl.float32))


def token_logprobs(logits: Tensor, tokens: Tensor, peaks: Tensor, k: int,
                   arrived: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``kernels.sampling.token_logprobs``; peaks float32 [N]: each row's largest logit; ``arrived`` as in
    ``sampling.best``."""
    grid = sampling.Grid.over(logits)
    norms = torch.empty(len(logits), device=logits.device)
    if len(logits):
        masses = torch.empty(grid.programs, device=logits.device)
        _norms[grid.programs](logits, peaks, masses, norms, arrived, *grid.sizes, BLOCK=sampling.BLOCK,
                              BLOCKS=grid.blocks, **dependent.options())
    top, top_ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    return logits.gather(1, tokens[:, None]).squeeze(1) - norms, top_ids, top - norms[:, None]

"""Muon for matrices and AdamW for the rest, with one step() and one learning-rate factor."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# coefficients of https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(updates: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return approximations of the nearest orthogonal matrices of a stack [n, rows, cols].

    ``dtype``: dtype of the computation.
    """
    a, b, c = NEWTON_SCHULZ
    tall = updates.shape[-2] > updates.shape[-1]
    x = (updates.mT if tall else updates).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(updates.dtype)


class Muon:
    """Momentum with orthogonalised updates; matrices of one shape are processed as a stack."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rate: float,
        momentum: float = 0.95,
        decay: float = 0.05,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.dtype = dtype
        self.rate = rate
        self.momentum = momentum
        self.decay = decay
        self.stacks: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self.stacks.setdefault(parameter.shape[-2:], []).append(parameter)
        self.buffers = {
            shape: [torch.zeros_like(p) for p in group] for shape, group in self.stacks.items()
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        rate = self.rate * factor
        for shape, group in self.stacks.items():
            buffers = self.buffers[shape]
            gradients = [p.grad for p in group if p.grad is not None]
            torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
            mixed = torch._foreach_lerp(gradients, buffers, self.momentum)
            updates = orthogonalize(
                torch.cat([m.reshape(-1, *shape) for m in mixed]), dtype=self.dtype
            )
            sizes = [p.numel() // (shape[0] * shape[1]) for p in group]
            pieces = [u.view_as(p) for u, p in zip(updates.split(sizes), group, strict=True)]
            weights: list[Tensor] = list(group)
            torch._foreach_mul_(weights, 1 - rate * self.decay)
            torch._foreach_add_(weights, pieces, alpha=-rate * 0.2 * max(shape) ** 0.5)


class Optimizer:
    """Muon on the projections; AdamW on embeddings, heads, routers and norms."""

    def __init__(self, model: nn.Module, rate: float, dtype: torch.dtype = torch.bfloat16) -> None:
        plain = ("embed_tokens", "lm_head", "gate.weight", "norm")
        named = list(model.named_parameters())
        matrices = [
            p for name, p in named if p.ndim >= 2 and not any(word in name for word in plain)
        ]
        chosen = {id(p) for p in matrices}
        self.muon = Muon(matrices, rate, dtype=dtype)
        rest = [p for _, p in named if id(p) not in chosen]
        self.rate = rate
        self.adam = torch.optim.AdamW(
            rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda
        )

    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` times the peak learning rate, and clear them."""
        self.muon.step(factor)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for stack in self.muon.stacks.values():
            for parameter in stack:
                parameter.grad = None

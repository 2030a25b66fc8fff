"""Rotary position embedding: frequencies with every published scaling, tables, both rotations.

"Interleaved" rotates neighbouring elements (2i, 2i+1), as DeepSeek's checkpoints do; otherwise
element i pairs with i + R/2 (NeoX style, Llama). A table is float32 [positions, R]: cosines of the
R/2 frequencies, then sines, both times the attention factor of YaRN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Return the kind of RoPE scaling that the config's ``rope_scaling`` names, or "default".

    Published configs call the key ``type`` or ``rope_type``.
    """
    if not scaling:
        return "default"
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def inverse_frequencies(
    dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int = 0,
    context: int = 0,
) -> tuple[Tensor, float]:
    """Return frequencies float32 [dim / 2] and the factor on cosines and sines.

    ``max_positions`` and ``context`` matter only to dynamic NTK, which uses one base for the whole
    context (the plain one if the context fits ``max_positions``).

    Args:
        dim: rotary size R
        theta: base
        scaling: the config's ``rope_scaling``
        max_positions: the config's ``max_position_embeddings``
        context: longest sequence served

    Raises:
        ValueError: unknown scaling
    """
    kind = rope_type(scaling)
    scaling = scaling or {}
    if kind == "dynamic" and context > max_positions:
        stretch = scaling["factor"] * context / max_positions - (scaling["factor"] - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match kind:
        case "default" | "dynamic":
            return plain, 1.0
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, dim, theta, scaling, max_positions)
    raise ValueError(f"unknown rope scaling {kind!r}; known: {', '.join(sorted(ROPE_TYPES))}")


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Scale the frequencies ``plain`` float32 [dim / 2] as Llama 3.1 does.

    Those of long wavelengths are divided by the config's ``factor``, those of short ones are kept,
    with a linear blend between.
    """
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = plain * (keep + (1 - keep) / scaling["factor"])
    return scaled


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on queries and keys: 0.1 * mscale * ln(factor) + 1.

    Attention logits are thus multiplied by its square. The result is 1 for ``factor`` <= 1. From
    Peng et al., 2023, section 3.4.

    Args:
        factor: number of times by which the context is extended
        mscale: the config's ``mscale`` or ``mscale_all_dim``
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(
    plain: Tensor,
    dim: int,
    theta: float,
    scaling: Mapping[str, Any],
    max_positions: int,
) -> tuple[Tensor, float]:
    """Return YaRN's frequencies and its factor on cosines and sines.

    Args:
        plain: unscaled frequencies float32 [dim / 2]
        dim: rotary size R
        theta: base
        scaling: the config's ``rope_scaling``
        max_positions: the config's ``max_position_embeddings``
    """
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or max_positions / original
    attention = scaling.get("attention_factor")
    if attention is None:
        both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        attention = (
            yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
            if both
            else yarn_mscale(factor)
        )

    def boundary(turns: float) -> float:
        """Return the index of the frequency that makes ``turns`` turns in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(scaling.get("beta_fast") or 32)
    high = boundary(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched), float(attention)


def cos_sin_table(frequencies: Tensor, factor: float, positions: int) -> Tensor:
    """Return the table float32 [positions, R]: cosines, then sines, both times ``factor``.

    ``frequencies`` are float32 [R / 2], as :func:`inverse_frequencies` returns them.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(factor)


def rotate_reference(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [T, H, R] by cos_sin [T, R] by the definition; the result has x's dtype."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    wide = x.float()
    if interleaved:
        a = wide[..., 0::2]
        b = wide[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def prepare(cos_sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return the operands of :func:`rotate` for cos_sin float32 [T, R].

    One call per step serves all layers.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    if interleaved:
        return (torch.complex(cos, sin),)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    """Rotate x [T, H, R] (last dimension contiguous) as :func:`rotate_reference` does."""
    wide = x if x.dtype is torch.float32 else x.float()
    if len(prepared) == 1:  # neighbouring pairs are complex numbers
        turned = (wide.view(torch.complex64) * prepared[0]).view(torch.float32)
        return turned if wide is x else turned.to(x.dtype)
    cos, sin = prepared
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)

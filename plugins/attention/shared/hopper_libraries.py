"""Checks shared by the libraries for Hopper, which are compiled for fixed sizes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import Check, CheckContext
from glowplug.kernels.launch import cards
from glowplug.plugins.attention.shared.absorbed import check_absorbed

SGL_KERNEL = "sglang-kernel"  #: name of the distribution that is imported as ``sgl_kernel``
HOPPER = frozenset({cards.HOPPER})
SIXTEEN_BITS = frozenset({"bfloat16", "float16"})
LATENT = 512  #: latent size of DeepSeek-V2 and V3
ROTARY = 64  #: rotary part of a head's key in DeepSeek-V2 and V3
NOPE = 128  #: part of a head's key without rotary embedding in DeepSeek-V2 and V3
VALUE = 128  #: value size of a head in DeepSeek-V2 and V3


def check_sizes(name: str) -> Check:
    """Return a check that refuses head sizes other than those of DeepSeek-V2 and V3.

    The library's kernels are compiled for these sizes only. ``name``: name of the attention
    backend, for the refusal.
    """

    def check(context: CheckContext) -> Iterator[Refusal]:
        yield from check_absorbed(context)
        model = context.facts.model
        if model.kind != "mla":
            return
        found = (
            model.kv_lora_rank,
            model.qk_rope_head_dim,
            int(model.config.get("qk_nope_head_dim", NOPE)),
            int(model.config.get("v_head_dim", VALUE)),
        )
        if found != (LATENT, ROTARY, NOPE, VALUE):
            yield Refusal(
                name,
                "attention.use",
                f"{name} is compiled for a latent size of {LATENT}, key heads of {NOPE} + "
                f"{ROTARY} rotary and value heads of {VALUE}; this model has {found[0]}, "
                f"{found[2]} + {found[1]} and {found[3]}",
                'attention.use = "auto"',
            )

    return check


def check_kv_is_compute(name: str) -> Check:
    """Return a check that refuses a 16-bit KV cache in another dtype than the compute dtype.

    ``name``: name of the attention backend, for the refusals.
    """

    def check(context: CheckContext) -> Iterator[Refusal]:
        compute = context.values.dtype
        kept = context.values.kv_dtype
        if kept in SIXTEEN_BITS and kept != compute:
            yield Refusal(
                name,
                "attention.kv_dtype",
                f"{name} reads a KV cache in the compute dtype {compute}, not in {kept}",
                'attention.kv_dtype = "auto"',
            )

    return check


def check_sizes_and_kv(name: str) -> Check:
    """Return a check that does what ``check_sizes`` and ``check_kv_is_compute`` do.

    ``name``: name of the attention backend, for the refusals.
    """
    sizes = check_sizes(name)
    same_dtype = check_kv_is_compute(name)

    def check(context: CheckContext) -> Iterator[Refusal]:
        yield from sizes(context)
        yield from same_dtype(context)

    return check

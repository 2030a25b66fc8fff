"""What the latent-attention libraries for Hopper have in common: the sizes their kernels are built
for.
"""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import Check, CheckContext
from glowplug.kernels.launch import cards
from glowplug.plugins.attention.shared.absorbed import check_absorbed

SGL_KERNEL = "sglang-kernel"  #: the distribution; it is imported as ``sgl_kernel``
HOPPER = frozenset({cards.HOPPER})
SIXTEEN_BITS = frozenset({"bfloat16", "float16"})
#: DeepSeek-V2's and V3's sizes of a head
LATENT = 512
ROTARY = 64
NOPE = 128
VALUE = 128


def check_sizes(name: str) -> Check:
    """Refuses a model whose heads are not DeepSeek's, which the library's kernels are compiled for."""

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
                f"{name} is compiled for a latent of {LATENT}, heads of "
                f"{NOPE} + {ROTARY} rotated and values of {VALUE}; this model has {found[0]}, "
                f"{found[2]} + {found[1]} and {found[3]}",
                'attention.use = "auto"',
            )

    return check


def check_kv_is_compute(name: str) -> Check:
    """As :func:`check_sizes`, and the cache must be kept in the compute dtype."""
    sizes = check_sizes(name)

    def check(context: CheckContext) -> Iterator[Refusal]:
        yield from sizes(context)
        compute = context.values["dtype"]
        kept = context.values["kv_dtype"]
        if kept in SIXTEEN_BITS and kept != compute:
            yield Refusal(
                name,
                "attention.kv_dtype",
                f"{name} reads a cache of the compute dtype {compute}, not {kept}",
                'attention.kv_dtype = "auto"',
            )

    return check

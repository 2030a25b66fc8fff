"""Latent attention on Hopper by the kernel measured fastest for each step: FlashMLA or this
project's own.
"""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.kernels.launch.cuda_arch import SHORT, SHORT_CONTEXT
from glowplug.plugins.attention.mla.flashmla import PAGE
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.decode_choice import Line, line, short_rows
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_kv_is_compute,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes

FIELD = "kernels.decode_attention"
NAMES = {"triton": "our own kernel", "flashmla": "FlashMLA"}


class HopperMlaOptions(AbsorbedOptions):
    use: Literal["hopper_mla"] = "hopper_mla"


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Whose kernels decode so many rows, and what a shorter context would change."""
    chosen = context.chosen.get("attention", ())
    values = context.values
    if not chosen or chosen[0].name != "hopper_mla":
        return []
    if values["kv_dtype"] not in SIXTEEN_BITS:
        return [Decision(FIELD, "triton", "hopper_mla", "FlashMLA reads no cache of 8 bits here")]
    width = values["width"]
    queries = width * context.facts.model.num_heads // axis_size("attn_tp", values["mesh"])
    used = line(queries, values["positions"], width)
    short = line(queries, SHORT_CONTEXT, width)
    why = f"rows of {queries} queries, as measured on an H200: {_words(used)}"
    if short != used and values["short_rows"]:
        why += f"; where no row of a captured step is longer than {SHORT} keys: {_words(short)}"
    elif short != used:
        why += f"; with a context_length of at most {SHORT_CONTEXT}: {_words(short)}"
    return [Decision(FIELD, "by rows", "hopper_mla", why)]


def _words(line: Line) -> str:
    """Each kernel with the most rows that it decodes."""
    *ends, (_, last) = ((most, NAMES[kernel]) for most, kernel in line)
    return ", ".join(
        [f"{kernel} up to {most} rows" for most, kernel in ends]
        + [f"{last} beyond" if ends else last]
    )


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="hopper_mla",
            options=HopperMlaOptions,
            check=check_kv_is_compute("hopper_mla"),
            factory="glowplug.plugins.attention.mla.hopper_runtime:HopperMla",
            requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
            offers=AttentionOffers(
                kinds=frozenset({"mla"}),
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS | {"fp8_e4m3"},
                page_sizes=frozenset({PAGE}),
                tree=True,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                short_keys=SHORT,
                short_rows=short_rows,
            ),
            summary="latent attention on Hopper, each step's decoding rows by what was measured fastest for "
            "their number, "
            "heads and the longest that can come (FlashMLA or Triton; table in attention/measured.py), prefill by "
            "FlashAttention-3",
        )
    ]

"""Latent attention on Hopper by the kernel measured fastest for each step, FlashMLA or Triton."""

from __future__ import annotations

from typing import Literal

from glowplug.core.facts.kv_layout import latent_entries
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import Decision
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.kernels.launch.cuda_arch import SHORT_CONTEXT, SHORT_KEYS_MAX
from glowplug.plugins.attention.mla.flashmla import PAGE_TOKENS
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.attention_tables import fastest_of, measured_time, plan_table
from glowplug.plugins.attention.shared.decode_choice import Line, nearest_entry, short_rows
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_sizes_and_kv,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes

PLAN_FIELD = "kernels.decode_attention"
KERNEL_NAMES = {"triton": "our own kernel", "flashmla": "FlashMLA"}
#: backends whose kernels decode rows; the first is this project's own
DECODES_WITH = ("triton_mla", "flashmla")


class HopperMlaOptions(AbsorbedOptions):
    use: Literal["hopper_mla"] = "hopper_mla"


@hookimpl
def plan_remarks(context: CheckContext) -> list[Decision]:
    """Return a list with one note for the plan's table: the decode kernel at each row count.

    If other kernels decode short contexts, the note names these too. The list is empty if the
    chosen attention backend is not ``hopper_mla``.
    """
    chosen = context.chosen.get("attention", ())
    values = context.values
    if not chosen or chosen[0].name != "hopper_mla":
        return []
    if values.kv_dtype not in SIXTEEN_BITS:
        return [
            Decision(
                PLAN_FIELD, "triton", "hopper_mla", "FlashMLA does not read an 8-bit KV cache here"
            )
        ]
    width = values.width
    queries = width * context.facts.model.num_heads // axis_size("attn_tp", values.mesh)
    found = _measured_words(context)
    if found:
        return [Decision(PLAN_FIELD, "by rows", "hopper_mla", found)]
    used = nearest_entry(queries, values.positions, width)
    short = nearest_entry(queries, SHORT_CONTEXT, width)
    why = f"fastest on an H200 for rows of {queries} queries: {_words(used)}"
    if short != used and values.short_rows:
        why += (
            f"; if no row of a captured step is longer than {SHORT_KEYS_MAX} keys: {_words(short)}"
        )
    elif short != used:
        why += f"; with a context_length of at most {SHORT_CONTEXT}: {_words(short)}"
    return [Decision(PLAN_FIELD, "by rows", "hopper_mla", why)]


def _measured_words(context: CheckContext) -> str:
    """Return the kernels measured fastest on this card as text; "" without a table of both."""
    table = plan_table(context, context.values.width)
    fastest = {rows: fastest_of(found, DECODES_WITH) for rows, found in table.items()}
    if not fastest or None in fastest.values():
        return ""
    listed = ", ".join(f"{name} at {rows} rows" for rows, name in fastest.items())
    return f"fastest as measured on {context.facts.hardware.devices[0].name}: {listed}"


def _words(line: Line) -> str:
    """Return a table entry as text, such as "our own kernel up to 8 rows, FlashMLA beyond"."""
    *ends, (_, last) = ((most, KERNEL_NAMES[kernel]) for most, kernel in line)
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
            check=check_sizes_and_kv("hopper_mla"),
            factory="glowplug.plugins.attention.mla.hopper_runtime:HopperMla",
            requires=(Package(SGL_KERNEL, ">=0.4.2"), Package("triton", ">=3.5")),
            offers=AttentionOffers(
                measured=measured_time(*DECODES_WITH),
                kinds=frozenset({"mla"}),
                kv_entries=latent_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS | {"fp8_e4m3"},
                page_sizes=frozenset({PAGE_TOKENS}),
                tree=True,
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                short_keys=SHORT_KEYS_MAX,
                short_rows=short_rows,
            ),
            summary="latent attention on Hopper: each step's decode rows by the kernel measured "
            "fastest for their number, heads and longest context (FlashMLA or Triton; table in "
            "plugins/attention/shared/decode_choice.py), prefill by FlashAttention-3",
        )
    ]

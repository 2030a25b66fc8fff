"""Latent attention by FlashMLA of sgl_kernel, on Hopper.

Prefill and drafts use sgl_kernel's FlashAttention-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import latent_entries
from glowplug.core.facts.mesh import group_share
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.attention_tables import measured_time
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_sizes_and_kv,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes
from glowplug.plugins.attention.shared.table_bytes import shifted_bytes

PAGE_TOKENS = 64  #: the only page size that FlashMLA's kernels read
FP8 = "fp8_e4m3"
#: most rows of a step for FlashMLA's FP8 schedule; with more the library ends the process
FP8_ROWS_MAX = 4095
#: most tokens per row for FlashMLA's FP8 schedule: 32 tokens of 128 heads are 64 tiles, each of
#: which gets at least one multiprocessor
FP8_WIDTH_MAX = 32

_check_sizes = check_sizes_and_kv("flashmla")


class FlashMlaOptions(AbsorbedOptions):
    use: Literal["flashmla"] = "flashmla"


def check(context: CheckContext) -> Iterator[Refusal]:
    """Refuse unsupported sizes and dtypes, and steps beyond the limits of FlashMLA's FP8 kernel."""
    yield from _check_sizes(context)
    if context.values.kv_dtype != FP8:
        return
    other = 'attention.use = "auto", or attention.kv_dtype = "auto"'
    if any(
        getattr(chosen.offers, "first_key", False)
        for chosen in context.chosen.get("speculative", ())
    ):
        yield Refusal(
            "flashmla",
            "attention.kv_dtype",
            "flashmla runs drafts by FlashAttention-3, which reads no KV cache in fp8_e4m3",
            f'{other}, or speculative.use = "none"',
        )
    if context.values.width > FP8_WIDTH_MAX:
        yield Refusal(
            "flashmla",
            "attention.kv_dtype",
            f"flashmla takes at most {FP8_WIDTH_MAX} query tokens per row over a KV cache in "
            f"fp8_e4m3; the speculative algorithm computes {context.values.width}",
            other,
        )
    mesh = context.values.mesh
    rows = context.config.scheduler.max_running_requests
    if rows is not None and group_share(rows, mesh) > FP8_ROWS_MAX:
        yield Refusal(
            "flashmla",
            "scheduler.max_running_requests",
            f"flashmla takes at most {FP8_ROWS_MAX} rows per step over a KV cache in fp8_e4m3, "
            f"not {group_share(rows, mesh)}",
            f"scheduler.max_running_requests = {FP8_ROWS_MAX * mesh.get('dp', 1)}, or {other}",
        )


@hookimpl
def register_attention_backends() -> list[Component]:
    return [
        Component(
            name="flashmla",
            options=FlashMlaOptions,
            check=check,
            factory="glowplug.plugins.attention.mla.flashmla_runtime:FlashMla",
            requires=(Package(SGL_KERNEL, ">=0.4.2"),),
            offers=AttentionOffers(
                measured=measured_time("flashmla"),
                kinds=frozenset({"mla"}),
                kv_entries=latent_entries,
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS | {FP8},
                page_sizes=frozenset({PAGE_TOKENS}),
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                reserves=shifted_bytes,
            ),
            summary="latent attention by FlashMLA (sgl_kernel), Hopper, pages of 64, with a 16-bit "
            "or FP8 cache; over an FP8 cache the queries are rounded to FP8, too",
        )
    ]

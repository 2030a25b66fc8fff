"""Latent attention by FlashMLA of sgl_kernel, on Hopper; prefill and drafts by its
FlashAttention-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component, Package
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import EVERY_MODE_GRAPH, AttentionOffers, Capture, Mode
from glowplug.plugins.attention.shared.absorbed import AbsorbedOptions
from glowplug.plugins.attention.shared.hopper_libraries import (
    HOPPER,
    SGL_KERNEL,
    SIXTEEN_BITS,
    check_kv_is_compute,
)
from glowplug.plugins.attention.shared.prefill_bytes import mla_bytes
from glowplug.plugins.attention.shared.table_bytes import slots_bytes

PAGE = 64  #: the only page size its kernels read
FP8 = "fp8_e4m3"
#: most rows of a step that its schedule for FP8 takes; with more the library ends the process
FP8_ROWS = 4095
#: tokens a row: of 128 heads they are 64 tiles, of which each gets a multiprocessor at least
FP8_WIDTH = 32

_check_sizes = check_kv_is_compute("flashmla")


class FlashMlaOptions(AbsorbedOptions):
    use: Literal["flashmla"] = "flashmla"


def check(context: CheckContext) -> Iterator[Refusal]:
    """Its sizes and dtypes, and what its kernel for FP8 caches does not do."""
    yield from _check_sizes(context)
    if context.values["kv_dtype"] != FP8:
        return
    other = 'attention.use = "auto", or attention.kv_dtype = "auto"'
    if any(
        getattr(chosen.offers, "first_key", False)
        for chosen in context.chosen.get("speculative", ())
    ):
        yield Refusal(
            "flashmla",
            "attention.kv_dtype",
            "flashmla gives drafts to FlashAttention-3, which reads no cache in fp8_e4m3",
            f'{other}, or speculative.use = "none"',
        )
    if context.values["width"] > FP8_WIDTH:
        yield Refusal(
            "flashmla",
            "attention.kv_dtype",
            f"flashmla takes {FP8_WIDTH} query tokens a row over a cache "
            f"in fp8_e4m3, the speculative algorithm computes {context.values['width']}",
            other,
        )
    rows = context.config.scheduler.max_running_requests
    if rows is not None and rows > FP8_ROWS:
        yield Refusal(
            "flashmla",
            "scheduler.max_running_requests",
            f"flashmla takes {FP8_ROWS} rows a step over a cache in fp8_e4m3, not {rows}",
            f"scheduler.max_running_requests = {FP8_ROWS}, or {other}",
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
                kinds=frozenset({"mla"}),
                devices=frozenset({"cuda"}),
                compute=HOPPER,
                dtypes=SIXTEEN_BITS,
                kv_dtypes=SIXTEEN_BITS | {FP8},
                page_sizes=frozenset({PAGE}),
                first_key=True,
                modes={**EVERY_MODE_GRAPH, Mode.PREFILL: Capture.EAGER},
                work=mla_bytes,
                reserves=slots_bytes,
            ),
            summary="latent attention by FlashMLA (sgl_kernel), Hopper, pages of 64, with 16 bits or FP8 in the "
            "cache; over FP8 its queries are rounded to FP8, too",
        )
    ]

"""A plugin for tests: attention backends whose KV caches cannot be made, or contradict the plan."""

from __future__ import annotations

from typing import Literal

from glowplug.core.api import (
    EVERY_MODE_EAGER,
    AttentionOffers,
    AttentionOptions,
    Component,
    EnginePlan,
    KVContext,
    KVEntry,
    KVLayout,
    hookimpl,
)
from glowplug.core.protocols import AttentionBackend, Worker


class LargerOptions(AttentionOptions):
    use: Literal["larger"] = "larger"


class OddOptions(AttentionOptions):
    use: Literal["odd"] = "odd"
    kv_dtype: Literal["int4", "float23", "float16", "bfloat16", "fp8_e5m2"] = "int4"  # type: ignore[assignment]


def plain(context: KVContext) -> tuple[KVEntry, ...]:
    return (
        KVEntry("latent", (context.model.kv_lora_rank,), context.dtype),
        KVEntry("rope", (context.model.qk_rope_head_dim,), context.dtype),
    )


def odd(context: KVContext) -> tuple[KVEntry, ...]:
    more = {"float16": ((7,),), "bfloat16": ((0, 1),), "int4": (), "float23": ()}[context.dtype]
    return (*plain(context), *(KVEntry("rope", (1,), context.dtype, layers) for layers in more))


class Larger(AttentionBackend):
    """Keeps two latents for each that it declares."""

    def __init__(self, options: LargerOptions, plan: EnginePlan, worker: Worker) -> None:
        self._plan = plan

    def mla_projected(self, *given: object) -> None:
        """Never run: the start ends before."""

    mla = store_mla = mla_projected

    def kv_layout(self) -> KVLayout:
        def larger(context: KVContext) -> tuple[KVEntry, ...]:
            latent, rope = plain(context)
            return KVEntry("latent", (2 * latent.shape[0],), latent.dtype), rope

        return self._plan.kv_layout(larger)


@hookimpl
def register_attention_backends() -> list[Component]:
    kinds, modes = frozenset({"mla"}), dict(EVERY_MODE_EAGER)
    kept = frozenset({"int4", "float23", "float16", "bfloat16", "fp8_e5m2"})
    return [
        Component(
            "larger",
            LargerOptions,
            "tests.plugins.faulty_caches:Larger",
            AttentionOffers(kinds=kinds, kv_entries=plain, modes=modes),
        ),
        Component(
            "odd",
            OddOptions,
            "tests.plugins.faulty_caches:Larger",
            AttentionOffers(kinds=kinds, kv_entries=odd, kv_dtypes=kept, modes=modes),
        ),
    ]

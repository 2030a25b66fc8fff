"""CUDA graphs for decode steps and for small prefill steps.

Decode steps are captured once for each of a list of batch sizes and then replayed, without
launching their kernels one by one. A batch between two sizes is padded to the larger one.

Small prefill steps, in which launching takes longer than computing, use piecewise graphs for a list
of token counts: the work between two layers' attention is a graph, which includes what attention
does for each token alone (``PreparedMla``), while the rest of attention runs eagerly. A draft's
pass over the tokens of such a step (draft extend) runs no attention and is one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext, Component
from glowplug.core.plugin.hookspecs import hookimpl
from glowplug.core.plugin.offers import GraphOffers, Mode
from glowplug.core.plugin.options import DEVICE_DEFAULTS, GraphOptions
from glowplug.core.plugin.slots import CAPTURED_SLOTS

NAME = "cuda_graph"
CAPTURES = frozenset({Mode.DECODE, Mode.VERIFY, Mode.DRAFT_DECODE})
ROWS_MAX = 512  #: largest batch size of the default list
#: batch sizes of the default list below 16, where a padding row costs most
SMALL_SIZES = (1, 2, 3, 4, 6, 8, 12)
#: token counts of the default list. Up to some hundred tokens, a step reads every weight whatever
#: the number of tokens; beyond the last count, computing takes as long as launching on one GPU.
TOKEN_COUNTS = (16, 32, *range(64, 513, 64), *range(640, 1537, 128))
#: token counts beyond, of several ranks or if a larger limit is set. Ranks share the computing but
#: not the launching, and each exchange waits for the rank that launches last: an eager step of
#: 8,192 tokens of DeepSeek-V2-Lite took two H200 111 ms, of which their kernels ran 44.
LARGE_COUNTS = (
    1792,
    *range(2048, 4096, 512),
    *range(4096, 8192, 1024),
    *range(8192, 16385, 2048),
)

Size = Annotated[int, Field(ge=1)]


class CudaGraphOptions(GraphOptions):
    use: Literal["cuda_graph"] = "cuda_graph"
    batch_sizes: tuple[Size, ...] | None = Field(
        None,
        min_length=1,
        description="batch sizes (sequences per decode step of the whole engine) to capture; None: "
        "1, 2, 3, 4, 6, 8, 12, 16, then every 8 up to 64, every 16 up to 256 and every 32 (of each "
        "dp group)",
    )
    max_batch: int | None = Field(
        None,
        ge=1,
        description="largest batch size of the whole engine to capture; None: "
        f"scheduler.max_running_requests, {ROWS_MAX} of each dp group at most",
    )
    prefill_tokens: tuple[Size, ...] | None = Field(
        None,
        min_length=1,
        description="token counts of prefill steps to capture; None: 16, 32, 64, then every 64 "
        f"up to 512, every 128 up to {TOKEN_COUNTS[-1]}, and larger ones with several ranks",
    )
    max_prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="largest token count to capture; None: the largest one of prefill_tokens, or "
        f"{TOKEN_COUNTS[-1]} on one rank, {LARGE_COUNTS[-1]} on several",
    )
    on_failure: Literal["stop", "eager"] = Field(
        "stop",
        description="when a capture fails: stop loading, or on one rank run the steps of that size "
        "and mode eagerly (there a failed capture of prefill steps stops loading only if "
        "graphs.prefill is true)",
    )

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        found = super().without_effect(context)
        if not context.values.draft_extends:
            found = {**found, "draft_extend": "this plan has no draft-extend pass"}
        loose = [
            chosen.name
            for slot in CAPTURED_SLOTS
            for chosen in context.chosen[slot]
            if Mode.PREFILL not in chosen.offers.captures_in
        ]
        why = f"{', '.join(loose)} syncs with the host or allocates in prefill"
        return (
            {**found, **dict.fromkeys(("prefill_tokens", "max_prefill_tokens"), why)}
            if loose
            else found
        )

    def sizes(self, rows: int, groups: int = 1) -> tuple[int, ...]:
        most = min(rows, -(-self.max_batch // groups) if self.max_batch else ROWS_MAX)
        if self.batch_sizes is None:
            return (*(size for size in default_sizes() if size < most), most)
        shares = {-(-size // groups) for size in self.batch_sizes}
        return tuple(sorted(share for share in shares if share <= most))

    def token_counts(self, tokens: int, ranks: int = 1) -> tuple[int, ...]:
        if self.prefill is False:
            return ()
        if self.prefill_tokens is not None:
            most = min(tokens, self.max_prefill_tokens or tokens)
            return tuple(sorted({count for count in self.prefill_tokens if count <= most}))
        default = TOKEN_COUNTS if ranks == 1 else LARGE_COUNTS
        most = min(tokens, self.max_prefill_tokens or default[-1])
        return (*(count for count in (*TOKEN_COUNTS, *LARGE_COUNTS) if count < most), most)


def default_sizes() -> tuple[int, ...]:
    return (*SMALL_SIZES, *range(16, 64, 8), *range(64, 256, 16), *range(256, ROWS_MAX + 1, 32))


def check_cuda_graph(context: CheckContext) -> Iterator[Refusal]:
    """Refuse batch sizes and prefill settings with which nothing can be captured."""
    options: CudaGraphOptions = context.options
    smallest = min(options.batch_sizes or (1,))
    configured = context.config.scheduler.max_running_requests
    rows = configured or DEVICE_DEFAULTS["cuda"].running * context.values.mesh.get("dp", 1)
    if options.max_batch is not None and smallest > options.max_batch:
        yield Refusal(
            NAME,
            "graphs.max_batch",
            f"every batch size to capture exceeds graphs.max_batch = {options.max_batch}",
            f"graphs.max_batch = {max(options.batch_sizes or ())}",
        )
    elif smallest > rows:
        by = "" if configured else " by default"
        yield Refusal(
            NAME,
            "graphs.batch_sizes",
            f"every batch size to capture exceeds the {rows} sequences that may run{by}",
            f"graphs.batch_sizes = [{rows}], or scheduler.max_running_requests = {smallest}",
        )
    if options.on_failure == "eager" and context.values.ranks > 1:
        yield Refusal(
            NAME,
            "graphs.on_failure",
            f"{context.values.ranks} ranks exchange tensors of equal sizes: a rank whose capture "
            "fails cannot run eagerly beside ranks that replay",
            'graphs.on_failure = "stop", or graphs.use = "eager"',
        )
    yield from _prefill(options, context)


def _prefill(options: CudaGraphOptions, context: CheckContext) -> Iterator[Refusal]:
    """Refuse prefill settings that leave nothing to capture or cannot be captured."""
    smallest = min(options.prefill_tokens or (1,))
    if options.prefill is False and (options.prefill_tokens or options.max_prefill_tokens):
        yield Refusal(
            NAME,
            "graphs.prefill",
            "token counts are set, but graphs.prefill = false captures no prefill step",
            "leave graphs.prefill out, or the token counts",
        )
    elif options.max_prefill_tokens is not None and smallest > options.max_prefill_tokens:
        yield Refusal(
            NAME,
            "graphs.max_prefill_tokens",
            "every token count to capture exceeds graphs.max_prefill_tokens = "
            f"{options.max_prefill_tokens}",
            f"graphs.max_prefill_tokens = {max(options.prefill_tokens or ())}",
        )
    for chosen in [chosen for slot in CAPTURED_SLOTS for chosen in context.chosen.get(slot, ())]:
        if options.prefill and Mode.PREFILL not in chosen.offers.captures_in:
            yield Refusal(
                NAME,
                "graphs.prefill",
                f"{chosen.name} syncs with the host or allocates in prefill, so prefill steps "
                "cannot be captured",
                "leave graphs.prefill out",
            )


@hookimpl
def register_graph_runners() -> list[Component]:
    return [
        Component(
            name=NAME,
            options=CudaGraphOptions,
            check=check_cuda_graph,
            factory="glowplug.plugins.graphs.cuda_graph_runtime:CudaGraph",
            offers=GraphOffers(devices=frozenset({"cuda"}), captures=CAPTURES),
            summary="decode steps replayed from CUDA graphs, padded to captured batch sizes",
        )
    ]

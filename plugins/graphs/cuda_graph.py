"""CUDA graphs: decoding steps are captured once for a list of batch sizes and replayed, without launching their kernels
one by one. A batch between two sizes is filled up to the larger one."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from glowplug.core.component import CheckContext, Component
from glowplug.core.errors import Refusal
from glowplug.core.hookspecs import hookimpl
from glowplug.core.offers import GraphOffers, Mode
from glowplug.core.options import GraphOptions

NAME = "cuda_graph"
CAPTURES = frozenset({Mode.DECODE, Mode.VERIFY, Mode.DRAFT_DECODE})
MOST_ROWS = 512  #: of the default list
SMALL = (1, 2, 3, 4, 6, 8, 12)  #: sizes below 16 of the default list, where a row added costs the most

Size = Annotated[int, Field(ge=1)]


class CudaGraphOptions(GraphOptions):
    use: Literal["cuda_graph"] = "cuda_graph"
    batch_sizes: tuple[Size, ...] | None = Field(
        None, min_length=1, description="sequences in a step to capture; None: 1, 2, 3, 4, 6, 8, 12, 16, and on in "
                                        "steps of 8 to 64, 16 to 256 and 32")
    max_batch: int | None = Field(None, ge=1, description="the largest of them; None: scheduler.max_running_requests, "
                                                          f"{MOST_ROWS} at most")
    on_failure: Literal["stop", "eager"] = Field(
        "stop", description="when a capture fails: stop loading, or run the steps of that size and mode eagerly")

    def sizes(self, rows: int) -> tuple[int, ...]:
        most = min(rows, self.max_batch or MOST_ROWS)
        if self.batch_sizes is None:
            return (*(size for size in default_sizes() if size < most), most)
        return tuple(sorted({size for size in self.batch_sizes if size <= most}))


def default_sizes() -> tuple[int, ...]:
    return (*SMALL, *range(16, 64, 8), *range(64, 256, 16), *range(256, MOST_ROWS + 1, 32))


def check_cuda_graph(context: CheckContext) -> Iterator[Refusal]:
    """Sizes that leave something to capture, and one rank."""
    options: CudaGraphOptions = context.options
    smallest, rows = min(options.batch_sizes or (1,)), context.config.scheduler.max_running_requests
    if options.max_batch is not None and smallest > options.max_batch:
        yield Refusal(NAME, "graphs.max_batch", f"every batch size to capture is above {options.max_batch}, the "
                      "largest allowed", f"graphs.max_batch = {max(options.batch_sizes or ())}")
    elif rows is not None and smallest > rows:
        yield Refusal(NAME, "graphs.batch_sizes", f"every batch size to capture is above the {rows} sequences that may "
                      "run", f"graphs.batch_sizes = [{rows}]")
    if context.values["ranks"] > 1:
        yield Refusal(NAME, "graphs.use", f"steps of {context.values['ranks']} ranks exchange through collectives, "
                      f"which {NAME} does not capture", 'graphs.use = "eager"')


@hookimpl
def register_graph_runners() -> list[Component]:
    return [Component(
        name=NAME, options=CudaGraphOptions, check=check_cuda_graph,
        factory="glowplug.plugins.graphs.cuda_graph_runtime:CudaGraph",
        offers=GraphOffers(devices=frozenset({"cuda"}), captures=CAPTURES),
        summary="decoding steps replayed from CUDA graphs, filled up to captured batch sizes")]

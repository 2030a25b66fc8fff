"""What captured graphs take: the plan's estimate, and which batch sizes they are captured for. No torch."""
from __future__ import annotations

from collections.abc import Callable

from glowplug.core.draft import Draft
from glowplug.core.options import GraphOptions
from glowplug.core.plan import BudgetLine

MIB = 1 << 20
FIXED = 96 * MIB  #: what the first graph takes: the driver, and libraries' workspaces for the capturing stream
PER_LAYER = MIB // 9  #: what it takes for a layer in the graphs of one batch size: parameters of its kernels


def driver_bytes(sizes: int, layers: int) -> int:
    """What the driver takes for the graphs of so many batch sizes of a model."""
    return FIXED + sizes * layers * PER_LAYER


def graph_line(draft: Draft, rows: int, step_bytes: Callable[[int], int]) -> BudgetLine | None:
    """Where ``rows`` sequences may run; ``step_bytes`` of a number of tokens: activations of such a step. None without
    graphs. Says in the plan which batch sizes are captured.

    All graphs share one pool, so that it is as large as the largest needs: a step's activations, its logits as the
    head leaves them and in float32, and what sampling makes of them.
    """
    runner = draft.first("graphs")
    if runner is None or not isinstance(runner.options, GraphOptions):
        return None
    sizes = runner.options.sizes(rows)
    if not sizes:
        return None
    _decide(draft, sizes, rows)
    tokens = sizes[-1] * draft.values["width"]
    logits = tokens * draft.facts.model.vocab_size * (4 + 4 + 2)
    size = driver_bytes(len(sizes), draft.facts.model.num_layers) + step_bytes(tokens) + logits
    return BudgetLine("graphs", size, f"{len(sizes)} batch sizes up to {sizes[-1]}, one pool")


def _decide(draft: Draft, sizes: tuple[int, ...], rows: int) -> None:
    """The list as it is captured: the operator's without what cannot run, or the default."""
    asked = getattr(draft.config.graphs, "batch_sizes", None)
    if asked is None:
        draft.decide("graphs.batch_sizes", list(sizes), "size", f"default, up to {sizes[-1]} of {rows} sequences")
        return
    by, why = draft.source("graphs.batch_sizes") or ("operator", "")
    left_out = sorted(set(asked) - set(sizes))
    if left_out:
        limit = f"{rows} sequences run at most" if left_out[-1] > rows else "graphs.max_batch is lower"
        by, why = "size", f"without {', '.join(map(str, left_out))}: {limit}"
    draft.decide("graphs.batch_sizes", list(sizes), by, why)

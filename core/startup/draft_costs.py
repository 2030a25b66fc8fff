"""Measured seconds of a step for each size of its drafts, for the choice among them.

The steps run over the scratch page, as in warm-up. Their rows have short prompts of different
tokens, so that they choose different experts and drafts are as many as in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import msgspec
import numpy as np

from glowplug.core.engine.in_flight import InFlight
from glowplug.core.engine.runner import Runner
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Collectives, DraftPolicy, Scheduler, SpeculativeAlgorithm
from glowplug.core.speculation.adaptive import AdaptivePolicy
from glowplug.core.speculation.foreseen_drafts import FixedDrafts, ForeseenDrafts
from glowplug.core.startup.warmup import scratch_batch, spread_ids
from glowplug.core.step.batch import Batch, shape_of

PROMPT_TOKENS = 4  #: tokens of each row's prompt

#: ``draft_policy`` of an algorithm: a function from the sizes of drafts and the seconds of steps
MakesDraftPolicy = Callable[[tuple[DraftShape, ...], DraftCosts], DraftPolicy]


@dataclass(frozen=True)
class Effort:
    """The effort of a measurement.

    Attributes:
        seconds: once the measurement has taken this long, no further numbers of rows are measured,
            and steps are repeated once at most.
        runs: most timed steps for each size of the drafts and number of rows.
        factor: ratio of successive numbers of rows.
    """

    seconds: float
    runs: int
    factor: int


ON_DEVICE = Effort(seconds=4.0, runs=5, factor=2)
ON_CPU = Effort(seconds=0.2, runs=3, factor=4)
SHORTEST = 1e-6  #: least seconds of a step, below the resolution of the clock
#: made at the import: ranks in threads of one process that made their first decoder of a type at
#: once ended the process
_COSTS = msgspec.json.Decoder(DraftCosts)
LEAST_TURNS = 2  #: turns of the sizes that are measured however long it takes
LEAST_NUMBERS = 2  #: numbers of rows that are measured however long it takes


def draft_costs(
    runner: Runner, plan: EnginePlan, collectives: Collectives, leads: bool
) -> DraftCosts | None:
    """Return the costs by which steps choose the size of their drafts.

    They are the plan's if it has any, else measured. All ranks call this together and get the costs
    that rank 0 has measured.

    Args:
        leads: this is rank 0.

    Returns:
        The costs; None if there are drafts of one size only.
    """
    if not _chooses(plan) or plan.draft_costs is not None:
        return plan.draft_costs
    effort = ON_CPU if plan.device == "cpu" else ON_DEVICE
    found = measure(runner, plan, _Clock(collectives, leads, effort.seconds), effort)
    data = collectives.broadcast_bytes(msgspec.json.encode(found) if leads else None)
    return _COSTS.decode(data)


def adapt(
    scheduler: Scheduler,
    plan: EnginePlan,
    costs: DraftCosts | None,
    algorithm: SpeculativeAlgorithm,
    foresees: bool,
) -> None:
    """Have ``scheduler`` choose the size of the drafts of each step, if there are several.

    The choice is by ``costs``, and the policy is the algorithm's own if it has one
    (``draft_policy``). With drafts of one given size the choice is only between these and none.
    ``foresees``: the algorithm's offer.
    """
    shapes = plan.sizes.draft_shapes
    if len(shapes) < 2:
        return
    policy: DraftPolicy
    make: MakesDraftPolicy | None = getattr(algorithm, "draft_policy", None)
    if costs is None:
        policy = FixedDrafts(shapes[-1])
    elif make is not None:
        policy = make(shapes, costs)
    else:
        clocked = plan.draft_costs is None  # costs that the operator gave are not corrected
        policy = AdaptivePolicy(shapes, costs, plan.sizes.max_running, clocked)
    if foresees:
        policy = ForeseenDrafts(policy, plan.sizes.max_running)
    scheduler.adapt(policy)  # type: ignore[attr-defined]  # the plan has checked its offers


def _chooses(plan: EnginePlan) -> bool:
    """Return whether the size of the drafts is chosen by the seconds of a step."""
    several = len(plan.sizes.draft_shapes) > 1
    return several and bool(plan.choice("speculative").options.get("adaptive"))


def described(costs: DraftCosts) -> str:
    """Return costs as text for the log: milliseconds for the smallest and largest steps."""
    parts = []
    for entry in costs.entries:
        first, last = (1e3 * seconds for seconds in (entry.seconds[0], entry.seconds[-1]))
        parts.append(f"{entry.shape.steps} {first:.3g} to {last:.3g} ms")
    rows = costs.entries[0].rows
    return f"draft steps, {rows[0]} to {rows[-1]} rows: {', '.join(parts)}"


def measure(runner: Runner, plan: EnginePlan, clock: _Clock, effort: Effort) -> DraftCosts:
    """Measure the seconds of a step for each size of the drafts and several numbers of rows.

    More rows or tokens are taken to cost at least as much as fewer.
    """
    shapes = plan.sizes.draft_shapes
    numbers: list[int] = []
    seconds: list[list[float]] = []  # for each number of rows, those of each shape
    ready = 0
    for rows in _numbers(plan.sizes.max_running, effort.factor):
        _prefill(runner, plan, ready, rows)
        ready = rows
        found = (_on_cpu if plan.device == "cpu" else _on_device)(
            runner, plan, rows, shapes, effort.runs, clock
        )
        found = list(accumulate(found, max))
        if seconds:
            found = [max(pair) for pair in zip(found, seconds[-1])]
        numbers.append(rows)
        seconds.append(found)
        if clock.over() and len(numbers) >= LEAST_NUMBERS:
            break
    return DraftCosts(
        tuple(
            ShapeCosts(shape, tuple(numbers), tuple(column))
            for shape, column in zip(shapes, zip(*seconds))
        )
    )


class _Clock:
    """The time limit of a measurement, on which all ranks agree."""

    def __init__(self, collectives: Collectives, leads: bool, seconds: float) -> None:
        self._collectives = collectives
        self._leads = leads
        self._end = time.perf_counter() + seconds

    def over(self) -> bool:
        """Return whether rank 0's time is over; all ranks call this together."""
        own = b"over" if time.perf_counter() > self._end else b"go on"
        return self._collectives.broadcast_bytes(own if self._leads else None) == b"over"


def _numbers(most: int, factor: int) -> Iterator[int]:
    """Yield 1, the powers of ``factor`` below ``most``, and ``most``."""
    rows = 1
    while rows < most:
        yield rows
        rows *= factor
    yield most


def _prompt_length(plan: EnginePlan) -> int:
    sizes = plan.sizes
    return max(1, min(PROMPT_TOKENS, sizes.chunk_size, sizes.context_length - sizes.width))


def _prefill(runner: Runner, plan: EnginePlan, first: int, last: int) -> None:
    """Compute the prompts of rows ``first`` to ``last``, which then decode different tokens."""
    length = _prompt_length(plan)
    ids = spread_ids(plan, last * length)
    each = plan.sizes.chunk_size // length
    for begin in range(first, last, each):
        rows = np.arange(begin, min(begin + each, last), dtype=np.int32)
        own = ids[rows[0] * length : (rows[-1] + 1) * length]
        batch = scratch_batch(plan, Mode.PREFILL, len(rows), length, length, own)
        batch.rows = rows
        batch.next_ids = np.zeros(len(rows), np.int32)
        _launch(runner, batch).wait()


def _on_cpu(
    runner: Runner,
    plan: EnginePlan,
    rows: int,
    shapes: tuple[DraftShape, ...],
    runs: int,
    clock: _Clock,
) -> list[float]:
    """Return the least CPU seconds of a step of ``rows`` rows for each size of the drafts.

    Only their ratios matter, and other work on the machine changes CPU seconds least. The sizes
    take turns for the same reason. There are two turns at least, because the first step of a size
    may take five times as long.
    """
    least = [float("inf")] * len(shapes)
    for turn in range(runs):
        if clock.over() and turn >= LEAST_TURNS:
            break
        for place, shape in enumerate(shapes):
            batch = _step(plan, rows, shape)
            begun = time.process_time()
            _launch(runner, batch).wait()
            least[place] = min(least[place], max(time.process_time() - begun, SHORTEST))
    return least


def _on_device(
    runner: Runner,
    plan: EnginePlan,
    rows: int,
    shapes: tuple[DraftShape, ...],
    runs: int,
    clock: _Clock,
) -> list[float]:
    """Return the median seconds of a step of ``rows`` rows for each size of the drafts."""
    return [_repeated(runner, plan, rows, shape, runs) for shape in shapes]


def _repeated(runner: Runner, plan: EnginePlan, rows: int, shape: DraftShape, runs: int) -> float:
    """Return the median seconds of a step of ``rows`` rows with drafts of one size.

    If steps overlap, one is launched before the one before has ended, as in service.
    """
    ends = []
    due: InFlight | None
    flying: InFlight | None = None
    for _ in range(runs + 1 + plan.overlap):
        due = _launch(runner, _step(plan, rows, shape))
        if plan.overlap:
            due, flying = flying, due
        if due is not None:
            due.wait()
            ends.append(time.perf_counter())
    if flying is not None:
        flying.wait()
    return median(after - before for before, after in zip(ends, ends[1:]))


def _step(plan: EnginePlan, rows: int, shape: DraftShape) -> Batch:
    """Return a step of ``rows`` decoding rows with drafts of one size."""
    sizes = plan.sizes
    mode = Mode.DECODE if shape.tokens == 1 else Mode.VERIFY
    # NOTE: rows grow by the tokens that their steps accept, at most to this bound
    grown = _prompt_length(plan) + len(sizes.step_shapes) * (ON_CPU.runs + 2) * sizes.width
    grown *= max(1, sizes.max_running.bit_length() + 1)
    most = min(grown, sizes.context_length) + shape.tokens
    batch = scratch_batch(plan, mode, rows, shape.tokens, most, np.zeros(0, np.int32))
    batch.draft_shape = shape
    return batch


def _launch(runner: Runner, batch: Batch) -> InFlight:
    batch.agreed = shape_of(batch)
    return runner.launch(batch)

"""The floor of decode steps with drafts, the speed that it allows, and the floor of a plan's steps.

A step with drafts reads what the target's verify step reads, and what each pass of the draft reads.
The tokens of a sequence choose experts of their own and share one read of its KV cache. Passes that
only store cache entries (of accepted tokens, in draft models of one layer) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.plan.budget.step import DRAFT_HEAD
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.step.draft_counts import Acceptance, DraftCounts
from glowplug.entrypoints.bench.others.floor import (
    ONE_RANK,
    Card,
    StepBytes,
    card_bandwidth,
    input_projections,
    step_bytes,
)
from glowplug.entrypoints.bench.ranks.exchange_times import ExchangeTimes

TTFT = "mean_ttft_ms"  #: metric of a server that drafts do not change
SHAPES = "draft_shapes"  #: key of a serving run's verify steps by shape of the drafts


@dataclass(frozen=True)
class DraftReads:
    """The weights that each pass of a draft reads.

    Attributes:
        model: facts of the draft as a model of its own; its vocabulary is that of its head.
        joined: elements of unquantized projections beside the layers, on each rank.
        stores_last: a round has a further pass that stores entries of the last drafts.
    """

    model: ModelFacts
    joined: float = 0.0
    stores_last: bool = False

    def passes(self, shape: DraftShape) -> list[int]:
        """Return the tokens of a row in each pass of a round."""
        drafts = [1, *[shape.topk] * (shape.steps - 1)] if shape.steps else []
        if self.stores_last:
            drafts.append(shape.tokens if shape.is_tree else 1)
        return drafts


def nextn_reads(model: ModelFacts, head_rows: int = 0) -> DraftReads:
    """Return what a pass of the first next-token layer reads.

    Args:
        model: facts of the checkpoint, or of a folder with the exported layer.
        head_rows: tokens that drafts choose from; 0: all.
    """
    routed = (model.sizes.routes(model.num_layers),)
    layer = replace(
        model,
        num_layers=1,
        vocab_size=head_rows or model.vocab_size,
        sizes=replace(model.sizes, routed=routed),
    )
    return DraftReads(layer, joined=2 * model.hidden_size**2)


def eagle_reads(head: ModelFacts, mesh: Mapping[str, int], head_rows: int = 0) -> DraftReads:
    """Return what a pass of an EAGLE head reads. ``head_rows``: as in ``nextn_reads``."""
    rows = head_rows or stated(head, "draft_vocab_size", head.vocab_size)
    # NOTE: attention of an EAGLE-3 head reads the token beside the state; the target's features
    # are reduced to a state only once for each token
    joined = input_projections(head, axis_size("attn_tp", mesh))
    if not head.sizes.features:
        joined = 2 * head.hidden_size**2
    return DraftReads(replace(head, vocab_size=rows), joined)


def draft_step_bytes(
    model: ModelFacts,
    shape: DraftShape,
    rows: int,
    context: int,
    reads: DraftReads | None,
    *,
    element: float = 2,
    kv_element: float = 2,
    mesh: Mapping[str, int] = ONE_RANK,
) -> StepBytes:
    """Return the bytes that a rank reads in a step whose rows all have drafts of one size.

    Args:
        model: facts of the target.
        shape: size of the drafts.
        rows: number of sequences, over all groups of ranks.
        context: tokens of each sequence.
        reads: what the draft's passes read; None: nothing, as n-gram drafts.
        element: bytes of an unquantized weight.
        kv_element: bytes of a number in the target's KV cache, which a draft without a cache of its
            own shares.
        mesh: mesh axis -> size.
    """
    found = step_bytes(
        model,
        rows,
        context,
        width=shape.tokens,
        element=element,
        kv_element=kv_element,
        mesh=mesh,
    )
    if reads is None:
        return found
    for tokens in reads.passes(shape):
        found += step_bytes(
            reads.model,
            rows,
            context,
            width=tokens,
            element=element,
            kv_element=element if reads.stores_last else kv_element,
            mesh=mesh,
        )
        found += StepBytes(reads.joined * element, 0.0, 0.0)
    return found


def allowed_speedup(
    model: ModelFacts,
    shape: DraftShape,
    accept_length: float,
    rows: int,
    context: int,
    reads: DraftReads | None,
) -> float:
    """Return the speed relative to no drafts that the bytes of a step allow.

    Weights and cache have their usual widths; see ``draft_step_bytes`` for the arguments.

    Args:
        accept_length: tokens that a row gains in a step on average.
    """
    plain = step_bytes(model, rows, context).total
    return accept_length * plain / draft_step_bytes(model, shape, rows, context, reads).total


def plan_reads(plan: EnginePlan) -> DraftReads | None:
    """Return what a pass of the plan's draft reads; None if it has no model."""
    draft = plan.facts.draft
    if plan.whole_draft:
        assert draft is not None, "the draft is a whole model"
        rows = _draft_head_rows(plan, draft)
        return DraftReads(replace(draft, vocab_size=rows or draft.vocab_size), stores_last=True)
    if not plan.sizes.draft_extends:
        return None
    rows = _draft_head_rows(plan, plan.facts.model)
    if draft is not None and not draft.nextn_layers:
        return eagle_reads(draft, plan.mesh, rows)
    return nextn_reads(draft or plan.facts.model, rows)


def _draft_head_rows(plan: EnginePlan, model: ModelFacts) -> int:
    """Return the tokens that drafts choose from; 0 for all. ``model``: model with their head."""
    row = model.hidden_size * DTYPE_BYTES[plan.dtype]
    held = sum(line.bytes for line in plan.budget if line.name == DRAFT_HEAD)
    return held // row * axis_size("attn_tp", plan.mesh)


def exchange_seconds(
    times: ExchangeTimes,
    model: ModelFacts,
    shape: DraftShape,
    rows: int,
    reads: DraftReads | None,
    mesh: Mapping[str, int],
) -> float:
    """Return the seconds of the exchanges of a step with drafts; see ``draft_step_bytes``.

    Raises:
        ValueError: an exchange of the step was not measured.
    """
    passes = [] if reads is None else reads.passes(shape)
    return times.step(model, mesh, rows * shape.tokens) + sum(
        times.step(reads.model, mesh, rows * tokens) for tokens in passes if reads is not None
    )


def served_floors(
    card: Card,
    model: ModelFacts,
    rows: int,
    prompt: int,
    output: int,
    drafted: Mapping[str, Any] | None,
) -> dict[str, float]:
    """Return the floors of a server's metrics at one concurrency; see ``Card.served``.

    Drafts are taken to be those of the checkpoint's next-token layer. Of a checkpoint without one,
    only the floor that does not depend on drafts is returned.

    Args:
        card: the card of each rank.
        model: facts of the checkpoint.
        rows: the concurrency.
        prompt: prompt tokens of a request.
        output: output tokens of a request.
        drafted: record of the run, if drafts were verified in it.
    """
    if drafted is None:
        return card.served(model, rows, prompt, output)
    middle = prompt + output // 2
    if not model.nextn_layers:
        return {TTFT: card.served(model, rows, prompt, output)[TTFT]}
    seconds = sum(
        count * _least_seconds(card, model, DraftShape(*map(int, name.split("/"))), rows, middle)
        for name, count in drafted[SHAPES].items()
    )
    gained = sum(drafted[SHAPES].values()) * drafted["accept_length"]
    return card.served(model, rows, prompt, output, seconds / gained)


def _least_seconds(
    card: Card, model: ModelFacts, shape: DraftShape, rows: int, context: int
) -> float:
    """Return the least seconds of a step with drafts by a next-token layer."""
    reads = nextn_reads(model)
    moved = draft_step_bytes(model, shape, rows, context, reads, mesh=card.mesh)
    found = moved.seconds(card.bandwidth)
    if card.exchanges is not None:
        found += exchange_seconds(card.exchanges, model, shape, rows, reads, card.mesh)
    return found


class StepFloor:
    """The floor of a plan's decode steps.

    Args:
        plan: the plan.
        bandwidth: bytes per second of device memory; None: that of the plan's cards.
        exchanges: times of the exchanges between ranks; None: they do not count.

    Attributes:
        bandwidth: bytes per second of device memory; 0 if it is unknown.
        about: what the floor consists of, for records.
    """

    def __init__(
        self, plan: EnginePlan, bandwidth: float | None, exchanges: ExchangeTimes | None
    ) -> None:
        self._plan = plan
        self._exchanges = exchanges
        self._reads = plan_reads(plan)
        self.bandwidth = bandwidth or card_bandwidth(plan.facts.hardware.devices)
        self.about = about_floor(plan.ranks, exchanges)

    def exchange_seconds(self, batch: int, shape: DraftShape | None = None) -> float:
        """Return the seconds of the exchanges of a step with ``batch`` sequences.

        ``shape``: size of the drafts; None: those of an engine without speculation.

        Raises:
            ValueError: an exchange of the step was not measured.
        """
        if self._exchanges is None:
            return 0.0
        model, mesh = self._plan.facts.model, self._plan.mesh
        reads = self._reads if shape is not None else None
        return exchange_seconds(self._exchanges, model, shape or NO_DRAFTS, batch, reads, mesh)

    def bytes_of(self, batch: int, context: int, shape: DraftShape | None = None) -> StepBytes:
        """Return the bytes that one rank reads in a decode step, in the plan's dtypes.

        ``shape``: as in ``exchange_seconds``.
        """
        plan = self._plan
        return draft_step_bytes(
            plan.facts.model,
            shape or NO_DRAFTS,
            batch,
            context,
            self._reads if shape is not None else None,
            element=DTYPE_BYTES[plan.dtype],
            kv_element=DTYPE_BYTES[plan.kv_dtype],
            mesh=plan.mesh,
        )

    def record(
        self, batch: int, context: int, spent: float, drafts: Sequence[DraftCounts] = ()
    ) -> dict[str, float]:
        """Return the floor of a step for a record, and its share of the ``spent`` seconds.

        With drafts it is the mean floor of the run's steps, and ``allowed_speedup`` is the speed
        relative to an engine without speculation that the floors allow with the run's acceptance.

        ``drafts``: counters of the run's steps.
        """
        steps = [one for one in drafts if one.engine_steps > 0]
        shares = _shares(steps) or {None: 1.0}
        moved = sum(
            share * self.bytes_of(batch, context, shape).total for shape, share in shares.items()
        )
        sent = sum(share * self.exchange_seconds(batch, shape) for shape, share in shares.items())
        least = moved / self.bandwidth + sent
        found = {
            "floor_gb": moved / 1e9,
            "floor_exchange_ms": sent * 1e3,
            "floor_ms": least * 1e3,
            "floor_share": least / spent,
        }
        if any(one.steps for one in steps):
            plain = self.bytes_of(batch, context).seconds(self.bandwidth)
            plain += self.exchange_seconds(batch)
            found["allowed_speedup"] = _mean_gain(steps) * plain / least
        return found


def _shares(steps: Sequence[DraftCounts]) -> dict[DraftShape | None, float]:
    """Return the share of the engine's steps that had drafts of each size."""
    total = sum(one.engine_steps for one in steps)
    return {DraftShape(one.steps, one.topk, one.tokens): one.engine_steps / total for one in steps}


def _mean_gain(steps: Sequence[DraftCounts]) -> float:
    """Return the tokens that a row gains in a step on average."""
    gained = sum(one.engine_steps * (Acceptance([one]).length or 1.0) for one in steps)
    return gained / sum(one.engine_steps for one in steps)


def about_floor(ranks: int, exchanges: ExchangeTimes | None) -> str:
    """Return what the floor of a decode step consists of."""
    if ranks == 1:
        return "bytes of a step at the card's bandwidth"
    bytes_of = "bytes of the rank that reads most at one card's bandwidth"
    if exchanges is None:
        return f"{bytes_of}, without exchanges"
    return f"{bytes_of}, and the exchanges of a step as measured: {exchanges.source}"

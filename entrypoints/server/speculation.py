"""The part of ``/server_info`` about drafts and their acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.draft_counts import Acceptance, DraftCounts
from glowplug.core.step.messages import Stats


def speculation_info(
    plan: EnginePlan, stats: Stats, recent: Sequence[DraftCounts]
) -> dict[str, Any] | None:
    """Return the object ``speculation``; None if the engine drafts nothing.

    Args:
        plan: the plan.
        stats: the engine's latest statistics.
        recent: the counters of the last minute.
    """
    if plan.sizes.width == 1:
        return None
    chosen = plan.choice("speculative")
    shape = plan.sizes.draft_shape
    figures = {"since_start": Acceptance(stats.drafts), "last_minute": Acceptance(recent)}

    def each(value: Callable[[Acceptance], Any]) -> dict[str, Any]:
        return {span: value(found) for span, found in figures.items()}

    return {
        "algorithm": chosen.name,
        "draft_shape": {"steps": shape.steps, "topk": shape.topk, "draft_tokens": shape.tokens},
        "verify_steps": each(lambda found: found.verify_steps),
        "drafted_tokens": each(lambda found: found.drafted),
        "accepted_tokens": each(lambda found: found.accepted),
        "accept_length": each(lambda found: found.length),
        "accept_rate": each(lambda found: found.rate),
        "accept_rate_per_position": each(lambda found: found.rates),
        "shapes": [_chosen_shape(one) for one in stats.drafts],
        "acceptance_falls": stats.acceptance_falls,
        "simulated_accept_rates": chosen.options.get("simulate_accept_rates"),
    }


def _chosen_shape(counts: DraftCounts) -> dict[str, Any]:
    """Return how often a shape was chosen, and the accept length of its drafts."""
    return {
        "steps": counts.steps,
        "topk": counts.topk,
        "draft_tokens": counts.tokens,
        "engine_steps": counts.engine_steps,
        "verify_steps": sum(counts.accepted),
        "accept_length": Acceptance([counts]).length,
    }


def internal_states(stats: Stats) -> list[dict[str, Any]]:
    """Return the accept length where SGLang's benchmarks look for it; [] without a verify step."""
    length = Acceptance(stats.drafts).length
    return [] if length is None else [{"avg_spec_accept_length": length}]

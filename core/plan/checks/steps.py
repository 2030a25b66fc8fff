"""Checks of the components of a step together, of output parsers and of the policy. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from glowplug.core.errors import Refusal
from glowplug.core.plan.budget.tier import tier_bytes
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import CARRIED_KINDS, GraphOffers, Mode, Offers
from glowplug.core.plugin.slots import SLOTS

# ---- outputs -------------------------------------------------------------------------------------


@reads("outputs")
def check_output_kinds(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse output parsers with a kind of output that has no field in the server's answers."""
    kept = ", ".join(
        f'{{use = "{chosen.name}"}}'
        for chosen in proposal.outputs
        if chosen.offers.kinds <= CARRIED_KINDS
    )
    for chosen in proposal.outputs:
        lost = chosen.offers.kinds - CARRIED_KINDS
        if lost:
            yield refuse(
                proposal,
                "outputs",
                chosen,
                f"{chosen.name} makes pieces of kind {listed(lost)}, which "
                "answers do not have; their text would become part of the content",
                f"outputs = [{kept}]",
            )


@reads("outputs")
def check_one_call_parser(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a second parser of tool calls, which would get no calls to parse."""
    calls = [chosen for chosen in proposal.outputs if "tool_call" in chosen.offers.kinds]
    for chosen in calls[1:]:
        kept = ", ".join(
            f'{{use = "{other.name}"}}' for other in proposal.outputs if other is not chosen
        )
        yield refuse(
            proposal,
            "outputs",
            chosen,
            f"{calls[0].name} already parses tool calls; a model has one format",
            f"outputs = [{kept}]",
        )


# ---- the step's path -----------------------------------------------------------------------------

PLAIN_STEPS = frozenset({Mode.PREFILL, Mode.DECODE})
VERIFYING_STEPS = frozenset({Mode.PREFILL, Mode.VERIFY})
EVERY_MODE = frozenset(Mode)
DRAFT_MODEL_STEPS = frozenset({Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND})


def needed_modes(proposal: Proposal) -> frozenset[Mode]:
    """Return the modes of all steps that the chosen components have to run."""
    speculative = proposal.speculative
    modes = PLAIN_STEPS
    if speculative is not None and speculative.offers.drafts:
        modes = VERIFYING_STEPS
        if proposal.values.draft_extends:
            modes |= DRAFT_MODEL_STEPS
        elif speculative.offers.whole_model:
            modes |= {Mode.DRAFT_DECODE}
        if any(shape.steps == 0 for shape in proposal.values.draft_shapes):
            modes |= {Mode.DECODE}
    for strategy in proposal.parallel:
        if strategy.offers.idle_steps:
            return modes | {Mode.IDLE}
    return modes


def _runs_in(modes: frozenset[Mode], offers: Offers) -> bool:
    return modes <= offers.runs


def _leaves_alone(modes: frozenset[Mode], offers: GraphOffers) -> bool:
    return not offers.captures & modes


STEP_PATH = tuple(slot.name for slot in SLOTS if slot.step)


@reads(*STEP_PATH)
def check_modes(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse components that cannot run in a needed mode."""
    limited = [
        (slot, chosen) for slot, chosen in proposal.step_path() if chosen.offers.runs != EVERY_MODE
    ]
    if not limited:
        return
    needed = needed_modes(proposal)
    for slot, chosen in limited:
        if not needed <= chosen.offers.runs:
            missing = needed - chosen.offers.runs
            yield refuse(
                proposal,
                slot.name,
                chosen,
                f"{chosen.name} cannot run in {listed(missing)} steps, which this "
                "combination needs",
                instead(proposal, slot.name, partial(_runs_in, missing), "another combination"),
            )


@reads(*STEP_PATH)
def check_capture(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse graph runners that capture steps with a component that cannot be captured."""
    runner = proposal.graphs
    if runner is None or not runner.offers.captures:
        return
    if proposal.values.device not in runner.offers.devices:
        return  # another check refuses the runner
    captured = runner.offers.captures & needed_modes(proposal)
    for slot, chosen in proposal.step_path() if captured else ():
        if slot.name == "graphs":
            continue
        loose = captured - chosen.offers.captures_in
        if loose:
            yield refuse(
                proposal,
                slot.name,
                chosen,
                f"{chosen.name} syncs with the host or allocates in "
                f"{listed(loose)}, so these steps cannot be captured",
                instead(proposal, "graphs", partial(_leaves_alone, loose), 'graphs.use = "auto"'),
                field="graphs.use",
            )


@reads(*STEP_PATH)
def check_overlap(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse overlapped steps that the operator requests if a component waits for the device."""
    if not (proposal.config.scheduler.overlap and proposal.written("scheduler.overlap")):
        return  # by default the plan turns overlap off and records the reason
    for slot, chosen in proposal.step_path():
        if not chosen.offers.overlap:
            yield refuse(
                proposal,
                slot.name,
                chosen,
                f"{chosen.name} waits for the device during a step, so steps cannot overlap",
                "scheduler.overlap = false, or leave it out",
                field="scheduler.overlap",
            )


# ---- small kernels -------------------------------------------------------------------------------

DECODER_OPS = frozenset(
    {"rms_norm", "add_rms_norm", "silu_and_mul", "rope_table", "rope_at", "rope"}
)
GATE_OPS = frozenset({"topk_softmax", "topk_sigmoid"})


@reads("ops")
def check_ops(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a table of small kernels without an entry that the model's layers bind."""
    ops = proposal.ops
    if ops is None:
        return
    needed = DECODER_OPS
    if proposal.facts.model.n_routed_experts:
        needed |= GATE_OPS
    lacking = needed - ops.offers.ops
    if lacking:
        yield refuse(
            proposal,
            "ops",
            ops,
            f"{ops.name} does not offer {listed(lacking)}, which the layers of the model call",
            instead(proposal, "ops", lambda o: needed <= o.ops, "another table"),
        )


# ---- policy --------------------------------------------------------------------------------------


@reads("policy", "cache")
def check_prefix_policy(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a scheduling policy that orders by cached prefixes if there is no prefix cache."""
    policy = proposal.policy
    cache = proposal.cache
    if policy is None or cache is None:
        return
    if policy.offers.uses_prefix and not cache.offers.shares:
        yield refuse(
            proposal,
            "policy",
            policy,
            f"{policy.name} orders requests by their cached prefix, but {cache.name} caches none",
            instead(proposal, "policy", lambda o: not o.uses_prefix, "another policy")
            + ", or "
            + instead(proposal, "cache", lambda o: o.shares, "a prefix cache"),
        )


# ---- tier of the prefix cache --------------------------------------------------------------------


@reads("scheduler", "cache")
def check_tier(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a scheduler that does not restore pages of the prefix cache's tier."""
    scheduler = proposal.scheduler
    cache = proposal.cache
    if scheduler is None or cache is None or not tier_bytes(cache.offers, cache.options):
        return
    if not scheduler.offers.restores:
        assert cache.offers.tier is not None
        yield refuse(
            proposal,
            "scheduler",
            scheduler,
            f"{cache.name} keeps evicted pages in a tier, and {scheduler.name} brings none back",
            instead(proposal, "scheduler", lambda o: o.restores, "another scheduler")
            + f", or cache.{cache.offers.tier.option} = 0",
        )

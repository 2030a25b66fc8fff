"""Generic checks of the mesh and of ranks: strategies, machine, collectives and executor.

They check the list of strategies as a whole. The own check of each strategy tests whether ranks
can split the model's dimensions evenly. Plan zone: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.core.errors import Refusal
from glowplug.core.facts.mesh import OVER_TP
from glowplug.core.plan.checks.rules import instead, reads, refuse
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import Chosen, ChosenOf
from glowplug.core.plugin.offers import ParallelOffers
from glowplug.core.plugin.options import ParallelOptions

#: order of axes in ``[[parallel]]``: later strategies subdivide the ranks of earlier ones
ORDER = ("tp", "ep", "dp")


@reads("parallel")
def check_mesh(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse two parallelism strategies that define the same mesh axis."""
    seen: dict[str, str] = {}
    for chosen in proposal.parallel:
        for axis in sorted(chosen.offers.axes) or ["of one rank"]:
            if axis in seen:
                yield refuse(
                    proposal,
                    "parallel",
                    chosen,
                    f"{chosen.name} and {seen[axis]} both define the mesh axis {axis}",
                    "keep one of them",
                )
            seen[axis] = chosen.name


@reads("parallel")
def check_order(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse strategies in a wrong order, and the one for a single rank beside others."""
    held = proposal.parallel
    for chosen in held:
        if (
            not chosen.offers.axes
            and len(held) > 1
            and any(other.offers != chosen.offers for other in held)
        ):
            yield refuse(
                proposal,
                "parallel",
                chosen,
                f"{chosen.name} means one rank, but other strategies are listed too",
                "leave it out",
            )
    if out_of_order(proposal):
        right = ", ".join(chosen.name for chosen in sorted(held, key=_place))
        first = next(
            held[i + 1] for i in range(len(held) - 1) if _place(held[i]) > _place(held[i + 1])
        )
        yield refuse(
            proposal,
            "parallel",
            first,
            f"the strategies are listed as {', '.join(c.name for c in held)}, but "
            "each subdivides the ranks of those before it",
            f"[[parallel]] in the order {right}",
        )


def out_of_order(proposal: Proposal) -> bool:
    """Return whether the strategies in ``[[parallel]]`` are in a wrong order.

    In a wrong order, a strategy's own check would refuse ranks that a later strategy defines.
    """
    places = [_place(chosen) for chosen in proposal.parallel]
    return places != sorted(places)


def _place(chosen: ChosenOf[ParallelOffers, ParallelOptions]) -> int:
    """Return the position of a strategy's first axis in ``ORDER``; 0 without a known axis."""
    return min((ORDER.index(axis) for axis in chosen.offers.axes if axis in ORDER), default=0)


@reads("parallel")
def check_blocks(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse axes that do not divide the tensor ranks, if the strategy has no check of its own."""
    mesh = proposal.values.mesh
    for chosen in proposal.parallel:
        found = proposal.plugins.find("parallel", chosen.name)
        if found is None or found.component.check is not None:
            continue
        for axis in sorted(chosen.offers.axes & set(OVER_TP)):
            if mesh.get("tp", 1) % mesh[axis]:
                yield refuse(
                    proposal,
                    "parallel",
                    chosen,
                    f"{chosen.name} cuts the {mesh.get('tp', 1)} tensor ranks into "
                    f"{mesh[axis]} blocks, which does not divide",
                    f"size = {_largest(mesh, mesh[axis])}",
                )


def _largest(mesh: dict[str, int], most: int) -> int:
    """Return the largest divisor of the number of tensor ranks that is at most ``most``."""
    tp = mesh.get("tp", 1)
    return max(size for size in range(1, tp + 1) if tp % size == 0 and size <= most or size == 1)


# ---- ranks and the machine -----------------------------------------------------------------------


@reads("parallel", "collectives")
def check_collectives(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse collectives that do not support several ranks."""
    ranks = proposal.values.ranks
    collectives = proposal.collectives
    if collectives is not None and ranks > 1 and not collectives.offers.ranks:
        yield refuse(
            proposal,
            "collectives",
            collectives,
            f"{collectives.name} connects one rank, the plan has {ranks}",
            instead(proposal, "collectives", lambda o: o.ranks, "one rank: leave parallel out"),
        )


@reads("parallel", "executor")
def check_executor(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse executors that do not support the number of ranks or hosts."""
    ranks = proposal.values.ranks
    hosts = proposal.values.hosts
    executor = proposal.executor
    if executor is None:
        return
    if ranks > 1 and not executor.offers.ranks:
        yield refuse(
            proposal,
            "executor",
            executor,
            f"{executor.name} runs one rank, the plan has {ranks}",
            instead(proposal, "executor", lambda o: o.ranks, "one rank: leave parallel out"),
        )
    elif hosts > 1 and not executor.offers.hosts:
        per_host = -(-ranks // hosts)
        yield refuse(
            proposal,
            "executor",
            executor,
            f"{executor.name} uses one host, {ranks} ranks need {hosts}",
            instead(
                proposal,
                "executor",
                lambda o: o.hosts,
                f"at most {per_host} ranks, or a plugin for several hosts",
            ),
        )


@reads("parallel", "quantization")
def check_placed_experts(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse schemes that load consecutive experts only, if the ranks hold others."""
    scheme = proposal.quantization
    if scheme is not None and proposal.expert_copies and not scheme.offers.places_experts:
        yield refuse(
            proposal,
            "quantization",
            scheme,
            f"{scheme.name} loads consecutive experts only (it does not offer places_experts), and "
            "experts are placed on ranks by load or have copies",
            instead(
                proposal,
                "quantization",
                lambda offers: offers.places_experts,
                "leave placement and redundant_experts out",
            ),
        )


@reads("collectives")
def check_expandable_segments(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse expandable segments if the collectives cannot share their memory between ranks."""
    collectives = proposal.collectives
    if (
        collectives is None
        or proposal.values.device != "cuda"
        or proposal.config.memory.growing_segments is not True
    ):
        return
    if not collectives.offers.expandable_segments:
        yield refuse(
            proposal,
            "collectives",
            collectives,
            f"{collectives.name} shares torch's memory between ranks by "
            "handles that expandable segments do not have",
            "memory.growing_segments = false, or leave it out",
            field="memory.growing_segments",
        )


@reads("parallel")
def check_machine(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a plan that needs more hosts, devices or cores than there are.

    A plan is also refused if its ranks cannot be divided equally among the hosts.
    """
    if not proposal.parallel:
        return
    strategy = proposal.parallel[0]
    refused = list(_check_hosts(proposal, strategy))
    yield from refused or _check_devices(proposal, strategy)


def _check_hosts(proposal: Proposal, strategy: Chosen) -> Iterator[Refusal]:
    """Refuse more hosts than there are, and ranks that cannot be divided equally among the hosts.

    Args:
        strategy: the strategy that the refusals name.
    """
    ranks = proposal.values.ranks
    hosts = proposal.values.hosts
    machine = proposal.facts.hardware
    if hosts > machine.hosts:
        yield refuse(
            proposal,
            "parallel",
            strategy,
            f"executor.hosts is {hosts}, {machine.name} has {machine.hosts}",
            f"executor.hosts = {machine.hosts}",
            field="executor.hosts",
        )
    elif ranks % hosts:
        fits = [count for count in range(1, machine.hosts + 1) if ranks % count == 0]
        yield refuse(
            proposal,
            "parallel",
            strategy,
            f"{ranks} ranks cannot be split evenly over {hosts} hosts",
            f"executor.hosts = {max(fits)} (--nnodes), or ranks in a multiple of {hosts}",
            field="executor.hosts",
        )


def _check_devices(proposal: Proposal, strategy: Chosen) -> Iterator[Refusal]:
    """Refuse more ranks than there are devices or cores.

    Args:
        strategy: the strategy that the refusals name.
    """
    ranks = proposal.values.ranks
    hosts = proposal.values.hosts
    machine = proposal.facts.hardware
    cuda = proposal.values.device == "cuda"
    each = len(machine.devices) if cuda else machine.cpu_cores
    if cuda and ranks > hosts * each > 0:
        yield refuse(
            proposal,
            "parallel",
            strategy,
            f"{ranks} ranks need {ranks} devices, {machine.name} has {_counted(hosts, each)}",
            f"parallel.0.size = {hosts * each}",
            field="parallel.0.size",
        )
    elif not cuda and ranks > hosts * each and not proposal.config.executor.oversubscribe:
        yield refuse(
            proposal,
            "parallel",
            strategy,
            f"{ranks} ranks are more than the {_counted(hosts, each)} cores of {machine.name}",
            f"parallel.0.size = {hosts * each}, or executor.oversubscribe = true (ranks "
            "then share cores)",
            field="parallel.0.size",
        )


def _counted(hosts: int, each: int) -> str:
    return str(each) if hosts == 1 else f"{hosts} x {each}"

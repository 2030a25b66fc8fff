"""Rows of a plan's table for several ranks: hosts, groups, experts, splits, padding. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from glowplug.core.facts.mesh import axis_size, coordinates
from glowplug.core.facts.weight_classes import KV_HEADS, TIED, VOCAB
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import EnginePlan

Row = tuple[str, str, str, str, str]  #: what, choice, by, why, bytes: a row of the plan's table
SHOWN_BLOCKS = 4  #: most blocks that are listed; of more, middle ones are left out


def layout_rows(plan: EnginePlan) -> list[Row]:
    """Return the table's rows on how ranks divide the model; [] for one rank."""
    if plan.ranks == 1:
        return []
    found = [
        _row(
            "layout: mesh",
            ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items()),
            _axes(plan),
        ),
        _row(
            "layout: hosts", str(plan.hosts), blocks(plan.ranks, plan.ranks // plan.hosts, "rank")
        ),
    ]
    found += [*_groups(plan), *_experts(plan), *_splits(plan), *_padding(plan)]
    return found


def _row(what: str, choice: str, why: str) -> Row:
    return (what, choice, "mesh", why, "")


def blocks(count: int, each: int, what: str) -> str:
    """Return the numbers below ``count`` in blocks of ``each``, as ``rank 0-7 | 8-15``.

    Of many blocks, middle ones are left out.

    Args:
        what: name of one number, such as "rank".
    """
    spans = [span(start, min(start + each, count)) for start in range(0, count, each)]
    if len(spans) > SHOWN_BLOCKS:
        spans = [*spans[: SHOWN_BLOCKS - 1], "...", spans[-1]]
    return f"{what} {' | '.join(spans)}"


def span(start: int, stop: int) -> str:
    """Convert the range from ``start`` to before ``stop`` to text, such as ``0-7`` or ``3``."""
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _axes(plan: EnginePlan) -> str:
    """Return text on how many ranks share attention, and how many share each expert.

    The text also states if the ranks that share are on several hosts.
    """
    heads = axis_size("attn_tp", plan.mesh)
    width = axis_size("moe_tp", plan.mesh)
    parts = [f"attention over {heads} rank{'s' * (heads > 1)}"]
    if plan.facts.model.n_routed_experts:
        parts.append(f"the width of an expert over {width}")
    per_host = plan.ranks // plan.hosts
    wide = [
        f"{what} crosses hosts"
        for what, size in (("attention", heads), ("an expert", width))
        if size > per_host or per_host % size
    ]
    return "; ".join([", ".join(parts), *wide])


def _groups(plan: EnginePlan) -> Iterator[Row]:
    groups = plan.mesh.get("dp", 1)
    if groups > 1:
        yield _row(
            "layout: dp groups",
            str(groups),
            f"{blocks(plan.ranks, plan.ranks // groups, 'rank')}; each has its own "
            f"requests, {plan.sizes.max_running} rows and KV cache",
        )


def _experts(plan: EnginePlan) -> Iterator[Row]:
    experts = plan.facts.model.n_routed_experts
    parts = plan.mesh.get("ep", 1)
    if experts and "ep" in plan.mesh:
        redundant = sum(
            choice.options.get("redundant_experts", 0) for choice in plan.choices_in("parallel")
        )
        placed = any(choice.options.get("placement") for choice in plan.choices_in("parallel"))
        each = (experts + redundant) // parts
        if parts == 1 or not (redundant or placed):
            held = blocks(experts, each, "expert")
        else:
            copies = f" and {redundant} copies" if redundant else ""
            how = "the recorded load" if placed else "number"
            held = f"{experts} experts{copies}, placed by {how}"
        yield _row(
            "layout: experts",
            f"{each} per block",
            f"{blocks(plan.ranks, plan.ranks // parts, 'rank')} hold {held}",
        )


def _splits(plan: EnginePlan) -> Iterator[Row]:
    """Yield a table row for each dimension that ranks split, with its number of units per rank."""
    seen: set[str] = set()
    for split in plan.facts.model.splits:
        parts = split.parts(plan.mesh)
        if split.dimension in seen or parts == 1 or split.role in (VOCAB, TIED):
            continue
        seen.add(split.dimension)
        copies = parts // split.full if split.role == KV_HEADS and split.full < parts else 1
        why = f"{split.dimension} {split.full} over {parts} ranks" + (
            f", each on {copies}" if copies > 1 else ""
        )
        yield _row(
            f"layout: {split.layer.rpartition('.')[2]}",
            f"{max(1, split.full // parts)} per rank",
            why,
        )


def _padding(plan: EnginePlan) -> Iterator[Row]:
    vocab = plan.facts.model.vocab_size
    parts = axis_size("attn_tp", plan.mesh)
    if parts > 1:
        each = -(-vocab // parts)
        padded = (
            f"; scored as {each * parts} and cut back"
            if each * parts > vocab
            else ", nothing to pad"
        )
        yield _row(
            "padding: vocabulary", f"{each} per rank", f"{vocab} tokens over {parts} ranks{padded}"
        )
    groups = plan.mesh.get("dp", 1)
    tokens = plan.sizes.max_step_tokens
    if groups > 1:
        yield _row(
            "padding: steps",
            f"up to {groups * tokens}",
            f"each group's tokens, also an idle group's, are padded to those of the largest (at "
            f"most {tokens}); feed-forward layers compute those of all {groups}",
        )
    if "ep" in plan.mesh:
        each = -(-tokens // parts)
        yield _row(
            "padding: exchange",
            _exchange(plan),
            f"a rank sends an equal slice of its group's tokens: at most "
            f"{each} of {tokens}" + (f", padded to a multiple of {parts}" if parts > 1 else ""),
        )


def _exchange(plan: EnginePlan) -> str:
    named = [
        str(choice.options["exchange"])
        for choice in plan.choices_in("parallel")
        if "exchange" in choice.options
    ]
    return named[0] if named else "tokens"


# ---- bytes of each rank --------------------------------------------------------------------------


def total_rows(plan: EnginePlan) -> list[tuple[str, str, int]]:
    """Return the rows of total memory as (name, why, bytes).

    Neighbouring ranks with equal totals share a row.
    """
    lines = [line for line in plan.budget if not line.place]
    totals = [sum(line.on(rank) for line in lines) for rank in range(plan.ranks)]
    limit = _device_memory(plan)
    if len(set(totals)) == 1:
        where = f"on each of {plan.ranks} ranks" if plan.ranks > 1 else "on each rank"
        return [("memory: total", where + limit, totals[0])]
    return [
        (f"memory: rank {span(first, stop)}", _place(plan, first, stop) + limit, totals[first])
        for first, stop in runs(totals)
    ]


def runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide ``values`` into runs of equal neighbours; yield the indices (first, stop) of each."""
    first = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[first]:
            yield first, at
            first = at


def _place(plan: EnginePlan, first: int, stop: int) -> str:
    """Return hosts and dp group of the ranks from ``first`` to before ``stop``, as text."""
    each = plan.ranks // plan.hosts
    hosts = sorted({rank // each for rank in range(first, stop)})
    at = coordinates(first, plan.mesh)
    group = f", dp group {at['dp']}" if stop - first == 1 and plan.mesh.get("dp", 1) > 1 else ""
    return f"total on host {span(hosts[0], hosts[-1] + 1)}{group}"


def _device_memory(plan: EnginePlan) -> str:
    """Return the memory of the smallest device as text; "" on a CPU."""
    cards = plan.facts.hardware.devices
    return (
        f", of {human(min(card.memory for card in cards))}"
        if plan.device == "cuda" and cards
        else ""
    )

"""The steps that the graph runner captures: batch sizes and token counts. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from glowplug.core.facts.mesh import axis_size, group_share
from glowplug.core.plan.plan import Decision
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.modes import Mode
from glowplug.core.plugin.slots import CAPTURED_SLOTS


@dataclass(frozen=True)
class Captured:
    """The sizes of the steps that the graph runner captures; each tuple is ascending.

    Attributes:
        batch_sizes: batch sizes of decode steps.
        short_rows: those of ``batch_sizes`` that are captured a second time, for short rows.
        pass_tokens: token counts of forward passes with prompts.
        extend_tokens: token counts of the draft's pass over a step's tokens.
    """

    batch_sizes: tuple[int, ...]
    short_rows: tuple[int, ...]
    pass_tokens: tuple[int, ...]
    extend_tokens: tuple[int, ...]


def captured_steps(proposal: Proposal, rows: int, step_tokens: int) -> Captured:
    """Return the sizes of the steps that the graph runner captures.

    The longest sequence is not decided yet. It is taken to be the given ``context_length``, else
    the model's longest sequence.

    Args:
        rows: most running sequences.
        step_tokens: most tokens of a step.
    """
    runner = proposal.graphs
    context = proposal.config.context_length or proposal.facts.model.max_positions
    passes = _pass_tokens(proposal, step_tokens)
    return Captured(
        batch_sizes=runner.options.sizes(rows, _groups(proposal)) if runner is not None else (),
        short_rows=short_steps(proposal, rows, context)[1],
        pass_tokens=passes,
        extend_tokens=passes if _extends_captured(proposal) and _captures_extend(proposal) else (),
    )


def _groups(proposal: Proposal) -> int:
    """Return the number of dp groups."""
    return proposal.values.mesh.get("dp", 1)


def _pass_tokens(proposal: Proposal, step_tokens: int) -> tuple[int, ...]:
    """Return the token counts for which passes with prompts are captured; () for none."""
    runner = proposal.graphs
    if runner is None:
        return ()
    inside = [chosen for slot in CAPTURED_SLOTS for chosen in proposal.chosen[slot]]
    capturable = all(Mode.PREFILL in chosen.offers.captures_in for chosen in inside)
    return runner.options.token_counts(step_tokens, proposal.values.ranks) if capturable else ()


def _extends_captured(proposal: Proposal) -> bool:
    """Return whether the operator lets draft extend be captured (``graphs.draft_extend``)."""
    return proposal.graphs is not None and proposal.graphs.options.draft_extend


def _captures_extend(proposal: Proposal) -> bool:
    """Return whether the draft's pass over a step's tokens is captured with the target's passes.

    This requires that all components of the pass can be captured. Attention only stores keys and
    values in this pass, as in the captured decode steps. It also requires that ranks do not
    exchange tokens, because a rank runs the pass for its own tokens only.
    """
    inside = [
        chosen for slot in (*CAPTURED_SLOTS, "speculative") for chosen in proposal.chosen[slot]
    ]
    if proposal.draft is not None:
        inside += proposal.draft.chosen["attention"]
    return (
        proposal.values.draft_extends
        and not proposal.exchanges
        and all(Mode.DRAFT_EXTEND in chosen.offers.captures_in for chosen in inside)
    )


def short_steps(proposal: Proposal, rows: int, context: int) -> tuple[int, tuple[int, ...]]:
    """Return ``Sizes.short_keys`` and ``Sizes.short_rows``: the sizes of graphs for short rows.

    These graphs are captured besides the usual ones and decode short rows by a faster kernel.
    They are captured only if rows can also be longer, if there is no draft, and if ranks do not
    exchange tokens (other ranks may have longer rows). Otherwise the result is (0, ()).

    Args:
        rows: most running sequences.
        context: longest sequence in tokens.
    """
    runner = proposal.graphs
    attention = proposal.attention
    values = proposal.values
    if runner is None or attention is None or attention.offers.short_rows is None:
        return 0, ()
    keys = attention.offers.short_keys
    if values.width > 1 or proposal.exchanges or context + values.width + values.lookahead <= keys:
        return 0, ()
    heads = -(-proposal.facts.model.num_heads // axis_size("attn_tp", values.mesh))
    short = attention.offers.short_rows(heads)
    captured = runner.options.sizes(rows, _groups(proposal))
    sizes = tuple(size for size in captured if size in short)
    return (keys, sizes) if sizes else (0, ())


# ---- decisions -----------------------------------------------------------------------------------


def captured_decisions(
    proposal: Proposal, captured: Captured, rows: int, step_tokens: int
) -> Iterator[Decision]:
    """Yield the decisions on captured batch sizes and token counts; none without GPU or graphs.

    Args:
        rows: most running sequences.
        step_tokens: most tokens of a step.
    """
    if proposal.values.device != "cuda" or not captured.batch_sizes:
        return
    yield _batch_size_decision(proposal, captured.batch_sizes, rows)
    if captured.pass_tokens:
        yield _token_count_decision(proposal, captured.pass_tokens, step_tokens)
    if proposal.values.draft_extends:
        yield _draft_extend_decision(proposal, captured)


def _batch_size_decision(proposal: Proposal, sizes: tuple[int, ...], rows: int) -> Decision:
    """Return the decision on captured batch sizes: the given ones that can run, or the default."""
    field = "graphs.batch_sizes"
    given = getattr(proposal.config.graphs, "batch_sizes", None)
    groups = _groups(proposal)
    of_group = " of a group" if groups > 1 else ""
    if given is None:
        why = f"default, up to {sizes[-1]} of {rows} sequences{of_group}"
        return Decision(field, list(sizes), "size", why)
    shares = {size: group_share(size, proposal.values.mesh) for size in given}
    left_out = sorted(size for size, share in shares.items() if share not in sizes)
    limit = f"at most {rows} sequences{of_group} run"
    if left_out and shares[left_out[-1]] <= rows:
        limit = "graphs.max_batch is lower"
    made = _given_counts(proposal, field, sizes, left_out, limit)
    if groups == 1:
        return made
    return replace(made, why=f"{made.why}; of all {groups} groups: {_listed(set(given), left_out)}")


def _listed(given: set[int], left_out: list[int]) -> str:
    """Return the batch sizes ``given`` without those ``left_out``, ascending, as text."""
    return ", ".join(str(size) for size in sorted(given.difference(left_out)))


def _token_count_decision(
    proposal: Proposal, counts: tuple[int, ...], step_tokens: int
) -> Decision:
    """Return the decision on captured token counts: the given ones that occur, or the default."""
    field = "graphs.prefill_tokens"
    given = getattr(proposal.config.graphs, "prefill_tokens", None)
    if given is None:
        why = f"default, up to {counts[-1]} of {step_tokens} tokens per step"
        return Decision(field, list(counts), "size", why)
    left_out = sorted(set(given) - set(counts))
    limit = f"a step has at most {step_tokens} tokens"
    if left_out and left_out[-1] <= step_tokens:
        limit = "graphs.max_prefill_tokens is lower"
    return _given_counts(proposal, field, counts, left_out, limit)


def _draft_extend_decision(proposal: Proposal, captured: Captured) -> Decision:
    """Return the decision on the graphs of the draft's pass over a step's tokens."""
    field = "graphs.draft_extend"
    by, why = proposal.source(field) or ("default", "")
    if not _extends_captured(proposal):
        how = "the draft's pass over a step's tokens runs eagerly"
    elif captured.extend_tokens:
        how = f"in decode steps, and for {len(captured.extend_tokens)} token counts with prompts"
    elif not captured.pass_tokens:
        how = "in decode steps; steps with prompts are not captured"
    elif proposal.exchanges:
        how = "in decode steps only: ranks exchange tokens in steps with prompts"
    else:
        how = "in decode steps only: a component cannot be captured in this pass over prompts"
    why = f"{why}; {how}" if why else how
    return Decision(field, _extends_captured(proposal), by, why)


def _given_counts(
    proposal: Proposal, field: str, counts: tuple[int, ...], left_out: list[int], limit: str
) -> Decision:
    """Return the decision that graphs are captured for ``counts``, given by the option ``field``.

    Args:
        left_out: further counts of the option, which are not captured.
        limit: the reason why those in ``left_out`` are not captured.
    """
    by, why = proposal.source(field) or ("operator", "")
    if left_out:
        why += f"; without {', '.join(map(str, left_out))}: {limit}"
    return Decision(field, list(counts), by, why)

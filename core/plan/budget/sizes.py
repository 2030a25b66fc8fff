"""Pass five: sizes and the byte budget of each rank, with the rest for the KV cache. No torch.

These estimates decide whether a plan can run and how many pages it gets. On a device, each rank
measures its memory before the port opens, and the KV cache gets the memory that is really left
(``core/startup/page_fit.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import DTYPE_BYTES, USUAL_ENTRIES, local_heads
from glowplug.core.facts.mesh import axis_size
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.weight_classes import Tally
from glowplug.core.plan.budget.graphs import extend_tokens, pass_tokens, short_steps
from glowplug.core.plan.budget.step import RESERVED, workspace_lines
from glowplug.core.plan.budget.weights import Storage, weights_by_rank
from glowplug.core.plan.plan import BudgetLine, Sizes
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.offers import (
    AttentionOffers,
    CollectiveOffers,
    QuantizationOffers,
    SpeculativeOffers,
)
from glowplug.core.plugin.options import DEVICE_DEFAULTS, QuantizationOptions

GIB = 1 << 30
CPU_SHARE = 0.7  #: share of a CPU's memory that is used, so that the machine stays usable
CPU_KV_CAP = 4 * GIB  #: most bytes of the KV cache on a CPU by default
KV_SPARE = 4  #: largest default pool, as a multiple of the pages that running sequences can use
CUDA_RESERVE = 0.02  #: share of a device's memory that is left free


@dataclass(frozen=True)
class MemoryShare:
    """Memory of one rank.

    Attributes:
        total: bytes that the rank may use.
        memory: bytes of memory of which ``total`` is a share.
        shown: ``total`` as text.
        left: bytes left after the fixed lines of the budget.
    """

    total: int
    memory: int
    shown: str
    left: int


def size(proposal: Proposal) -> tuple[Sizes, tuple[BudgetLine, ...]] | None:
    """Return the sizes and the byte budget; None after a refusal.

    Model, attention, quantization and speculative algorithm must have been chosen.
    """
    device = proposal.values.device
    rows = _rows(proposal, device)
    chunk = _chunk(proposal, device)
    page = _page(proposal, device)
    step_tokens = chunk + rows * proposal.values.width
    proposal.values.page_size = page
    proposal.values.growing_segments = _grows(proposal, device)
    fixed = [*_weights(proposal), *workspace_lines(proposal, rows, step_tokens, device)]
    room = _room(proposal, device, fixed)
    if room.left <= 0:
        proposal.refusals.append(_too_big(proposal, fixed, room))
        return None
    token = kv_token_bytes(proposal)
    beside = page_state_bytes(proposal)
    pages = _pages(proposal, room, token * page + beside, rows, page)
    context = _context(proposal, pages, page, token, room) if pages else None
    if pages is None or context is None:
        return None
    cache = [
        BudgetLine(
            "kv cache",
            pages * page * token,
            f"{pages} pages of {page} tokens, {token} bytes per token",
        )
    ]
    if beside:
        cache.append(
            BudgetLine(
                "page states", pages * beside, "the target's hidden state of each page's last token"
            )
        )
    keys, short = short_steps(proposal, rows, context)
    sizes = Sizes(
        context_length=context,
        max_running=rows,
        max_queued=proposal.config.scheduler.max_queued_requests,
        max_step_tokens=step_tokens,
        chunk_size=chunk,
        page_size=page,
        num_pages=pages,
        kv_bytes=cache[0].bytes,
        width=proposal.values.width,
        draft_layers=proposal.values.draft_layers,
        lookahead=proposal.values.lookahead,
        pass_tokens=pass_tokens(proposal, step_tokens),
        extend_tokens=extend_tokens(proposal, step_tokens),
        peak_tokens=_peak_tokens(proposal),
        **_page_bounds(proposal, pages, rows, page, context),
        short_keys=keys,
        short_rows=short,
    )
    proposal.values.positions, proposal.values.short_rows = sizes.positions, short
    _remark_draft(proposal)
    return sizes, (*fixed, *cache)


def _peak_tokens(proposal: Proposal) -> tuple[int, ...]:
    """Return ``Sizes.peak_tokens``, the token counts of a step of one dp group.

    Experts compute the tokens of all groups, so their token counts are divided by the groups.
    """
    scheme = proposal.first("quantization")
    if (
        proposal.values.device != "cuda"
        or scheme is None
        or not isinstance(scheme.offers, QuantizationOffers)
    ):
        return ()
    found = scheme.offers.peak_tokens(scheme.options) if scheme.offers.peak_tokens else ()
    return tuple(tokens // proposal.values.mesh.get("dp", 1) for tokens in found)


def _page_bounds(
    proposal: Proposal, pages: int, rows: int, page: int, context: int
) -> dict[str, int]:
    """Return the fewest and most pages that a rank may have after measuring its memory."""
    memory = proposal.config.memory
    if (
        proposal.values.device == "cpu"
        or memory.kv_tokens is not None
        or memory.kv_bytes is not None
    ):
        return {"least_pages": pages, "most_pages": pages}
    one = -(-(context + _ahead(proposal)) // page) + 1
    return {
        "least_pages": min(pages, one),
        "most_pages": max(pages, KV_SPARE * rows * (one - 1) + 1),
    }


# ---- counts --------------------------------------------------------------------------------------


def _rows(proposal: Proposal, device: str) -> int:
    return _given_or(
        proposal,
        "scheduler.max_running_requests",
        proposal.config.scheduler.max_running_requests,
        DEVICE_DEFAULTS[device].running,
        f"default on {device}",
    )


def _chunk(proposal: Proposal, device: str) -> int:
    return _given_or(
        proposal,
        "scheduler.chunk_size",
        proposal.config.scheduler.chunk_size,
        DEVICE_DEFAULTS[device].chunk,
        f"default on {device}",
    )


def _page(proposal: Proposal, device: str) -> int:
    attention = proposal.first("attention")
    assert attention is not None and isinstance(attention.offers, AttentionOffers)
    wanted = DEVICE_DEFAULTS[device].page
    why = f"default on {device}"
    if attention.offers.page_sizes and wanted not in attention.offers.page_sizes:
        wanted = min(
            attention.offers.page_sizes, key=lambda size: abs(size - DEVICE_DEFAULTS[device].page)
        )
        why = f"a size that {attention.name} reads"
    return _given_or(
        proposal, "attention.page_size", proposal.config.attention.page_size, wanted, why
    )


def _given_or(proposal: Proposal, path: str, given: int | None, otherwise: int, why: str) -> int:
    """Record and return a given value, or ``otherwise`` with the reason ``why``."""
    if given is None:
        proposal.decide(path, otherwise, "size", why)
        return otherwise
    proposal.decide(path, given, *(proposal.source(path) or ("default", "")))
    return given


def _grows(proposal: Proposal, device: str) -> bool:
    """Return whether torch's allocator uses expandable segments; False on a CPU."""
    path = "memory.growing_segments"
    asked = proposal.config.memory.growing_segments
    source = proposal.source(path)
    if device != "cuda":
        return False
    if asked != "auto":
        proposal.decide(path, asked, *(source or ("default", "")))
        return asked
    against = _against_growing(proposal)
    proposal.decide(
        path,
        not against,
        "size",
        f"auto: {against or 'steps and graphs take less memory, the KV cache gets more'}",
    )
    return not against


def _against_growing(proposal: Proposal) -> str:
    """Return the reason why "auto" does not use expandable segments; "" if it does."""
    if proposal.values.ranks > 1:
        return f"not tested with several ranks, and the plan has {proposal.values.ranks}"
    collectives = proposal.first("collectives")
    if collectives is None:
        return ""
    assert isinstance(collectives.offers, CollectiveOffers)
    return (
        ""
        if collectives.offers.growing_segments
        else (f"{collectives.name} shares memory by handles that expandable segments do not have")
    )


# ---- bytes ---------------------------------------------------------------------------------------


def _weights(proposal: Proposal) -> list[BudgetLine]:
    """Return the lines of the weights, and of the draft's weights."""
    scheme = proposal.first("quantization")
    assert scheme is not None and isinstance(scheme.offers, QuantizationOffers)
    assert isinstance(scheme.options, QuantizationOptions)
    storage = Storage(
        compute=DTYPE_BYTES[proposal.values.dtype],
        keeps=not scheme.options.dequantizes(proposal.values.device, scheme.offers),
        copies_latent=proposal.values.device == "cpu",
        online=scheme.offers.online_bytes
        if scheme.offers.online and proposal.facts.model.quant_method == "none"
        else 0,
    )
    lines = [
        _weight_line(proposal, "weights", proposal.facts.model, proposal.elements, storage, False)
    ]
    if proposal.values.draft_layers:
        model = proposal.facts.draft or proposal.facts.model
        elements = proposal.draft_elements if proposal.facts.draft else proposal.elements
        lines.append(_weight_line(proposal, "draft weights", model, elements, storage, True))
    return lines


def _weight_line(
    proposal: Proposal,
    name: str,
    model: ModelFacts,
    elements: Tally,
    storage: Storage,
    drafts: bool,
) -> BudgetLine:
    """Return the line of one model's weights.

    Args:
        elements: element counts by kind.
        drafts: the line is that of the first next-token layer.
    """
    ranks = proposal.values.ranks
    how = "tensor headers" if model.tensors else "arithmetic from config.json"
    held = weights_by_rank(elements, model, proposal.values.mesh, ranks, storage, drafts)
    if ranks > 1:
        how += f", over {ranks} ranks"
    return BudgetLine(name, max(held), how, held if len(set(held)) > 1 else ())


def _room(proposal: Proposal, device: str, fixed: list[BudgetLine]) -> MemoryShare:
    """Return the memory of a rank after the fixed lines."""
    machine = proposal.facts.hardware
    fraction = proposal.config.memory.fraction
    used = sum(line.bytes for line in fixed)
    if device == "cuda":
        memory = min((card.memory for card in machine.devices), default=0)
        share = fraction or 1 - CUDA_RESERVE
        what = "the device's"
    else:
        per_host = -(-proposal.values.ranks // proposal.values.hosts)
        memory = machine.cpu_memory // per_host
        share = fraction or CPU_SHARE
        what = "the machine's"
    if fraction is not None:
        proposal.decide(
            "memory.fraction", fraction, *(proposal.source("memory.fraction") or ("default", ""))
        )
    total = int(memory * share)
    return MemoryShare(
        total, memory, f"{human(total)} ({share:.0%} of {what} {human(memory)})", total - used
    )


def _too_big(proposal: Proposal, fixed: list[BudgetLine], room: MemoryShare) -> Refusal:
    """Return the refusal of a plan whose fixed lines leave no memory for the KV cache."""
    needed = room.total - room.left
    needs = ", ".join(f"{line.name} {human(line.bytes)}" for line in fixed)
    field, fix = _smaller(proposal, {line.name: line.bytes for line in fixed}, room, needed)
    return Refusal(
        "size",
        field,
        f"each rank needs {human(needed)} ({needs}) before any KV cache, and has {room.shown}",
        fix,
    )


def _smaller(
    proposal: Proposal, lines: dict[str, int], room: MemoryShare, needed: int
) -> tuple[str, str]:
    """Return the field to change so that the fixed lines fit, and the fix."""
    share = needed / room.memory
    default = CPU_SHARE if proposal.values.device == "cpu" else 1 - CUDA_RESERVE
    if proposal.config.memory.fraction is not None and share < 1 - CUDA_RESERVE:
        left_out = f", or leave it out ({default:.0%})" if share < default else ""
        return (
            "memory.fraction",
            f"memory.fraction = {math.ceil(100 * share + 1) / 100:g} or more{left_out}",
        )
    reserved = lines.get(RESERVED, 0)
    if reserved > lines.get("graphs", 0) and needed - reserved < room.total:
        return "attention.use", (
            'attention.use = "auto"; or smaller page tables: a shorter context_length, fewer '
            "scheduler.max_running_requests"
        )
    if needed - lines.get("graphs", 0) < room.total:
        return "graphs.batch_sizes", (
            'graphs.use = "eager"; or fewer graphs: a shorter list, a smaller graphs.max_batch, '
            "graphs.prefill = false"
        )
    steps = {"activations": "scheduler.chunk_size", "logits": "scheduler.max_running_requests"}
    if (
        needed - sum(lines.get(name, 0) for name in (*steps, "sampling state", "graphs", RESERVED))
        < room.total
    ):
        first, second = sorted(steps, key=lambda name: -lines.get(name, 0))
        return steps[first], f"a smaller {steps[first]}, and a smaller {steps[second]}"
    fix = "more memory per rank: a larger machine, more ranks, or a quantized checkpoint"
    return "model", fix + (', or dtype = "bfloat16"' if proposal.values.dtype == "float32" else "")


def kv_token_bytes(proposal: Proposal) -> int:
    """Return the bytes of KV cache of one token on a rank, over all layers."""
    attention = proposal.first("attention")
    assert attention is not None and isinstance(attention.offers, AttentionOffers)
    model = proposal.facts.model
    entries = USUAL_ENTRIES[model.kind]
    if model.kind in attention.offers.kinds:  # a backend of another kind has been refused
        entries = attention.offers.kv_entries or entries
    heads = local_heads(model.num_kv_heads, axis_size("attn_tp", proposal.values.mesh))
    cached = entries(model, proposal.values.kv_dtype, heads)
    layers: int = model.num_layers + proposal.values.draft_layers
    return layers * sum(entry.token_bytes for entry in cached)


def page_state_bytes(proposal: Proposal) -> int:
    """Return the bytes kept for a draft beside each page: one hidden state of the target, or 0."""
    speculative = proposal.first("speculative")
    assert speculative is not None and isinstance(speculative.offers, SpeculativeOffers)
    if not (speculative.offers.nextn_layer and speculative.offers.first_key):
        return 0
    return proposal.facts.model.hidden_size * DTYPE_BYTES[proposal.values.dtype]


def _remark_draft(proposal: Proposal) -> None:
    """Add a remark if only the first of several next-token layers is used."""
    layers = (proposal.facts.draft or proposal.facts.model).nextn_layers
    if proposal.values.draft_layers and layers > 1:
        proposal.decide(
            "speculative.layers",
            1,
            "size",
            f"the first of {layers} next-token layers drafts every token",
            notable=True,
        )


def _pages(
    proposal: Proposal, room: MemoryShare, page_bytes: int, rows: int, page: int
) -> int | None:
    """Return the pages of the KV pool with the scratch page; None after a refusal."""
    memory = proposal.config.memory
    most = room.left // page_bytes
    if memory.kv_tokens is not None:
        asked = -(-memory.kv_tokens // page) + 1
        field = "memory.kv_tokens"
    elif memory.kv_bytes is not None:
        asked = memory.kv_bytes // page_bytes
        field = "memory.kv_bytes"
    else:
        return _auto_pages(proposal, most, page_bytes, rows, page)
    if asked > most or asked < 2:
        fit = most * page_bytes if field == "memory.kv_bytes" else (most - 1) * page
        low = 2 * page_bytes if field == "memory.kv_bytes" else 1
        proposal.refusals.append(
            Refusal(
                "size",
                field,
                f"{getattr(memory, field[7:])} need {human(asked * page_bytes)} of KV cache; "
                f"{human(max(0, room.left))} of {room.shown} are left "
                f"(at least two pages of {human(page_bytes)} are needed)",
                f"{field} = {max(low, fit)}",
            )
        )
        return None
    proposal.decide("kv.tokens", (asked - 1) * page, *(proposal.source(field) or ("default", "")))
    return asked


def _auto_pages(proposal: Proposal, most: int, page_bytes: int, rows: int, page: int) -> int | None:
    """Return the default number of pages; None after a refusal.

    They take the memory that is left, but no more than running sequences can use; on a device,
    ``KV_SPARE`` times as much, for the prefix cache.
    """
    context = proposal.config.context_length or proposal.facts.model.max_positions
    each = -(-(context + _ahead(proposal)) // page)
    limits = {most: "the rest of the memory"}
    if proposal.values.device == "cpu":
        limits |= {
            rows * each + 1: f"{rows} sequences of {context} tokens",
            max(2, CPU_KV_CAP // page_bytes): f"at most {human(CPU_KV_CAP)} on a CPU",
        }
    else:
        limits |= {
            KV_SPARE * rows * each + 1: f"{KV_SPARE} times {rows} sequences of {context} tokens"
        }
    pages = min(limits)
    if pages < 2:
        proposal.refusals.append(
            Refusal(
                "size",
                "model",
                f"one page of KV cache needs {human(page_bytes)}, "
                f"{human(most * page_bytes)} are left",
                "more memory, or a smaller model",
            )
        )
        return None
    proposal.decide("kv.tokens", (pages - 1) * page, "size", limits[pages])
    return pages


def _ahead(proposal: Proposal) -> int:
    """Return the positions after the longest sequence that have pages (``Sizes.positions``)."""
    ahead: int = proposal.values.width + proposal.values.lookahead
    return ahead


def _context(
    proposal: Proposal, pages: int, page: int, token: int, room: MemoryShare
) -> int | None:
    """Return the longest sequence; None after a refusal.

    By default it is the model's, or the longest that the KV pool can hold.
    """
    asked = proposal.config.context_length
    positions = proposal.facts.model.max_positions
    held: int = (pages - 1) * page - _ahead(proposal)
    if asked is None:
        context = max(1, min(positions, held))
        why = (
            "the model's"
            if context == positions
            else f"as much as the KV cache holds (the model's is {positions})"
        )
        proposal.decide("context_length", context, "size", why, notable=context < positions)
        return context
    proposal.decide(
        "context_length", asked, *(proposal.source("context_length") or ("default", ""))
    )
    if asked > positions:
        proposal.refusals.append(
            Refusal(
                "size",
                "context_length",
                f"{asked} is beyond the model's {positions} positions",
                f"context_length = {positions}",
            )
        )
        return None
    if asked > held:
        proposal.refusals.append(
            Refusal(
                "size",
                "context_length",
                f"a sequence of {asked} tokens needs {human((asked + page) * token)} of KV "
                f"cache, the pool has {human(pages * page * token)} of {room.shown}",
                f"context_length = {max(1, held)}",
            )
        )
        return None
    return asked


def human(count: int) -> str:
    """Return a number of bytes as text, such as "3.2 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

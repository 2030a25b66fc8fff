"""Pass five: sizes and the byte budget of each rank, with the rest for the KV cache. No torch.

These estimates decide whether a plan can run and how many pages it gets. On a device, each rank
measures its memory before the port opens, and the KV cache gets the memory that is really left
(``core/startup/page_fit.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import DTYPE_BYTES
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


def size(draft: Proposal) -> tuple[Sizes, tuple[BudgetLine, ...]] | None:
    """Return the sizes and the byte budget; None after a refusal.

    Model, attention, quantization and speculative algorithm must have been chosen.
    """
    device = draft.values["device"]
    rows = _rows(draft, device)
    chunk = _chunk(draft, device)
    page = _page(draft, device)
    step_tokens = chunk + rows * draft.values["width"]
    draft.values["page_size"] = page
    draft.values["growing_segments"] = _grows(draft, device)
    fixed = [*_weights(draft), *workspace_lines(draft, rows, step_tokens, device)]
    room = _room(draft, device, fixed)
    if room.left <= 0:
        draft.refusals.append(_too_big(draft, fixed, room))
        return None
    token = kv_token_bytes(draft)
    beside = page_state_bytes(draft)
    pages = _pages(draft, room, token * page + beside, rows, page)
    context = _context(draft, pages, page, token, room) if pages else None
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
    keys, short = short_steps(draft, rows, context)
    sizes = Sizes(
        context_length=context,
        max_running=rows,
        max_queued=draft.config.scheduler.max_queued_requests,
        max_step_tokens=step_tokens,
        chunk_size=chunk,
        page_size=page,
        num_pages=pages,
        kv_bytes=cache[0].bytes,
        width=draft.values["width"],
        draft_layers=draft.values["draft_layers"],
        lookahead=draft.values["lookahead"],
        pass_tokens=pass_tokens(draft, step_tokens),
        extend_tokens=extend_tokens(draft, step_tokens),
        turns=_turns(draft),
        **_page_bounds(draft, pages, rows, page, context),
        short_keys=keys,
        short_rows=short,
    )
    draft.values["positions"], draft.values["short_rows"] = sizes.positions, short
    _remark_draft(draft)
    return sizes, (*fixed, *cache)


def _turns(draft: Proposal) -> tuple[int, ...]:
    """Return ``Sizes.turns``, the token counts of a step of one dp group.

    Experts compute the tokens of all groups, so their token counts are divided by the groups.
    """
    scheme = draft.first("quantization")
    if (
        draft.values["device"] != "cuda"
        or scheme is None
        or not isinstance(scheme.offers, QuantizationOffers)
    ):
        return ()
    found = scheme.offers.turns(scheme.options) if scheme.offers.turns else ()
    return tuple(turn // draft.values["mesh"].get("dp", 1) for turn in found)


def _page_bounds(draft: Proposal, pages: int, rows: int, page: int, context: int) -> dict[str, int]:
    """Return the fewest and most pages that a rank may have after measuring its memory."""
    memory = draft.config.memory
    if (
        draft.values["device"] == "cpu"
        or memory.kv_tokens is not None
        or memory.kv_bytes is not None
    ):
        return {"least_pages": pages, "most_pages": pages}
    one = -(-(context + _ahead(draft)) // page) + 1
    return {
        "least_pages": min(pages, one),
        "most_pages": max(pages, KV_SPARE * rows * (one - 1) + 1),
    }


# ---- counts --------------------------------------------------------------------------------------


def _rows(draft: Proposal, device: str) -> int:
    return _given_or(
        draft,
        "scheduler.max_running_requests",
        draft.config.scheduler.max_running_requests,
        DEVICE_DEFAULTS[device].running,
        f"default on {device}",
    )


def _chunk(draft: Proposal, device: str) -> int:
    return _given_or(
        draft,
        "scheduler.chunk_size",
        draft.config.scheduler.chunk_size,
        DEVICE_DEFAULTS[device].chunk,
        f"default on {device}",
    )


def _page(draft: Proposal, device: str) -> int:
    attention = draft.first("attention")
    assert attention is not None and isinstance(attention.offers, AttentionOffers)
    wanted = DEVICE_DEFAULTS[device].page
    why = f"default on {device}"
    if attention.offers.page_sizes and wanted not in attention.offers.page_sizes:
        wanted = min(
            attention.offers.page_sizes, key=lambda size: abs(size - DEVICE_DEFAULTS[device].page)
        )
        why = f"a size that {attention.name} reads"
    return _given_or(draft, "attention.page_size", draft.config.attention.page_size, wanted, why)


def _given_or(draft: Proposal, path: str, given: int | None, otherwise: int, why: str) -> int:
    """Record and return a given value, or ``otherwise`` with the reason ``why``."""
    if given is None:
        draft.decide(path, otherwise, "size", why)
        return otherwise
    draft.decide(path, given, *(draft.source(path) or ("default", "")))
    return given


def _grows(draft: Proposal, device: str) -> bool:
    """Return whether torch's allocator uses expandable segments; False on a CPU."""
    path = "memory.growing_segments"
    asked = draft.config.memory.growing_segments
    source = draft.source(path)
    if device != "cuda":
        return False
    if asked != "auto":
        draft.decide(path, asked, *(source or ("default", "")))
        return asked
    against = _against_growing(draft)
    draft.decide(
        path,
        not against,
        "size",
        f"auto: {against or 'steps and graphs take less memory, the KV cache gets more'}",
    )
    return not against


def _against_growing(draft: Proposal) -> str:
    """Return the reason why "auto" does not use expandable segments; "" if it does."""
    if draft.values["ranks"] > 1:
        return f"not tested with several ranks, and the plan has {draft.values['ranks']}"
    collectives = draft.first("collectives")
    if collectives is None:
        return ""
    assert isinstance(collectives.offers, CollectiveOffers)
    return (
        ""
        if collectives.offers.growing_segments
        else (f"{collectives.name} shares memory by handles that expandable segments do not have")
    )


# ---- bytes ---------------------------------------------------------------------------------------


def _weights(draft: Proposal) -> list[BudgetLine]:
    """Return the lines of the weights, and of the draft's weights."""
    scheme = draft.first("quantization")
    assert scheme is not None and isinstance(scheme.offers, QuantizationOffers)
    assert isinstance(scheme.options, QuantizationOptions)
    storage = Storage(
        compute=DTYPE_BYTES[draft.values["dtype"]],
        keeps=not scheme.options.dequantizes(draft.values["device"], scheme.offers),
        copies_latent=draft.values["device"] == "cpu",
        online=scheme.offers.online_bytes
        if scheme.offers.online and draft.facts.model.quant_method == "none"
        else 0,
    )
    lines = [_weight_line(draft, "weights", draft.facts.model, draft.elements, storage, False)]
    if draft.values["draft_layers"]:
        model = draft.facts.draft or draft.facts.model
        elements = draft.draft_elements if draft.facts.draft else draft.elements
        lines.append(_weight_line(draft, "draft weights", model, elements, storage, True))
    return lines


def _weight_line(
    draft: Proposal, name: str, model: ModelFacts, elements: Tally, storage: Storage, drafts: bool
) -> BudgetLine:
    """Return the line of one model's weights.

    Args:
        elements: element counts by kind.
        drafts: the line is that of the first next-token layer.
    """
    ranks = draft.values["ranks"]
    how = "tensor headers" if model.tensors else "arithmetic from config.json"
    held = weights_by_rank(elements, model, draft.values["mesh"], ranks, storage, drafts)
    if ranks > 1:
        how += f", over {ranks} ranks"
    return BudgetLine(name, max(held), how, held if len(set(held)) > 1 else ())


def _room(draft: Proposal, device: str, fixed: list[BudgetLine]) -> MemoryShare:
    """Return the memory of a rank after the fixed lines."""
    machine = draft.facts.hardware
    fraction = draft.config.memory.fraction
    used = sum(line.bytes for line in fixed)
    if device == "cuda":
        memory = min((card.memory for card in machine.devices), default=0)
        share = fraction or 1 - CUDA_RESERVE
        what = "the device's"
    else:
        per_host = -(-draft.values["ranks"] // draft.values["hosts"])
        memory = machine.cpu_memory // per_host
        share = fraction or CPU_SHARE
        what = "the machine's"
    if fraction is not None:
        draft.decide(
            "memory.fraction", fraction, *(draft.source("memory.fraction") or ("default", ""))
        )
    total = int(memory * share)
    return MemoryShare(
        total, memory, f"{human(total)} ({share:.0%} of {what} {human(memory)})", total - used
    )


def _too_big(draft: Proposal, fixed: list[BudgetLine], room: MemoryShare) -> Refusal:
    """Return the refusal of a plan whose fixed lines leave no memory for the KV cache."""
    needed = room.total - room.left
    needs = ", ".join(f"{line.name} {human(line.bytes)}" for line in fixed)
    field, fix = _smaller(draft, {line.name: line.bytes for line in fixed}, room, needed)
    return Refusal(
        "size",
        field,
        f"each rank needs {human(needed)} ({needs}) before any KV cache, and has {room.shown}",
        fix,
    )


def _smaller(
    draft: Proposal, lines: dict[str, int], room: MemoryShare, needed: int
) -> tuple[str, str]:
    """Return the field to change so that the fixed lines fit, and the fix."""
    share = needed / room.memory
    default = CPU_SHARE if draft.values["device"] == "cpu" else 1 - CUDA_RESERVE
    if draft.config.memory.fraction is not None and share < 1 - CUDA_RESERVE:
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
    return "model", fix + (', or dtype = "bfloat16"' if draft.values["dtype"] == "float32" else "")


def kv_token_bytes(draft: Proposal) -> int:
    """Return the bytes of KV cache of one token on a rank, over all layers."""
    model = draft.facts.model
    layers: int = model.num_layers + draft.values["draft_layers"]
    element = DTYPE_BYTES[draft.values["kv_dtype"]]
    if model.kind == "mla":  # all heads share the latent, so every rank holds all of it
        return layers * (model.kv_lora_rank + model.qk_rope_head_dim) * element
    heads = max(1, -(-model.num_kv_heads // axis_size("attn_tp", draft.values["mesh"])))
    return layers * 2 * heads * model.head_dim * element


def page_state_bytes(draft: Proposal) -> int:
    """Return the bytes kept for a draft beside each page: one hidden state of the target, or 0."""
    speculative = draft.first("speculative")
    assert speculative is not None and isinstance(speculative.offers, SpeculativeOffers)
    if not (speculative.offers.nextn_layer and speculative.offers.first_key):
        return 0
    return draft.facts.model.hidden_size * DTYPE_BYTES[draft.values["dtype"]]


def _remark_draft(draft: Proposal) -> None:
    """Add a remark if only the first of several next-token layers is used."""
    layers = (draft.facts.draft or draft.facts.model).nextn_layers
    if draft.values["draft_layers"] and layers > 1:
        draft.decide(
            "speculative.layers",
            1,
            "size",
            f"the first of {layers} next-token layers drafts every token",
            notable=True,
        )


def _pages(draft: Proposal, room: MemoryShare, page_bytes: int, rows: int, page: int) -> int | None:
    """Return the pages of the KV pool with the scratch page; None after a refusal."""
    memory = draft.config.memory
    most = room.left // page_bytes
    if memory.kv_tokens is not None:
        asked = -(-memory.kv_tokens // page) + 1
        field = "memory.kv_tokens"
    elif memory.kv_bytes is not None:
        asked = memory.kv_bytes // page_bytes
        field = "memory.kv_bytes"
    else:
        return _auto_pages(draft, most, page_bytes, rows, page)
    if asked > most or asked < 2:
        fit = most * page_bytes if field == "memory.kv_bytes" else (most - 1) * page
        low = 2 * page_bytes if field == "memory.kv_bytes" else 1
        draft.refusals.append(
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
    draft.decide("kv.tokens", (asked - 1) * page, *(draft.source(field) or ("default", "")))
    return asked


def _auto_pages(draft: Proposal, most: int, page_bytes: int, rows: int, page: int) -> int | None:
    """Return the default number of pages; None after a refusal.

    They take the memory that is left, but no more than running sequences can use; on a device,
    ``KV_SPARE`` times as much, for the prefix cache.
    """
    context = draft.config.context_length or draft.facts.model.max_positions
    each = -(-(context + _ahead(draft)) // page)
    limits = {most: "the rest of the memory"}
    if draft.values["device"] == "cpu":
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
        draft.refusals.append(
            Refusal(
                "size",
                "model",
                f"one page of KV cache needs {human(page_bytes)}, "
                f"{human(most * page_bytes)} are left",
                "more memory, or a smaller model",
            )
        )
        return None
    draft.decide("kv.tokens", (pages - 1) * page, "size", limits[pages])
    return pages


def _ahead(draft: Proposal) -> int:
    """Return the positions after the longest sequence that have pages (``Sizes.positions``)."""
    ahead: int = draft.values["width"] + draft.values["lookahead"]
    return ahead


def _context(draft: Proposal, pages: int, page: int, token: int, room: MemoryShare) -> int | None:
    """Return the longest sequence; None after a refusal.

    By default it is the model's, or the longest that the KV pool can hold.
    """
    asked = draft.config.context_length
    positions = draft.facts.model.max_positions
    held: int = (pages - 1) * page - _ahead(draft)
    if asked is None:
        context = max(1, min(positions, held))
        why = (
            "the model's"
            if context == positions
            else f"as much as the KV cache holds (the model's is {positions})"
        )
        draft.decide("context_length", context, "size", why, notable=context < positions)
        return context
    draft.decide("context_length", asked, *(draft.source("context_length") or ("default", "")))
    if asked > positions:
        draft.refusals.append(
            Refusal(
                "size",
                "context_length",
                f"{asked} is beyond the model's {positions} positions",
                f"context_length = {positions}",
            )
        )
        return None
    if asked > held:
        draft.refusals.append(
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

"""The second step of sizing: the fixed lines of the budget, and the memory left. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.errors import Refusal
from glowplug.core.facts.kv_layout import DTYPE_BYTES
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.stored_formats import OnlineWeight
from glowplug.core.facts.weight_classes import WHOLE, Tally
from glowplug.core.plan.budget.counts import Counts
from glowplug.core.plan.budget.step import DRAFT_STATE, RESERVED, workspace_lines
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.budget.weights import QUANTISED, Storage, weights_by_rank
from glowplug.core.plan.plan import BudgetLine, Decision
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.model_reading import online_elements

CPU_SHARE = 0.7  #: share of a CPU's memory that is used, so that the machine stays usable
CUDA_RESERVE = 0.02  #: share of a device's memory that is left free
WEIGHT_LINES = ("weights", "draft weights")  #: names of the budget lines of weights
#: budget line of a step -> the option that makes it smaller
STEP_OPTIONS = {
    "activations": "scheduler.chunk_size",
    "logits": "scheduler.max_running_requests",
}


@dataclass(frozen=True)
class MemoryShare:
    """The memory that one rank may use.

    Attributes:
        total: bytes that the rank may use.
        memory: bytes of memory of which ``total`` is a share.
        shown: ``total`` as text.
    """

    total: int
    memory: int
    shown: str


@dataclass(frozen=True)
class Budget:
    """The budget of a rank before any KV cache.

    Attributes:
        lines: the fixed lines: weights, and the memory of a step.
        share: the memory of the rank.
        decisions: the decision for the share, if it was given.
        tier_pages: pages of the prefix cache's tier, which has one of the lines.
    """

    lines: tuple[BudgetLine, ...]
    share: MemoryShare
    decisions: tuple[Decision, ...]
    tier_pages: int = 0

    @property
    def needed(self) -> int:
        """Bytes of the fixed lines in the memory of the rank's device."""
        return sum(line.bytes for line in self.lines if not line.place)

    @property
    def weights(self) -> int:
        """Bytes of the weights, those of a draft included."""
        return sum(line.bytes for line in self.lines if line.name in WEIGHT_LINES)

    @property
    def left(self) -> int:
        """Bytes left for the KV cache."""
        return self.share.total - self.needed


def decide_budget(proposal: Proposal, counts: Counts) -> Budget | Refusal:
    """Return the budget of a rank, or a refusal if fixed lines leave no memory for a KV cache."""
    lines = (*_weight_lines(proposal), *workspace_lines(proposal, counts))
    fraction = proposal.config.memory.fraction
    decisions = [] if fraction is None else [proposal.given("memory.fraction", fraction)]
    budget = Budget(lines, _memory_share(proposal), tuple(decisions))
    return budget if budget.left > 0 else _too_big(proposal, budget)


def _memory_share(proposal: Proposal) -> MemoryShare:
    """Return the memory that a rank may use."""
    machine = proposal.facts.hardware
    fraction = proposal.config.memory.fraction
    if proposal.values.device == "cuda":
        memory = min((card.memory for card in machine.devices), default=0)
        share = fraction or 1 - CUDA_RESERVE
        what = "the device's"
    else:
        per_host = -(-proposal.values.ranks // proposal.values.hosts)
        memory = machine.cpu_memory // per_host
        static = proposal.config.memory.static_fraction
        share = fraction or (CPU_SHARE if static is None else 1 - CUDA_RESERVE)
        what = "the machine's"
    total = int(memory * share)
    return MemoryShare(total, memory, f"{human(total)} ({share:.0%} of {what} {human(memory)})")


# ---- weights -------------------------------------------------------------------------------------


def _weight_lines(proposal: Proposal) -> list[BudgetLine]:
    """Return the budget lines of the model's weights and, with a draft, of the draft's weights."""
    storage = _storage(proposal)
    own = _elements(proposal, proposal.facts.model, proposal.elements)
    lines = [_weight_line(proposal, WEIGHT_LINES[0], proposal.facts.model, own, storage)]
    draft = proposal.whole_draft
    speculative = proposal.speculative
    in_folder = proposal.facts.draft is not None and draft is None
    if in_folder or (speculative is not None and speculative.offers.nextn_layer):
        lines.append(_draft_line(proposal, own, storage))
    if draft is not None:
        model = draft.facts.model
        elements = _elements(draft, model, draft.elements)
        lines.append(_weight_line(draft, WEIGHT_LINES[1], model, elements, _storage(draft)))
    return lines


def _draft_line(proposal: Proposal, own: Tally, storage: Storage) -> BudgetLine:
    """Return the budget line of a draft's layers and heads, if the draft is not a whole model.

    Args:
        own: element counts of the target's checkpoint, which may hold them.
        storage: form in which the target's weights are kept.
    """
    model = proposal.facts.draft or proposal.facts.model
    elements = own if proposal.facts.draft is None else proposal.draft_elements
    if proposal.speculative is not None and not proposal.speculative.offers.nextn_layer:
        # heads stay unquantised
        return _weight_line(proposal, WEIGHT_LINES[1], model, elements, storage)
    if proposal.facts.draft is not None:
        elements = _elements(proposal, model, elements)
    layers = proposal.values.draft_layers
    return _weight_line(proposal, WEIGHT_LINES[1], model, elements, storage, layers)


def _storage(proposal: Proposal) -> Storage:
    """Return the form in which the weights of the proposal's model are kept."""
    scheme = proposal.quantization
    assert scheme is not None
    return Storage(
        compute=DTYPE_BYTES[proposal.values.dtype],
        keeps=not scheme.options.dequantizes(proposal.values.device, scheme.offers),
        copies_latent=proposal.values.device == "cpu",
    )


def _quantises(proposal: Proposal) -> bool:
    """Return whether the scheme quantises the proposal's model while loading."""
    scheme = proposal.quantization
    unquantized = proposal.facts.model.quant_method == "none"
    return scheme is not None and scheme.offers.online and unquantized


def _elements(proposal: Proposal, model: ModelFacts, stored: Tally) -> Tally:
    """Return a model's element counts by kind.

    They are counted anew if the scheme quantises the model while loading: matrices then have the
    bytes that the scheme declares, and vectors those of the compute dtype. A number of bytes per
    element applies to all matrices but projections to latents.

    Args:
        model: the model, or the draft of a folder of its own.
        stored: element counts of its checkpoint.
    """
    scheme = proposal.quantization
    if scheme is None or not _quantises(proposal) or model.quant_method != "none":
        return stored
    each = scheme.offers.online_bytes
    element = DTYPE_BYTES[proposal.values.dtype]

    def kept(role: str, module: str, rows: int, columns: int) -> float:
        if callable(each):
            return each(OnlineWeight(module, rows, columns, element, scheme.options, role))
        return rows * columns * each

    roles = QUANTISED | {WHOLE} if callable(each) else QUANTISED
    return online_elements(model, proposal.plugins.components("model"), kept, roles)


def _weight_line(
    proposal: Proposal,
    name: str,
    model: ModelFacts,
    elements: Tally,
    storage: Storage,
    drafts: int = 0,
) -> BudgetLine:
    """Return the budget line of one model's weights.

    Args:
        elements: number of elements by kind (``WeightKind``).
        drafts: number of next-token layers to count instead of the target; 0: the target.
    """
    ranks = proposal.values.ranks
    how = "tensor headers" if model.tensors else "arithmetic from config.json"
    redundant = proposal.redundant_experts
    held = weights_by_rank(elements, model, proposal.values.mesh, ranks, storage, drafts, redundant)
    if ranks > 1:
        how += f", over {ranks} ranks"
    if redundant:
        how += f", {redundant} redundant experts in each layer"
    return BudgetLine(name, max(held), how, held if len(set(held)) > 1 else ())


# ---- refusals ------------------------------------------------------------------------------------


def _too_big(proposal: Proposal, budget: Budget) -> Refusal:
    """Return the refusal of a plan whose fixed lines leave no memory for the KV cache."""
    needs = ", ".join(f"{line.name} {human(line.bytes)}" for line in budget.lines)
    field, fix = _smaller(proposal, budget)
    return Refusal(
        "size",
        field,
        f"each rank needs {human(budget.needed)} ({needs}) before any KV cache, "
        f"and has {budget.share.shown}",
        fix,
    )


def _smaller(proposal: Proposal, budget: Budget) -> tuple[str, str]:
    """Return the option to change so that the fixed lines fit, and the text of the fix."""
    fraction = _larger_fraction(proposal, budget)
    if fraction:
        return "memory.fraction", fraction
    lines = {line.name: line.bytes for line in budget.lines}
    total = budget.share.total
    graphs = lines.get("graphs", 0)
    reserved = lines.get(RESERVED, 0)
    if reserved > graphs and budget.needed - reserved < total:
        return "attention.use", (
            'attention.use = "auto"; or smaller page tables: a shorter context_length, fewer '
            "scheduler.max_running_requests"
        )
    if budget.needed - graphs < total:
        return "graphs.batch_sizes", (
            'graphs.use = "eager"; or fewer graphs: a shorter list, a smaller graphs.max_batch, '
            "graphs.prefill = false"
        )
    of_steps = sum(lines.get(name, 0) for name in (*STEP_OPTIONS, "sampling state", DRAFT_STATE))
    if budget.needed - of_steps - graphs - reserved < total:
        return _smaller_step(lines)
    fix = "more memory per rank: a larger machine, more ranks, or a quantized checkpoint"
    return "model", fix + (', or dtype = "bfloat16"' if proposal.values.dtype == "float32" else "")


def _smaller_step(lines: Mapping[str, int]) -> tuple[str, str]:
    """Return the option that reduces the larger of activations and logits, and the fix.

    ``lines``: bytes by name of the budget line.
    """
    sizes = {name: lines.get(name, 0) for name in STEP_OPTIONS}
    sizes["logits"] += lines.get(DRAFT_STATE, 0)  # grows with the number of rows, too
    first, second = sorted(sizes, key=lambda name: -sizes[name])
    field = STEP_OPTIONS[first]
    return field, f"a smaller {field}, and a smaller {STEP_OPTIONS[second]}"


def _larger_fraction(proposal: Proposal, budget: Budget) -> str:
    """Return the fix that raises a given ``memory.fraction``; empty if raising cannot help."""
    share = budget.needed / budget.share.memory
    if proposal.config.memory.fraction is None or share >= 1 - CUDA_RESERVE:
        return ""
    default = CPU_SHARE if proposal.values.device == "cpu" else 1 - CUDA_RESERVE
    left_out = f", or leave it out ({default:.0%})" if share < default else ""
    return f"memory.fraction = {math.ceil(100 * share + 1) / 100:g} or more{left_out}"

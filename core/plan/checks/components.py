"""Generic checks of components against facts and against one another. Plan zone: no torch.

They are pure functions of the proposal that read offers and facts, never names. ``checks/rules.py``
runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks import (
    last_layer as last_layer_choice,
    ranks as checks_ranks,
    speculation as checks_draft,
)
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse, use_field
from glowplug.core.plan.checks.suggestions import suggestions
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import CONTRACT, Chosen, Component
from glowplug.core.plugin.offers import (
    CARRIED_KINDS,
    AttentionOffers,
    CacheOffers,
    GraphOffers,
    Mode,
    ModelOffers,
    Offers,
    OutputOffers,
    ParallelOffers,
    PolicyOffers,
    QuantizationOffers,
    SpeculativeOffers,
    WeightOffers,
)
from glowplug.core.plugin.requirements import installation, missing_packages
from glowplug.core.plugin.slots import SLOTS, Slot

#: modules with further checks, which are registered when the modules are imported
MODULES = (checks_draft, checks_ranks, last_layer_choice)


# ---- one component against the facts -------------------------------------------------------------


def component_checks(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse a wrong contract, device, compute capability or dtype, and missing packages."""
    if component.contract != CONTRACT:
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{component.name} was written for contract {component.contract}, this "
            f"is contract {CONTRACT}",
            f"install a version of {proposal.origin(slot.name, component.name)} made "
            "for this release of glowplug",
        )
    unfit = list(_device(proposal, slot, component.offers, chosen))
    yield from unfit
    # a component that cannot run here would not be helped by installing packages
    if all(refusal.field != use_field(proposal, slot, chosen) for refusal in unfit):
        yield from _packages(proposal, slot, component, chosen)


def _packages(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse missing packages."""
    for requirement, found in missing_packages(component, proposal.facts.software.packages):
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{component.name} needs {requirement} ({found})",
            installation(requirement, proposal.facts.hardware),
        )


def provider_checks(
    proposal: Proposal, slot: Slot, component: Component, chosen: Chosen
) -> Iterator[Refusal]:
    """Refuse libraries that options choose for GEMMs on CUDA and that are not installed."""
    if proposal.values.device != "cuda" or not component.uses:
        return
    for name in chosen.options.provider_fields():
        value = getattr(chosen.options, name)
        needed = component.uses.get(value, ())
        if needed and not any(proposal.facts.software.packages.get(package) for package in needed):
            key = f"{slot.name}.{name}"
            yield Refusal(
                component.name,
                key,
                f'{key} = "{value}" needs {" or ".join(needed)} (not installed)',
                f'{installation(needed[0], proposal.facts.hardware)} (or {key} = "auto")',
            )


def _device(proposal: Proposal, slot: Slot, offers: Offers, chosen: Chosen) -> Iterator[Refusal]:
    """Refuse a wrong device, compute capability or compute dtype."""
    device = proposal.values.device
    dtype = proposal.values.dtype
    machine = proposal.facts.hardware
    if device not in offers.devices:
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{chosen.name} runs on {listed(offers.devices)}, the device is {device}",
            instead(proposal, slot.name, lambda o: True, f'device = "{min(offers.devices)}"'),
        )
    elif device == "cuda" and (offers.compute or offers.least_compute):
        cards = {card.compute for card in machine.devices}
        if not offers.runs_on(cards):
            supported = listed(offers.compute) or f"{offers.least_compute} and later"
            yield refuse(
                proposal,
                slot.name,
                chosen,
                f"{chosen.name} supports SM{supported}; {machine.name} has SM{listed(cards)}",
                instead(proposal, slot.name, lambda o: True, "another device"),
            )
    if slot.step and dtype not in offers.dtypes:
        yield refuse(
            proposal,
            slot.name,
            chosen,
            f"{chosen.name} computes in {listed(offers.dtypes)}, the dtype is {dtype}",
            f'dtype = "{min(offers.dtypes)}"',
            field="dtype",
        )


# ---- model, weights, quantization ----------------------------------------------------------------


@reads("model")
def check_architecture(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a model family that does not build the model's architecture."""
    for chosen in proposal.chosen["model"]:
        assert isinstance(chosen.offers, ModelOffers)
        if proposal.facts.model.architecture not in chosen.offers.architectures:
            yield refuse(
                proposal,
                "model",
                chosen,
                f"{chosen.name} builds {listed(chosen.offers.architectures)}, the "
                f"model is {proposal.facts.model.architecture}",
                "a model of one of these architectures, or a plugin that registers this one",
            )


@reads("weights")
def check_weight_format(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse weight sources of another format, and made-up weights that were not requested."""
    chosen = proposal.first("weights")
    found = proposal.facts.model.format
    if chosen is None:
        return
    assert isinstance(chosen.offers, WeightOffers)
    formats = chosen.offers.formats
    if "synthetic" in formats:
        if proposal.source("weights.use") is None:
            yield refuse(
                proposal,
                "weights",
                chosen,
                f"{chosen.name} makes up weights, which must be requested",
                _with_weights(proposal, f'weights.use = "{chosen.name}"'),
            )
    elif found not in formats:
        fix = instead(
            proposal,
            "weights",
            lambda o: found in o.formats or "synthetic" in o.formats,
            "a folder with weights, or a plugin that reads them",
        )
        if found == "none" and "use =" in fix:
            fix = _with_weights(proposal, fix)
        held = "no weights" if found == "none" else f"{found} weights"
        yield refuse(
            proposal,
            "weights",
            chosen,
            f"{chosen.name} reads {listed(formats)}; {proposal.facts.model.path} holds {held}",
            fix,
        )


def _with_weights(proposal: Proposal, made_up: str) -> str:
    """Return the fix for a folder without weights.

    Args:
        made_up: the setting that selects made-up weights.
    """
    offered = (found.component.offers for found in proposal.plugins.components("weights"))
    formats = {
        name for offers in offered if isinstance(offers, WeightOffers) for name in offers.formats
    }
    return (
        f"a folder with weights ({listed(formats - {'synthetic'})}), or {made_up} for made-up ones"
    )


@reads("quantization")
def check_quantization(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse schemes that do not load the checkpoint's quantization or block shape."""
    chosen = proposal.first("quantization")
    model = proposal.facts.model
    if chosen is None:
        return
    assert isinstance(chosen.offers, QuantizationOffers)
    offers = chosen.offers
    method = model.quant_method
    if method not in offers.reads and method != "none":
        native = instead(
            proposal, "quantization", lambda o: method in o.reads, "a plugin that reads it"
        )
        plain = "none" in offers.reads and not offers.online
        reason = f"{chosen.name} reads unquantized checkpoints, this one is {quantized_as(model)}"
        yield refuse(
            proposal,
            "quantization",
            chosen,
            reason if plain else stacking(proposal, chosen.name),
            f"leave quantization out ({native} is then chosen)" if "use =" in native else native,
        )
    elif method not in offers.reads and not offers.online:
        yield refuse(
            proposal,
            "quantization",
            chosen,
            f"{chosen.name} reads checkpoints quantized as "
            f"{listed(offers.reads)}; this one is not quantized",
            instead(
                proposal, "quantization", lambda o: "none" in o.reads, 'quantization.use = "auto"'
            ),
        )
    elif (
        method != "none"
        and offers.block_shape
        and model.quant_block
        and offers.block_shape != model.quant_block
    ):
        yield refuse(
            proposal,
            "quantization",
            chosen,
            f"{chosen.name} reads blocks of {_shape(offers.block_shape)}, the "
            f"checkpoint has {_shape(model.quant_block)}",
            "a plugin that reads these blocks",
        )


def stacking(proposal: Proposal, name: str) -> str:
    """Return the reason why a scheme cannot quantize a quantized checkpoint."""
    return (
        f"the checkpoint is already quantized ({quantized_as(proposal.facts.model)}); "
        f"{name} would quantize it a second time"
    )


def quantized_as(model: ModelFacts) -> str:
    """Return a checkpoint's quantization method and block shape as text."""
    return model.quant_method + (
        f" in {_shape(model.quant_block)} blocks" if model.quant_block else ""
    )


def _shape(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"


# ---- attention -----------------------------------------------------------------------------------


@reads("attention", "model")
def check_attention_kind(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse attention of another kind than the model's."""
    chosen = proposal.first("attention")
    model = proposal.first("model")
    if chosen is None or model is None:
        return
    assert isinstance(chosen.offers, AttentionOffers) and isinstance(model.offers, ModelOffers)
    kind = model.offers.kind
    if kind not in chosen.offers.kinds:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} computes {listed(chosen.offers.kinds)} attention, "
            f"{proposal.facts.model.architecture} needs {kind}",
            instead(
                proposal, "attention", lambda o: kind in o.kinds, f"a plugin with {kind} attention"
            ),
        )


@reads("attention")
def check_kv_dtype(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a KV cache dtype that attention does not read."""
    chosen = proposal.first("attention")
    kv_dtype = proposal.values.kv_dtype
    if chosen is None:
        return
    assert isinstance(chosen.offers, AttentionOffers)
    if kv_dtype not in chosen.offers.kv_dtypes:
        kinds = chosen.offers.kinds
        other = suggestions(
            proposal, "attention", lambda o: kv_dtype in o.kv_dtypes and o.kinds == kinds
        )
        fix = 'attention.kv_dtype = "auto"' + (
            f', or attention.use = "{other[0]}"' if other else ""
        )
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} keeps the KV cache in "
            f"{listed(chosen.offers.kv_dtypes)}, not in {kv_dtype}",
            fix,
            field="attention.kv_dtype",
        )


@reads("attention")
def check_page_size(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a given page size that attention does not read."""
    chosen = proposal.first("attention")
    size = proposal.config.attention.page_size
    if chosen is None or size is None:
        return
    assert isinstance(chosen.offers, AttentionOffers)
    if chosen.offers.page_sizes and size not in chosen.offers.page_sizes:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads pages of {listed(chosen.offers.page_sizes)} "
            f"tokens, not of {size}",
            f"attention.page_size = {min(chosen.offers.page_sizes)}",
            field="attention.page_size",
        )


@reads("attention", "speculative")
def check_width(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse attention that cannot verify the drafted tokens."""
    chosen = proposal.first("attention")
    speculative = proposal.first("speculative")
    if chosen is None or speculative is None:
        return
    assert isinstance(chosen.offers, AttentionOffers) and isinstance(
        speculative.offers, SpeculativeOffers
    )
    width = proposal.values.width
    most = chosen.offers.max_width
    if most and width > most:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} supports {most} query tokens per row in decode, the "
            f"speculative algorithm computes {width}",
            instead(
                proposal,
                "attention",
                lambda o: not o.max_width or o.max_width >= width,
                "draft fewer tokens",
            ),
        )
    if speculative.offers.tree and not chosen.offers.tree:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads causal chains only, the drafted tokens form a tree",
            instead(proposal, "attention", lambda o: o.tree, "draft a chain (topk = 1)"),
        )


@reads("attention", "speculative")
def check_first_key(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse attention that reads the first position, which the draft's cache does not hold."""
    chosen = proposal.first("attention")
    speculative = proposal.first("speculative")
    if chosen is None or speculative is None:
        return
    assert isinstance(chosen.offers, AttentionOffers) and isinstance(
        speculative.offers, SpeculativeOffers
    )
    if speculative.offers.first_key and not chosen.offers.first_key:
        yield refuse(
            proposal,
            "attention",
            chosen,
            f"{chosen.name} reads all positions of the cache, but that of {speculative.name}'s "
            "draft has no entry for the first token",
            instead(proposal, "attention", lambda o: o.first_key, 'speculative.use = "none"'),
        )


# ---- outputs -------------------------------------------------------------------------------------


@reads("outputs")
def check_output_kinds(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse parsers of pieces that answers cannot carry, such as tool calls."""

    def lost(chosen: Chosen) -> frozenset[str]:
        assert isinstance(chosen.offers, OutputOffers)
        return chosen.offers.kinds - CARRIED_KINDS

    kept = ", ".join(
        f'{{use = "{chosen.name}"}}' for chosen in proposal.chosen["outputs"] if not lost(chosen)
    )
    for chosen in proposal.chosen["outputs"]:
        if lost(chosen):
            yield refuse(
                proposal,
                "outputs",
                chosen,
                f"{chosen.name} makes pieces of kind {listed(lost(chosen))}, which "
                "answers cannot carry yet; their text would become part of the content",
                f"outputs = [{kept}]; requests that bring tools are refused",
            )


# ---- the step's path -----------------------------------------------------------------------------


PLAIN_STEPS = frozenset({Mode.PREFILL, Mode.DECODE})
DRAFTING_STEPS = frozenset({Mode.PREFILL, Mode.VERIFY, Mode.DRAFT_DECODE, Mode.DRAFT_EXTEND})


def needed_modes(proposal: Proposal) -> frozenset[Mode]:
    """Return the modes of the steps that this combination runs."""
    speculative = proposal.first("speculative")
    modes = PLAIN_STEPS
    if (
        speculative is not None
        and isinstance(speculative.offers, SpeculativeOffers)
        and speculative.offers.drafts
    ):
        modes = DRAFTING_STEPS
    if any(
        isinstance(c.offers, ParallelOffers) and c.offers.idle_steps
        for c in proposal.chosen["parallel"]
    ):
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
    needed = needed_modes(proposal)
    for slot, chosen in proposal.step_path():
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
    runner = proposal.first("graphs")
    if runner is None or not isinstance(runner.offers, GraphOffers):
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
    """Refuse overlap that the operator requests if a component waits for the device."""
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


# ---- policy --------------------------------------------------------------------------------------


@reads("policy", "cache")
def check_prefix_policy(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a policy that orders by cached prefixes if there is no prefix cache."""
    policy = proposal.first("policy")
    cache = proposal.first("cache")
    if policy is None or cache is None:
        return
    assert isinstance(policy.offers, PolicyOffers) and isinstance(cache.offers, CacheOffers)
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

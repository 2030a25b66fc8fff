"""Facts of a model, completed by its family and by the format of its weights. No torch.

Facts are read before components are chosen. The family is found by the architecture among the
registered model families, the format by ``quant_method`` among the quantization schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from glowplug.core.errors import FactsError
from glowplug.core.facts.inventory import Inventory, count_declared, count_online, count_stored
from glowplug.core.facts.layer_sizes import LayerSizes
from glowplug.core.facts.model_facts import ModelFacts, stated
from glowplug.core.facts.model_folder import ArchitectureRules, Normalise
from glowplug.core.facts.stored_formats import StoredFormat
from glowplug.core.facts.weight_classes import LAYER_PREFIX, Tally
from glowplug.core.plugin.loading import Registration
from glowplug.core.plugin.offers import ModelOffers, QuantizationOffers


class ModelReading(NamedTuple):
    """A model's facts and the element counts of its checkpoint.

    Attributes:
        facts: the model's facts.
        elements: number of elements by kind, from the tensor headers; without tensors, as the
            model's family declares them.
    """

    facts: ModelFacts
    elements: Tally


class Family(NamedTuple):
    """A registered model family: name and origin for messages, factory and offers."""

    name: str
    origin: str
    factory: str
    offers: ModelOffers


def families(registered: Iterable[Registration]) -> Iterator[Family]:
    """Yield the registered model families in order."""
    for found in registered:
        offers = found.component.offers
        if isinstance(offers, ModelOffers):
            origin = f"{found.distribution} {found.version}".rstrip()
            yield Family(found.component.name, origin, found.component.factory, offers)


def architecture_rules(registered: Iterable[Registration]) -> ArchitectureRules:
    """Return the declarations of all model families that are needed to read config.json.

    If several families declare an architecture, the first one counts.
    """
    normalise: dict[str, Normalise] = {}
    prefixes: dict[str, str] = {}
    drafts: set[str] = set()
    for family in reversed(list(families(registered))):
        offers = family.offers
        drafts |= offers.draft_architectures
        for architecture in (
            offers.architectures | offers.draft_architectures | offers.eagle_architectures
        ):
            prefixes[architecture] = offers.layer_prefix
            normalise.pop(architecture, None)
            if offers.normalise is not None:
                normalise[architecture] = offers.normalise
    return ArchitectureRules(normalise, frozenset(drafts), prefixes)


def complete(
    facts: ModelFacts, models: Sequence[Registration], schemes: Sequence[Registration]
) -> ModelReading:
    """Return ``facts`` with its family's layer sizes and split dimensions, and element counts.

    If the family has no inventory, that of another family with the same factory is used, since both
    build the same tensors. If there is none either, elements are counted from the tensor headers
    alone, and a remark in the plan states that.

    Args:
        facts: facts as a plugin read them.
        models: registered model families.
        schemes: registered quantization schemes.

    Raises:
        FactsError: there is no inventory, and the model has no tensor headers.
    """
    known = list(families(models))
    family = next((one for one in known if _builds(one, facts.architecture)), None)
    inventory, notes = _inventory(facts, family, known)
    stored = stored_format(facts.quant_method, schemes)
    if stored is None:
        what = f"no quantization scheme declares how {facts.quant_method!r} weights are stored"
        notes += (f"{what}: they count as unquantised",)
        stored = StoredFormat()
    facts = replace(
        facts, sizes=inventory.sizes, splits=inventory.splits, notes=facts.notes + notes
    )
    if not facts.tensors:
        return ModelReading(facts, count_declared(facts, inventory, stored))
    prefix = family.offers.layer_prefix if family is not None else LAYER_PREFIX
    return ModelReading(facts, count_stored(facts, inventory, stored, prefix))


def online_elements(
    facts: ModelFacts,
    models: Sequence[Registration],
    kept: Callable[[str, str, int, int], float],
    roles: frozenset[str],
) -> Tally:
    """Return the element counts of an unquantized model that is quantised while loading.

    Args:
        facts: the model's facts.
        models: registered model families.
        kept: see ``count_online``.
        roles: see ``count_online``.
    """
    known = list(families(models))
    family = next((one for one in known if _builds(one, facts.architecture)), None)
    prefix = family.offers.layer_prefix if family is not None else LAYER_PREFIX
    return count_online(facts, _inventory(facts, family, known)[0], kept, roles, prefix)


def _inventory(
    facts: ModelFacts, family: Family | None, known: Iterable[Family]
) -> tuple[Inventory, tuple[str, ...]]:
    """Return a model's inventory, and remarks for the plan's table.

    Args:
        facts: facts as a plugin read them.
        family: family of the model; None for an unknown architecture, which is refused later.
        known: registered model families.

    Raises:
        FactsError: there is no inventory, and the model has no tensor headers.
    """
    alike = [one for one in known if family is not None and one.factory == family.factory]
    for one in (family, *alike):
        if one is None:
            continue
        head = facts.architecture in one.offers.eagle_architectures
        declared = one.offers.eagle_inventory if head else one.offers.inventory
        if declared is not None:
            return declared(facts), ()
    width = stated(facts, "intermediate_size", 4 * facts.hidden_size)
    bare = Inventory(sizes=LayerSizes(width=width))
    return bare, (_undeclared(family, facts),) if family is not None else ()


def _builds(family: Family, architecture: str) -> bool:
    """Return whether a family builds models or drafts of this architecture."""
    offers = family.offers
    return architecture in (
        offers.architectures | offers.draft_architectures | offers.eagle_architectures
    )


def _undeclared(family: Family, facts: ModelFacts) -> str:
    """Return the remark, for the plan, that a family declares no inventory.

    Raises:
        FactsError: the model has no tensor headers either.
    """
    what = f"the model family {family.name!r} ({family.origin}) declares no tensors"
    if not facts.tensors:
        raise FactsError(
            f"{what}, and {facts.path} holds no weights, so their bytes are not known",
            "a folder with weights, or a version of the plugin that declares ModelOffers.inventory",
        )
    return f"{what}: bytes come from the tensor headers, and activations are estimated"


def stored_format(method: str, schemes: Iterable[Registration]) -> StoredFormat | None:
    """Return the format of a checkpoint's quantised weights; None if no scheme declares it.

    The first scheme that reads ``method`` and declares a format counts. A checkpoint that states no
    method may hold tensors of any format: their names and dtypes decide.

    Args:
        method: value of ``quant_method``; "none" for a checkpoint that states none.
        schemes: registered quantization schemes.
    """
    offered = [found.component.offers for found in schemes]
    formats = [offers for offers in offered if isinstance(offers, QuantizationOffers)]
    if method == "none":
        fixed = [offers.leaves for offers in formats if not callable(offers.leaves)]
        return StoredFormat(tuple(leaf for leaves in fixed for leaf in leaves))
    for offers in formats:
        if method in offers.reads and (offers.stored is not None or offers.leaves):
            return StoredFormat(offers.leaves, offers.stored)
    return None

"""Components: the entries that plugins register in slots. Plan zone: no torch.

A plugin's top module declares a component (name, options, offers, requirements and a pure check)
and gives the dotted path of its runtime class (``factory``). The runtime module is imported only
in the ranks of a plan that chose the component, so the top module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.decided import Decided
from glowplug.core.plugin.offers import Offers
from glowplug.core.plugin.slots import SLOT_OF_OFFERS

#: version of the hooks and protocols; ``plan/checks/contracts.py`` lists the changes by slot
CONTRACT = 2
#: ``json_schema_extra`` of an option that changes no answer, see :meth:`Options.marked`
OPERATIONAL: dict[str, Any] = {"operational": True}


class Options(BaseModel):
    """Base of the options of every component. Instances are frozen; an unknown key is an error.

    A subclass narrows ``use`` to ``Literal["component_name"]`` and adds its own fields, each with a
    description. Descriptions are shown in ``--help``, ``glowplug schema`` and docs/options.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    use: str

    @classmethod
    def marked(cls, mark: str) -> dict[str, Any]:
        """Return the fields whose ``json_schema_extra`` has ``mark``, each with the mark's value.

        Fields whose mark has a false value are left out.

        Args:
            mark: "provider", whose value names the GEMM that the field chooses a library for
                (such as "experts"), or "operational", which is True for a field that changes how
                the engine runs and changes no answer.
        """
        extras = ((name, info.json_schema_extra) for name, info in cls.model_fields.items())
        return {
            name: extra[mark]
            for name, extra in extras
            if isinstance(extra, dict) and extra.get(mark)
        }

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the fields that change nothing in this plan, each with its reason (one clause).

        The method is called once, after the plan was accepted and every component and size is
        decided. The result may include fields that the operator did not set, or left to the
        plan (None, "auto"): these are not reported. An override extends the result of its base
        class.
        """
        return {}

    @classmethod
    def provider_fields(cls) -> dict[str, Any]:
        """Return the fields that choose a library for a GEMM, each with the name of that GEMM.

        These are the fields marked with ``json_schema_extra={"provider": ...}``.
        """
        return cls.marked("provider")


OffersT = TypeVar("OffersT", bound=Offers)
OffersT_co = TypeVar("OffersT_co", bound=Offers, covariant=True)
OptionsT_co = TypeVar("OptionsT_co", bound=Options, covariant=True)


@dataclass(frozen=True)
class Package:
    """A required distribution, for example ``Package("flashinfer-python", ">=0.6.11")``.

    Attributes:
        name: normalised name of the distribution.
        spec: version specifier (PEP 440); "" accepts every version.
    """

    name: str
    spec: str = ""


@dataclass(frozen=True)
class ChosenOf(Generic[OffersT_co, OptionsT_co]):
    """A component chosen for a slot of a proposal: its name, parsed options and offers.

    Offers and options are instances of the slot's classes: ``plugin/loading.py`` refuses plugins
    whose components use other classes.
    """

    name: str
    options: OptionsT_co
    offers: OffersT_co


#: a component chosen for any slot
Chosen = ChosenOf[Offers, Options]


@dataclass(frozen=True)
class CheckContext:
    """The data that a component's ``check`` may read.

    Attributes:
        options: the component's own parsed options.
        config: the operator's whole configuration (``config.schema.EngineConfig``), read-only.
        facts: model, hardware and software facts.
        chosen: the components chosen so far, by slot name; ``of`` returns those of one slot with
            their types. Compare their offers, never their names.
        values: decided values, for example ``values.dtype``.
    """

    options: Any
    config: Any
    facts: Facts
    chosen: Mapping[str, tuple[Chosen, ...]]
    values: Decided

    def of(self, offers: type[OffersT]) -> tuple[ChosenOf[OffersT, Options], ...]:
        """Return the components chosen so far for the slot whose offers are of this class."""
        chosen: tuple[Any, ...] = self.chosen.get(SLOT_OF_OFFERS[offers.__name__], ())
        return chosen


#: pure function that yields the refusals of a component
Check = Callable[[CheckContext], Iterable[Refusal]]


@dataclass(frozen=True)
class Component:
    """One entry of a slot.

    Attributes:
        name: value of ``use`` that selects the component; unique within the slot.
        options: pydantic model of its options, a subclass of the slot's base in
            ``plugin/options.py``.
        factory: ``"package.module:Class"``, called as ``factory(options, plan, worker)`` in every
            rank.
        offers: its capabilities, an instance of the slot's class in ``plugin/offers.py``.
        requires: packages it needs. If one is missing, the component is refused with that reason.
        uses: value of an option marked "provider" -> names of distributions. When the value is
            used on a CUDA device, at least one of these must be installed. With "auto" the
            component works without the missing ones.
        check: pure function that yields refusals of combinations that offers cannot express.
        contract: version of the protocols it was written for. A component of an installed
            distribution that states none was written for version 1; all others have the present
            one.
        summary: one line for ``glowplug plugins`` and the docs.
    """

    name: str
    options: type[Options]
    factory: str
    offers: Offers = field(default_factory=Offers)
    requires: tuple[Package, ...] = ()
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Check | None = None
    contract: int | None = None
    summary: str = ""


@dataclass(frozen=True)
class Tuner:
    """A command ``glowplug tune NAME`` that a plugin provides.

    Attributes:
        name: NAME on the command line.
        factory: ``"package.module:Class"`` of a ``TableTuner``, called as ``factory(plan)``.
        summary: one line for ``--help``.
        device: device type that the tuner measures on ("cuda"); "" for any.
    """

    name: str
    factory: str
    summary: str = ""
    device: str = ""


@dataclass(frozen=True)
class CommandFlag:
    """A flag of the commands that plan an engine, such as ``glowplug serve``.

    Attributes:
        name: the flag, such as "--deadline-lead".
        path: dotted field of the configuration that it sets, such as "policy.lead".
        summary: one line for messages and the docs.
        convert: conversion of the text on the command line; None for a switch, which sets True.
    """

    name: str
    path: str
    summary: str = ""
    convert: Callable[[str], Any] | None = str

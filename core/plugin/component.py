"""A component: what a plugin registers in a slot. Plan zone: imports without torch.

A plugin's top module states *what* exists (name, options, offers, requirements, a pure check) and
*where* the runtime lives (a dotted ``factory``), which is imported only when the plan has chosen
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import Facts
from glowplug.core.plugin.offers import Offers

CONTRACT = (
    1  #: version of the protocols in ``core/protocols``; a component built for another is refused
)
OPERATIONAL: dict[str, Any] = {
    "operational": True
}  #: mark of an option, see :meth:`Options.marked`


class Options(BaseModel):
    """Base of every plugin's options. Frozen; an unknown key is an error.

    A subclass narrows ``use`` to ``Literal["its_name"]`` and adds its fields, each with a
    description.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    use: str

    @classmethod
    def marked(cls, mark: str) -> dict[str, Any]:
        """Return what ``json_schema_extra={mark: ...}`` says, by field.

        Marks: "provider" names the product that a field chooses a library for; "operational": True
        says that a field changes how the engine runs and no answer.
        """
        extras = ((name, info.json_schema_extra) for name, info in cls.model_fields.items())
        return {
            name: extra[mark]
            for name, extra in extras
            if isinstance(extra, dict) and extra.get(mark)
        }

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        """Return the fields that change nothing in this plan, each with the reason, one clause.

        Called once a plan is accepted, with everything chosen and sized. Fields that were not
        given, and those left to the plan (None, "auto"), may be among them and are not reported. An
        override adds to what its base returns.
        """
        return {}

    @classmethod
    def provider_fields(cls) -> dict[str, Any]:
        """What ``json_schema_extra={"provider": ...}`` says, by field: those that name who does a
        product.
        """
        return cls.marked("provider")


@dataclass(frozen=True)
class Package:
    """A requirement on an installed distribution, e.g. ``Package("flashinfer-python",
    ">=0.6.11")``.
    """

    name: str
    spec: str = ""


@dataclass(frozen=True)
class Chosen:
    """A component as chosen in a plan under construction: its name, parsed options and offers."""

    name: str
    options: Options
    offers: Offers


@dataclass(frozen=True)
class CheckContext:
    """All that a component's ``check`` may look at. Pure data.

    Attributes:
        options: this component's own parsed options.
        config: the operator's whole configuration (``config.schema.EngineConfig``), read-only.
        facts: model, hardware and software facts.
        chosen: what every slot holds (lists for slots that hold several); ask offers, never names.
        values: decided values by dotted field, e.g. ``values["dtype"] == "float32"``.
    """

    options: Any
    config: Any
    facts: Facts
    chosen: Mapping[str, tuple[Chosen, ...]]
    values: Mapping[str, Any]


Check = Callable[[CheckContext], Iterable[Refusal]]


@dataclass(frozen=True)
class Component:
    """One entry of a slot.

    Attributes:
        name: what the operator writes after ``use =``. Unique within the slot.
        options: pydantic model of its options (subclass of :class:`Options`).
        factory: ``"package.module:Class"``; called as ``factory(options, plan, worker)`` in every
            rank.
        offers: what it can do.
        requires: packages it needs; one that is missing makes it unavailable, with the reason.
        uses: by what an option marked as a provider may say, the packages any one of which has to
            be there for it on a CUDA device. Left to "auto", a component does without those that
            are missing.
        check: pure function yielding refusals for combinations the offers cannot express.
        contract: version of the protocols it was written for.
        summary: one line for ``glowplug plugins`` and the docs.
    """

    name: str
    options: type[Options]
    factory: str
    offers: Offers = field(default_factory=Offers)
    requires: tuple[Package, ...] = ()
    uses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Check | None = None
    contract: int = CONTRACT
    summary: str = ""


@dataclass(frozen=True)
class Tuner:
    """A command ``glowplug tune NAME`` that a plugin provides.

    Attributes:
        name: NAME on the command line.
        factory: ``"package.module:Class"`` of a ``TableTuner``; called as ``factory(plan)``.
        summary: one line for ``--help``.
        device: type of device the tuner measures on ("cuda"); "": any.
    """

    name: str
    factory: str
    summary: str = ""
    device: str = ""

"""Typed attributes of a proposal: the components chosen for a slot. Plan zone: no torch.

Each attribute has the name of its slot. Offers and options are instances of the slot's classes,
because a plugin whose components have others is refused when it is loaded (``plugin/loading.py``).
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from glowplug.core.plugin.component import Chosen, ChosenOf, Options
from glowplug.core.plugin.offers import Offers

OffersT = TypeVar("OffersT", bound=Offers)
OptionsT = TypeVar("OptionsT", bound=Options)


class HoldsChosen(Protocol):
    """An object with the chosen components by slot."""

    chosen: dict[str, tuple[Chosen, ...]]


class SlotAttribute(Generic[OffersT, OptionsT]):
    """A descriptor that returns the components chosen for a slot.

    The attribute has the name of the slot.

    Attributes:
        slot: name of the slot.
        offers: class of the slot's offers.
        options: base class of the slot's options.
    """

    def __init__(self, offers: type[OffersT], options: type[OptionsT]) -> None:
        self.offers = offers
        self.options = options
        self.slot = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = name

    def __set__(self, holder: HoldsChosen, value: object) -> None:
        raise AttributeError(f"{self.slot} is read-only: components are put into chosen")


class FirstOf(SlotAttribute[OffersT, OptionsT]):
    """A slot attribute whose value is the first component chosen for the slot, or None."""

    def __get__(
        self, holder: HoldsChosen, owner: type | None = None
    ) -> ChosenOf[OffersT, OptionsT] | None:
        held: tuple[Any, ...] = holder.chosen[self.slot]
        return held[0] if held else None


class AllOf(SlotAttribute[OffersT, OptionsT]):
    """A slot attribute whose value is all components chosen for a slot that may hold several."""

    def __get__(
        self, holder: HoldsChosen, owner: type | None = None
    ) -> tuple[ChosenOf[OffersT, OptionsT], ...]:
        held: tuple[Any, ...] = holder.chosen[self.slot]
        return held

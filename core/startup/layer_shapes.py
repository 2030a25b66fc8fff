"""Shapes of the linear and expert layers of a plan's model, for tuning; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from glowplug.core.plugin.offers import QuantizationOffers
from glowplug.core.protocols.tuning import LayerShapes
from glowplug.core.startup.components import build_component
from glowplug.core.startup.lone_rank import lone_context

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.core.plugin.registry import PluginSet
    from glowplug.core.protocols import ExpertsShape, LinearShape, QuantizationScheme


def layer_shapes(plan: EnginePlan, plugins: PluginSet) -> LayerShapes:
    """Return the layer shapes that the plan's model requests from its quantization schemes.

    The model is built once for each rank, with schemes that record each request and make no
    weights. No rank is started.
    """
    plain, chosen = _RecordedShapes(), _RecordedShapes()
    for rank in range(plan.ranks):
        _record(plan, plugins, rank, plain, chosen)
    offers = plugins.offers("quantization", plan.choice("quantization").name)
    quantizes = isinstance(offers, QuantizationOffers) and "none" not in offers.reads
    linears = _distinct(
        chain(plain.linears, chosen.linears),
        lambda shape: (shape.outputs, shape.inputs, shape.name in chosen.names),
    )
    experts = _distinct(
        chain(plain.grouped, chosen.grouped),
        lambda shape: (shape.count, shape.hidden, shape.inter, shape.fused_shared),
    )
    return LayerShapes(
        linears=tuple(linears),
        experts=tuple(experts),
        quantized=frozenset(chosen.names) if quantizes else frozenset(),
        topk=plan.facts.model.sizes.experts_per_token,
    )


def _record(
    plan: EnginePlan,
    plugins: PluginSet,
    rank: int,
    plain: _RecordedShapes,
    chosen: _RecordedShapes,
) -> None:
    """Build the model of ``rank`` and add the shapes that it requests.

    Args:
        plain: receives the shapes of the unquantized scheme.
        chosen: receives the shapes of the plan's scheme.
    """
    context = lone_context(plan, plugins, rank)
    family = build_component(plugins, plan.choice("model"), plan, context.worker)
    schemes: tuple[Any, Any] = (
        _RecordingScheme(context.plain, plain),
        _RecordingScheme(context.scheme, chosen),
    )
    family.build(replace(context, plain=schemes[0], scheme=schemes[1]))


def _distinct(shapes: Iterable[Any], key: Callable[[Any], object]) -> list[Any]:
    """Return the first of ``shapes`` for each distinct value of ``key``, in order."""
    found: dict[object, Any] = {}
    for shape in shapes:
        found.setdefault(key(shape), shape)
    return list(found.values())


class _RecordedShapes:
    """The shapes that were requested from one scheme, in order.

    Attributes:
        linears: shapes of linear layers.
        grouped: shapes of routed experts.
    """

    def __init__(self) -> None:
        self.linears: list[LinearShape] = []
        self.grouped: list[ExpertsShape] = []

    @property
    def names(self) -> set[str]:
        """Names of the recorded layers: module paths of linear layers, prefixes of experts."""
        return {shape.name for shape in self.linears} | {shape.prefix for shape in self.grouped}


class _RecordingScheme:
    """A scheme that records the shapes requested from it and makes no weights."""

    def __init__(self, scheme: QuantizationScheme, shapes: _RecordedShapes) -> None:
        self._scheme = scheme
        self._shapes = shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def linear(self, shape: LinearShape) -> _EmptyMethod:
        """Record ``shape`` and return a method without weights."""
        self._shapes.linears.append(shape)
        return _EmptyMethod()

    def experts(self, shape: ExpertsShape) -> _EmptyMethod:
        """Record ``shape`` and return a method without weights."""
        self._shapes.grouped.append(shape)
        return _EmptyMethod()


class _EmptyMethod:
    """A linear or experts method without weights."""

    input_format = "plain"

    def targets(self) -> Iterator[Any]:
        return iter(())

    def finalize(self) -> None:
        return

    def apply(self, *args: Any) -> Any:
        raise AssertionError("this model has no weights")

"""What plugins that tune kernels provide, and which products a plan's model asks for. Plan zone: no
torch.

A plugin names its tuners by the hook ``tuners``; ``glowplug tune NAME`` runs one. Tables lie where
the plugin's own runtime looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from glowplug.core.plugin.offers import QuantizationOffers

if TYPE_CHECKING:
    from glowplug.core.plan.plan import EnginePlan
    from glowplug.core.plugin.registry import PluginSet
    from glowplug.core.protocols import ExpertsShape, LinearShape, QuantizationScheme

Log = Callable[[str], None]


@dataclass(frozen=True)
class Tuner:
    """Attributes:
    name: after ``glowplug tune``.
    factory: ``"package.module:Class"`` of a ``TableTuner``; called as ``factory(plan)``.
    summary: one line for ``--help``.
    device: type of device that it measures on ("cuda"); "": any.
    """

    name: str
    factory: str
    summary: str = ""
    device: str = ""


@dataclass(frozen=True)
class LayerShapes:
    """The different products of a model on one rank. ``quantized``: names (experts: prefixes) of
    those whose weights the scheme keeps in another form than the compute dtype.

    ``topk``: experts that a token picks, those that ride along not counted.
    """

    linears: tuple[LinearShape, ...]
    experts: tuple[ExpertsShape, ...]
    quantized: frozenset[str]
    topk: int


@dataclass(frozen=True)
class TuneTable:
    """One file of measurements: ``rows`` are the numbers of tokens wanted, ``done`` those that it
    holds.
    """

    label: str
    path: Path
    rows: tuple[int, ...]
    done: tuple[int, ...]
    problem: Any = None  #: the tuner's own

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(row for row in self.rows if row not in self.done)


class TableTuner(Protocol):
    """Measures on the device it runs on. Both methods may be called again at any time: what is done
    stays done.
    """

    def tables(self, shapes: LayerShapes, rows: tuple[int, ...]) -> list[TuneTable]:
        """Every table that these products want. ``rows``: numbers of tokens; (): the tuner's own."""
        ...

    def tune(self, table: TuneTable, seconds: float, log: Log) -> None:
        """Measure the missing rows and write each as soon as it is known; stop after ``seconds``."""
        ...


def layer_shapes(plan: EnginePlan, plugins: PluginSet) -> LayerShapes:
    """What the plan's model asks of its quantization schemes, found by building it with none of
    their weights.
    """
    from glowplug.core.startup.build_rank import build_context, make_worker

    worker = make_worker(plan, 0)
    context = build_context(plan, plugins, worker)
    plain = _Asked(context.plain)
    scheme = _Asked(context.scheme)
    family = plugins.build(plan.choice("model"), plan, worker)
    asked: Any = plain
    chosen: Any = scheme
    family.build(replace(context, scheme=chosen, plain=asked))
    both = (plain, scheme)
    registered = plugins.find("quantization", plan.choice("quantization").name)
    offers = registered.component.offers if registered is not None else None
    quantizes = isinstance(offers, QuantizationOffers) and "none" not in offers.reads
    return LayerShapes(
        linears=tuple(
            _different(
                (shape for one in both for shape in one.linears),
                lambda shape: (shape.outputs, shape.inputs, shape.name in scheme.names),
            )
        ),
        experts=tuple(
            _different(
                (shape for one in both for shape in one.grouped),
                lambda shape: (shape.count, shape.hidden, shape.inter, shape.shared),
            )
        ),
        quantized=frozenset(scheme.names) if quantizes else frozenset(),
        topk=int(plan.facts.model.config.get("num_experts_per_tok") or 0),
    )


def _different(shapes: Iterator[Any], key: Callable[[Any], object]) -> list[Any]:
    """The first of each kind."""
    found: dict[object, Any] = {}
    for shape in shapes:
        found.setdefault(key(shape), shape)
    return list(found.values())


class _Asked:
    """A scheme that writes down what it is asked for and makes nothing."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self._scheme = scheme
        self.linears: list[LinearShape] = []
        self.grouped: list[ExpertsShape] = []

    @property
    def names(self) -> set[str]:
        return {shape.name for shape in self.linears} | {shape.prefix for shape in self.grouped}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def linear(self, shape: LinearShape) -> _Nothing:
        self.linears.append(shape)
        return _Nothing()

    def experts(self, shape: ExpertsShape) -> _Nothing:
        self.grouped.append(shape)
        return _Nothing()


class _Nothing:
    """A method without weights."""

    input_format = "plain"

    def targets(self) -> Iterator[Any]:
        return iter(())

    def finalize(self) -> None:
        return

    def apply(self, *args: Any) -> Any:
        raise AssertionError("this model has no weights")

"""Output parsers whose failures name their component, so that only the request ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glowplug.core.errors import ComponentFailed, RequestError
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.loading import BUILT_IN, component_failure, describe
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import OutputParserFactory, Piece, Worker
from glowplug.core.startup.components import build_component


def build_parsers(plan: EnginePlan, plugins: PluginSet) -> list[OutputParserFactory]:
    """Return the plan's output parsers, in order.

    An exception of a third party's parser becomes a RequestError that names the component.

    Raises:
        PluginLoadError: a parser cannot be built.
    """
    choices = plan.choices_in("outputs")
    made = [(choice, build_component(plugins, choice, plan, Worker())) for choice in choices]
    return [
        parser if choice.distribution == BUILT_IN else _NamedFactory(parser, choice)
        for choice, parser in made
    ]


class _Named:
    """An object of a component; ``call`` names the component in the errors of its methods."""

    def __init__(self, inner: Any, choice: Choice) -> None:
        self._inner = inner
        self._choice = choice

    def call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except RequestError:
            raise
        except Exception as error:
            raise self.failure(method.__name__, describe(error)) from error

    def failure(self, method: str, reason: str) -> ComponentFailed:
        """Return the error for a fault of ``method``."""
        one = self._choice
        phase = f"serve, in {method}"
        text = component_failure(one.slot, one.name, one.distribution, one.version, phase, reason)
        return ComponentFailed(text)


class _NamedFactory(_Named):
    """A third party's ``OutputParserFactory``, with all its optional methods."""

    def start(self, *given: Any, **named: Any) -> _NamedParser:
        return _NamedParser(self.call(self._inner.start, *given, **named), self._choice)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _NamedParser(_Named):
    """A third party's ``OutputParser``."""

    def feed(self, text: str) -> list[Piece]:
        return self._checked("feed", self.call(self._inner.feed, text))

    def finish(self) -> list[Piece]:
        return self._checked("finish", self.call(self._inner.finish))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _checked(self, method: str, pieces: Any) -> list[Piece]:
        """Return ``pieces`` if they are a list of Piece.

        Raises:
            RequestError: they are not.
        """
        if not isinstance(pieces, list) or not all(isinstance(one, Piece) for one in pieces):
            raise self.failure(method, f"it returned {pieces!r:.80}, not a list of Piece")
        return pieces

"""Planted faults: correct components with one change each, and the suite's test that catches it.

A :class:`Mutant` names the test, so that one run of it proves the mutant caught. The same test
passes with the correct component.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutant:
    """A correct component with a planted fault.

    Attributes:
        slot: slot of the component.
        fault: the fault, in a few words.
        by: name of the suite's test that catches it.
        correct: the suite on the correct component.
        planted: the suite on the faulty component.
    """

    slot: str
    fault: str
    by: str
    correct: type
    planted: type = field(repr=False)


@dataclass(frozen=True)
class Planter:
    """A maker of mutants of one component.

    Attributes:
        slot: slot of the component.
        correct: the suite on the correct component.
        factory: name of the suite's method that returns the component.
    """

    slot: str
    correct: type
    factory: str = "make"

    def change(self, fault: str, by: str, change: Callable[[Any], Any]) -> Mutant:
        """Return the mutant whose component is changed by ``change``, in place or by its result."""
        make = getattr(self.correct, self.factory)

        def planted(suite: Any, *given: Any, **named: Any) -> Any:
            made = make(suite, *given, **named)
            changed = change(made)
            return made if changed is None else changed

        kind = type("Planted", (self.correct,), {self.factory: planted})
        return Mutant(self.slot, fault, by, self.correct, kind)

    def swap(self, fault: str, by: str, method: str, body: Callable[..., Any]) -> Mutant:
        """Return the mutant whose ``method`` is ``body``, called with the correct method first."""

        def change(made: Any) -> None:
            correct = getattr(made, method)
            setattr(made, method, lambda *given, **named: body(correct, *given, **named))

        return self.change(fault, by, change)

    def returning(self, fault: str, by: str, factory: Callable[..., Any]) -> Mutant:
        """Return the mutant whose component ``factory`` makes, called as the suite's method."""

        def planted(suite: Any, *given: Any, **named: Any) -> Any:
            return factory(*given, **named)

        kind = type("Planted", (self.correct,), {self.factory: planted})
        return Mutant(self.slot, fault, by, self.correct, kind)


def run(suite: type, test: str) -> None:
    """Run a test of a suite with all its parameters, on fresh fixtures.

    Raises:
        BaseException: the exception of the first case that fails or is skipped.
    """
    for values in _parameters(getattr(suite, test)):
        with tempfile.TemporaryDirectory() as folder:
            one = suite()
            arguments = _arguments(one, getattr(suite, test), values, Path(folder))
            getattr(one, test)(**arguments)


def caught(mutant: Mutant) -> bool:
    """Return whether the mutant's test fails; a test that is skipped catches nothing."""
    return failure(mutant) is not None


def failure(mutant: Mutant) -> BaseException | None:
    """Return the exception with which the mutant's test fails; None if it passes or is skipped."""
    try:
        run(mutant.planted, mutant.by)
    except (Exception, pytest.fail.Exception) as error:
        return error
    except pytest.skip.Exception:
        return None
    return None


def _parameters(test: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case of a parametrised test."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            axes.append(
                [dict(zip(names, one if len(names) > 1 else [one], strict=True)) for one in values]
            )
    for case in itertools.product(*axes):
        yield {name: value for part in case for name, value in part.items()}


def _arguments(suite: Any, test: Any, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of ``test``: the case's values, and the suite's fixtures."""
    found = {"tmp_path": folder, **values}
    for name in list(inspect.signature(test).parameters)[1:]:
        if name not in found:
            fixture = getattr(type(suite), name)
            wrapped = fixture._get_wrapped_function()
            found[name] = wrapped(suite)
    return {name: found[name] for name in list(inspect.signature(test).parameters)[1:]}

"""Triton's interpreter without its repeated search for the functions that it replaces.

For each launch, and for each call of one kernel function by another, the interpreter lists all
members of ``triton.language`` to find its built-in functions. That is a third of the time of small
kernels. Here the functions are listed once.
"""

from __future__ import annotations

import inspect
from typing import Any


def install() -> None:
    """Let the interpreter list the built-in functions once a process."""
    from triton.language import core
    from triton.runtime import interpreter

    found: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [
                (name, member)
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member in found[package]:
            if getattr(package, name) is member:  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin

"""Where products of other libraries are found, and what is said of one that cannot be had."""

from __future__ import annotations

import importlib
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.kernels.launch.cards import unfit_for_libraries


def library(
    option: str, wanted: str, module: str, names: tuple[str, ...], own: bool = False
) -> Any:
    """The first of ``names`` that ``module`` has. ``own``: it runs on every card that this
    project's kernels do.

    Raises GlowplugError naming the ``option`` that is ``wanted``, because of what the library
    raised, if it did.
    """
    asked = f'quantization.{option} = "{wanted}"'
    unfit = "" if own else unfit_for_libraries()
    if unfit:
        raise GlowplugError(f"{asked} is {unfit}; leave it out")
    try:
        found = importlib.import_module(module)
        function = next(
            (call for name in names if (call := getattr(found, name, None)) is not None), None
        )
        if function is None:
            raise AttributeError(f"this build has no {names[0]}")
    except (
        Exception
    ) as error:  # NOTE: on a machine without its card a library raises anything, not ImportError.
        raise GlowplugError(
            f"{asked} cannot be used: {module}: {error}; leave it out, or install the library"
        ) from error
    return function

"""Import of GEMM functions from other libraries, with errors that name the option."""

from __future__ import annotations

import importlib
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.kernels.launch.cards import unfit_for_libraries


def library(
    option: str, wanted: str, module: str, names: tuple[str, ...], own: bool = False
) -> Any:
    """Return the first function of ``names`` that ``module`` has.

    Args:
        option: field of ``quantization`` that names the library.
        wanted: its value.
        module: module to import.
        names: names of the function in different builds of the library, in order of preference.
        own: True if the function runs on every GPU that this project's kernels support.

    Raises:
        GlowplugError: the GPU is not supported, the import fails, or ``module`` has none of the
            functions. If the library raised an exception, that is the cause of this one.
    """
    setting = f'quantization.{option} = "{wanted}"'
    unfit = "" if own else unfit_for_libraries()
    if unfit:
        raise GlowplugError(f"{setting} is {unfit}; leave it out")
    try:
        found = importlib.import_module(module)
        function = next(
            (call for name in names if (call := getattr(found, name, None)) is not None), None
        )
        if function is None:
            raise AttributeError(f"this build has no {names[0]}")
    # NOTE: on a machine without its GPU a library may raise any exception, not only ImportError.
    except Exception as error:
        raise GlowplugError(
            f"{setting} cannot be used: {module}: {error}; leave it out, or install the library"
        ) from error
    return function

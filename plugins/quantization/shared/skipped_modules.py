"""Modules that a quantised checkpoint leaves unquantised, from config.json. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: last names of modules that published checkpoints leave unquantised without listing them
UNLISTED = frozenset({"lm_head", "head", "gate", "embed_tokens", "eh_proj"})
#: keys of ``quantization_config`` that list unquantised modules
KEYS = ("ignore", "ignored_layers", "modules_to_not_convert")
EXPRESSION = "re:"  #: prefix of compressed-tensors entries that are regular expressions


def listed(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names and expressions of the modules that a config leaves unquantised.

    ``stated``: the checkpoint's ``quantization_config``.
    """
    return tuple(str(entry) for key in KEYS for entry in stated.get(key) or ())


def left_alone(module: str, entries: tuple[str, ...], parts: bool = False) -> bool:
    """Return True if the checkpoint leaves ``module`` unquantised.

    A module with a last name in ``UNLISTED`` always is, even if no entry applies to it.

    Args:
        module: full name of the module.
        entries: module names and regular expressions. A name applies to the module and all modules
            inside it; an expression applies if it matches the beginning of the name.
        parts: True if an entry may also be any substring of the name.
    """
    return module.rpartition(".")[2] in UNLISTED or any(
        _names(entry, module, parts) for entry in entries
    )


def _names(entry: str, module: str, parts: bool) -> bool:
    """Return True if ``entry``, a listed name or expression, matches the name ``module``.

    ``parts``: True if the entry may also be any substring of the name.
    """
    if entry.startswith(EXPRESSION):
        return re.match(entry.removeprefix(EXPRESSION), module) is not None
    return module == entry or module.startswith(f"{entry}.") or (parts and entry in module)

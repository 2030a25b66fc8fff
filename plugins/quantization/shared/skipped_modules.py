"""Which modules a quantised checkpoint leaves alone, by what config.json lists. Plan zone: no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: last names of modules that published quantised checkpoints leave alone without saying so
UNSAID = frozenset({"lm_head", "head", "gate", "embed_tokens", "eh_proj"})
KEYS = ("ignore", "ignored_layers", "modules_to_not_convert")
EXPRESSION = "re:"  #: how entries of compressed-tensors begin that are regular expressions


def listed(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """The names and expressions that a ``quantization_config`` lists."""
    return tuple(str(entry) for key in KEYS for entry in stated.get(key) or ())


def left_alone(module: str, entries: tuple[str, ...], parts: bool = False) -> bool:
    """Is ``module`` left alone? An entry is its name, one of a module above it, or an expression
    its name begins with.

    ``parts``: an entry may be any part of a name.
    """
    return module.rpartition(".")[2] in UNSAID or any(
        _names(entry, module, parts) for entry in entries
    )


def _names(entry: str, module: str, parts: bool) -> bool:
    if entry.startswith(EXPRESSION):
        return re.match(entry.removeprefix(EXPRESSION), module) is not None
    return module == entry or module.startswith(f"{entry}.") or (parts and entry in module)

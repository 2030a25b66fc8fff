"""With which tiles routed experts of narrow weights (int8, int4) are multiplied: a table's, or the
kernel's rule.

A configuration has "up" and "down", one a product, with the same "dense": every expert gets a tile
of all tokens, without an alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.tuned_tables import Config

DENSE = 16  #: tokens that fit into one tile
Rule = Callable[[int, int, int], Mapping[str, Config]]  #: of tokens, experts a token, experts


@lru_cache(maxsize=1024)
def config_for(
    dtype: str, rule: Rule, tokens: int, per_token: int, experts: int, inter: int, hidden: int
) -> Mapping[str, Config]:
    """A table's configuration for the nearest number of tokens; without one the rule's."""
    name = tuned.file_name(f"E={experts},N={inter},H={hidden}", dtype)
    return measured_for(name, tokens) or rule(tokens, per_token, experts)


def measured_for(name: str, tokens: int) -> Mapping[str, Config] | None:
    """As ``tuned.measured_for``. Dense tiles that do not hold all tokens are passed over: they were
    measured where they did."""
    fitting = {
        number: config
        for number, config in (tuned.table(name) or {}).items()
        if not config["up"]["dense"] or config["up"]["block_m"] >= tokens
    }
    return tuned.nearest(fitting, tokens) if fitting and tokens <= 2 * max(fitting) else None

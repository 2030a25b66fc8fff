"""Tile configurations of routed experts with int8 or int4 weights, from a tuned table or a rule.

A configuration has the keys "up" and "down", one for each GEMM. Both have the same value of
the key "dense": if true, every expert gets a tile of all tokens, without an alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from glowplug.kernels.launch import tuned_tables
from glowplug.kernels.launch.tuned_tables import Config

DENSE_TOKENS_MAX = 16  #: tokens that fit into one "dense" tile
#: (tokens, experts per token, experts) -> configuration
ExpertsRule = Callable[[int, int, int], Mapping[str, Config]]


@lru_cache(maxsize=1024)
def narrow_experts_config(
    dtype: str,
    rule: ExpertsRule,
    tokens: int,
    per_token: int,
    experts: int,
    inter: int,
    hidden: int,
) -> Mapping[str, Config]:
    """Return the tuned configuration for the nearest number of tokens; if none fits, the rule's.

    Args:
        dtype: Dtype of the weights as file names spell it.
        rule: Returns the configuration for sizes without a tuned table.
        tokens: Tokens of a step.
        per_token: Columns of the ids.
        experts: Experts held.
        inter: Channels between the GEMMs.
        hidden: Channels of x.
    """
    name = tuned_tables.file_name(f"E={experts},N={inter},H={hidden}", dtype)
    return measured_for(name, tokens) or rule(tokens, per_token, experts)


def measured_for(name: str, tokens: int) -> Mapping[str, Config] | None:
    """Return both GEMMs' configurations for the nearest token count in table file ``name``.

    A configuration whose GEMMs are "dense" is skipped if a tile has fewer than ``tokens`` rows:
    dense tiles were measured only where one held all tokens of the step.

    Returns:
        {"up", "down"}; None if there is no table, if all its configurations are skipped, or if
            the largest token count of the others is less than half of ``tokens``
    """
    fitting = {
        number: config
        for number, config in (tuned_tables.table(name) or {}).items()
        if not config["up"]["dense"] or config["up"]["block_m"] >= tokens
    }
    return tuned_tables.near(fitting, tokens)

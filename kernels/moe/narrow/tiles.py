"""Tile configurations of routed experts with int8 or int4 weights, from a tuned table or a rule.

A configuration has the keys "up" and "down", one for each GEMM. Their "dense" is equal: if true,
every expert gets a tile of all tokens, without an alignment.
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
    """Return the table's configuration for the nearest token count; without a table the rule's.

    Args:
        dtype: Dtype of the weights as in file names.
        rule: Returns the configuration of an untuned problem.
        tokens: Tokens of a step.
        per_token: Columns of the ids.
        experts: Experts held.
        inter: Channels between the GEMMs.
        hidden: Channels of x.
    """
    name = tuned_tables.file_name(f"E={experts},N={inter},H={hidden}", dtype)
    return measured_for(name, tokens) or rule(tokens, per_token, experts)


def measured_for(name: str, tokens: int) -> Mapping[str, Config] | None:
    """Return the configuration for the nearest token count in the table in file ``name``.

    None is returned in the cases of ``tuned_tables.measured_for``.

    Configurations with dense tiles smaller than ``tokens`` are skipped: they were measured only
    where a tile held all tokens.
    """
    fitting = {
        number: config
        for number, config in (tuned_tables.table(name) or {}).items()
        if not config["up"]["dense"] or config["up"]["block_m"] >= tokens
    }
    return tuned_tables.nearest(fitting, tokens) if fitting and tokens <= 2 * max(fitting) else None

"""Configurations that the tuner of routed experts measures."""

from __future__ import annotations

from collections.abc import Iterator

from glowplug.kernels.launch.integers import next_power_of_2
from glowplug.kernels.launch.tuned_tables import Config
from glowplug.kernels.moe import gemm, gemm_hopper
from glowplug.kernels.moe.tiles import ExpertsProblem, fused_shared_has_own_tiles, tile

SHARED_MEMORY = 225_000  #: bytes of shared memory that a CTA may use on Hopper


def _fits(
    product: str, config: Config, problem: ExpertsProblem, tokens: int, width: int = 2
) -> bool:
    """Return whether the tiles, also those of fused shared experts, fit into shared memory.

    Tiles of more than 128 columns must also divide the columns evenly.

    Args:
        product: "up" or "down".
        config: Configuration of this GEMM.
        problem: The experts.
        tokens: Tokens of a step.
        width: Bytes of an element.
    """
    columns, products = (problem.inter, 2) if product == "up" else (problem.hidden, 1)
    tiles = [(config["block_m"], config["block_n"], config["block_k"])]
    if fused_shared_has_own_tiles(config, tokens):
        tiles.append(gemm.fused_shared_tile_sizes(tokens, product == "up", config))
    most = max((rows + products * each) * depth for rows, each, depth in tiles)
    divide = all(each <= 128 or columns % each == 0 for _, each, _ in tiles)
    return divide and config["stages"] * most * width <= SHARED_MEMORY


#: block_n, block_k, warps, stages, swap and tma of tiles for low loads
STREAMING_TILES = (
    (64, 128, 4, 3, 0, 0),
    (64, 128, 4, 4, 0, 0),
    (64, 64, 4, 5, 0, 0),
    (128, 64, 4, 4, 0, 0),
    (128, 128, 4, 2, 0, 0),
    (32, 128, 4, 4, 0, 0),
    (32, 256, 4, 3, 0, 0),
    (64, 128, 4, 3, 0, 1),
    (64, 128, 4, 4, 0, 1),
    (32, 128, 4, 5, 0, 1),
    (64, 128, 4, 2, 1, 1),
    (64, 128, 4, 3, 1, 1),
    (64, 128, 4, 4, 1, 1),
    (64, 64, 4, 5, 1, 1),
    (64, 256, 4, 3, 1, 1),
    (128, 64, 4, 4, 1, 1),
    (128, 128, 4, 3, 1, 1),
    (128, 128, 8, 3, 1, 1),
    (128, 64, 4, 3, 1, 0),
)
#: block_n, block_k, warps, stages, tma and wide of tiles with many columns: activations are loaded
#: for more columns at once, above all for the fused shared experts
WIDE_TILES = (
    (128, 64, 4, 3, 0, 128),
    (128, 128, 8, 3, 1, 128),
    (256, 64, 8, 3, 0, 128),
    (256, 64, 8, 3, 1, 128),
    (256, 64, 8, 4, 0, 128),
    (256, 64, 4, 3, 0, 64),
    (256, 64, 8, 3, 0, 256),
)


def _streaming() -> Iterator[Config]:
    """Yield configurations for low loads, which are limited by reading weights."""
    for way, block_m in (("dense", 16), ("dense", 32), ("sorted", 16), ("sorted", 32)):
        for block_n, block_k, warps, stages, swap, tma in STREAMING_TILES:
            yield tile(
                way, block_m, block_n, block_k, warps, stages, swap=bool(swap), tma=bool(tma)
            )
    # an expert's column blocks side by side: for V2-Lite's first GEMM with 192 to 384 tokens
    for block_m in (32, 64):
        yield tile("sorted", block_m, 128, 64, 4, 5, group=4, swap=True, tma=True)
    yield tile("sorted", 32, 64, 128, 4, 3, group=8, swap=True)
    for block_m in (16, 32):
        for block_n, block_k, warps, stages, tma, wide in WIDE_TILES:
            for group in (8, 64):
                yield tile(
                    "sorted",
                    block_m,
                    block_n,
                    block_k,
                    warps,
                    stages,
                    group=group,
                    swap=True,
                    tma=bool(tma),
                    wide=wide,
                )


def _computing() -> Iterator[Config]:
    """Yield configurations for high loads, which are limited by the tensor cores."""
    for block_m, block_n, block_k, warps, stages in (
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 64, 64, 8, 3),
        (256, 128, 64, 8, 3),
    ):
        for tma in (False, True):
            for group in (8, 32):
                yield tile("sorted", block_m, block_n, block_k, warps, stages, group=group, tma=tma)


def _hopper(problem: ExpertsProblem) -> Iterator[Config]:
    """Yield configurations of the Hopper kernel for high loads, if the sizes fit."""
    if (
        problem.dtype == "float32"
        or problem.hidden % gemm_hopper.DEPTH
        or problem.inter % gemm_hopper.DEPTH
    ):
        return
    for block_m, lead in ((128, 2), (192, 1)):
        for group in (4, 8):
            yield {
                "way": "hopper",
                "block_m": block_m,
                "group": group,
                "lead": lead,
                "apart": 1,
            }


def _vectors() -> Iterator[Config]:
    """Yield "gemv" configurations."""
    for block_n, block_k, warps in (
        (2, 512, 2),
        (2, 512, 4),
        (4, 256, 2),
        (4, 512, 2),
        (4, 512, 4),
        (8, 256, 4),
        (8, 512, 4),
        (1, 1024, 2),
        (2, 1024, 2),
        (2, 1024, 4),
        (4, 1024, 4),
        (1, 2048, 4),
        (2, 2048, 4),
        (16, 256, 4),
    ):
        yield {"way": "gemv", "block_n": block_n, "block_k": block_k, "warps": warps}


def _suits_load(config: Config, tokens: int, load: float) -> bool:
    """Return whether a configuration for low loads may be the fastest for ``tokens`` tokens.

    ``load``: mean number of rows of an expert.
    """
    if config["way"] == "dense":
        return bool(config["block_m"] == max(16, next_power_of_2(tokens)))
    return tokens > 8 and bool(config["block_m"] <= 4 * load + 16)


def candidates(
    product: str, problem: ExpertsProblem, tokens: int, hopper: bool = False
) -> list[Config]:
    """Return the configurations of one GEMM to measure for ``tokens`` tokens.

    Args:
        product: "up" or "down".
        problem: The experts.
        tokens: Tokens of a step.
        hopper: Include the Hopper kernel's configurations even if this GPU is not a Hopper.
    """
    load = problem.load(tokens)
    found: list[Config] = [*_vectors()] if tokens <= 4 else []
    if load <= 64:
        found += [c for c in _streaming() if _suits_load(c, tokens, load)]
    found = [c for c in found if "wide" not in c or fused_shared_has_own_tiles(c, tokens)]
    if load >= 6:
        found += [c for c in _computing() if c["block_m"] <= max(64, 4 * load)]
    found = [c for c in found if c["way"] == "gemv" or _fits(product, c, problem, tokens)]
    return (
        [*found, *_hopper(problem)]
        if load >= 48 and (hopper or gemm_hopper.card_is_hopper())
        else found
    )

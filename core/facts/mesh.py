"""Arithmetic of the device mesh: where a rank stands on each named axis, and who shares an axis
with it. No torch.

Ranks are numbered with "tp" fastest, then "pp". "dp" and "ep" lie over the tp ranks: an axis of
size s cuts them into s blocks of neighbours, so that with ``{"tp": 8, "dp": 4}`` ranks 0 and 1 are
dp group 0. What is left of tp in a block
is an axis of its own: "attn_tp" (tp / dp) splits the heads of one group's attention, "moe_tp" (tp /
ep) the width of one block's experts. A collective over an axis connects the ranks that differ in
that coordinate only; for "dp" and "ep" those have the same "attn_tp" or "moe_tp".
"""

from __future__ import annotations

from collections.abc import Mapping

WITHIN = {"attn_tp": "dp", "moe_tp": "ep"}  #: what is left of tp inside the blocks of an axis
OVER_TP = ("dp", "ep")


def axis_size(axis: str, mesh: Mapping[str, int]) -> int:
    """Ranks along ``axis``; 1 for an axis the mesh does not have. ValueError when it does not
    divide the tp ranks.
    """
    if axis in WITHIN:
        tp = mesh.get("tp", 1)
        blocks = mesh.get(WITHIN[axis], 1)
        if tp % blocks:
            raise ValueError(f"axis {WITHIN[axis]} of {blocks} does not divide the {tp} tp ranks")
        return tp // blocks
    return mesh.get(axis, 1)


def divides(mesh: Mapping[str, int]) -> bool:
    """Do the axes over the tp ranks cut them into equal blocks?"""
    return all(mesh.get("tp", 1) % mesh.get(axis, 1) == 0 for axis in OVER_TP)


def coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Axis -> index of ``rank``, "attn_tp" and "moe_tp" included; {} for one rank without a mesh."""
    if not mesh:
        return {}
    within = rank % mesh.get("tp", 1)
    found = {"tp": rank % mesh.get("tp", 1), "pp": rank // mesh.get("tp", 1)}
    for inner, outer in WITHIN.items():
        size = axis_size(inner, mesh)
        found[outer], found[inner] = within // size, within % size
    return found


def group(axis: str, rank: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Ranks that a collective of ``rank`` over ``axis`` connects, in the axis's order."""
    tp = mesh.get("tp", 1)
    own = coordinates(rank, mesh)
    if axis_size(axis, mesh) == 1 or axis not in own:
        return (rank,)
    if axis == "pp":
        return tuple(range(rank % tp, tp * mesh["pp"], tp))
    first = rank - rank % tp
    peers = [(first + other, coordinates(first + other, mesh)) for other in range(tp)]
    if axis == "tp":
        return tuple(peer for peer, _ in peers)
    kept = WITHIN.get(axis) or next(inner for inner, outer in WITHIN.items() if outer == axis)
    return tuple(peer for peer, at in peers if at[kept] == own[kept])


def deal(full: int, parts: int, index: int, block: int = 1) -> tuple[int, int]:
    """(start, size) of part ``index`` of ``full`` elements, dealt in equal runs of whole blocks.

    The last parts are shorter, or empty, where that does not come out even.
    """
    each = -(-full // (parts * block)) * block
    start = min(each * index, full)
    return start, min(each, full - start)

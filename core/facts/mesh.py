"""Arithmetic of the device mesh: the coordinates of ranks on named axes, and groups. No torch.

Ranks are numbered with "tp" fastest, then "pp". The axes "dp" and "ep" divide the tp ranks: an axis
of size s cuts them into s blocks of neighbouring ranks. With ``{"tp": 8, "dp": 4}``, for example,
ranks 0 and 1 are dp group 0. The ranks within a block form an axis of their own: "attn_tp" (of size
tp / dp) splits the attention heads of a dp group, "moe_tp" (of size tp / ep) splits the width of
the experts of an ep block. A collective over an axis connects the ranks that differ only in that
coordinate; for "dp" and "ep" these are the ranks with the same "attn_tp" or "moe_tp".
"""

from __future__ import annotations

from collections.abc import Mapping

#: axis of the ranks within a block -> axis of the blocks
WITHIN = {"attn_tp": "dp", "moe_tp": "ep"}
OVER_TP = ("dp", "ep")  #: axes that divide the tp ranks into blocks
AXES = ("tp", "pp", *OVER_TP, *WITHIN)  #: all axes, along which ranks exchange data


def axis_size(axis: str, mesh: Mapping[str, int]) -> int:
    """Return the number of ranks along ``axis``; 1 for an axis that the mesh does not have.

    Raises:
        ValueError: the blocks of ``axis`` do not divide the tp ranks.
    """
    if axis in WITHIN:
        tp = mesh.get("tp", 1)
        blocks = mesh.get(WITHIN[axis], 1)
        if tp % blocks:
            raise ValueError(f"axis {WITHIN[axis]} of {blocks} does not divide the {tp} tp ranks")
        return tp // blocks
    return mesh.get(axis, 1)


def divides(mesh: Mapping[str, int]) -> bool:
    """Return whether the sizes of "dp" and "ep" divide the tp ranks into equal blocks."""
    return all(mesh.get("tp", 1) % mesh.get(axis, 1) == 0 for axis in OVER_TP)


def coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the index of ``rank`` along each axis, "attn_tp" and "moe_tp" included.

    The result is {} if ``mesh`` is empty.
    """
    if not mesh:
        return {}
    within = rank % mesh.get("tp", 1)
    found = {"tp": rank % mesh.get("tp", 1), "pp": rank // mesh.get("tp", 1)}
    for inner, outer in WITHIN.items():
        size = axis_size(inner, mesh)
        found[outer], found[inner] = within // size, within % size
    return found


def group(axis: str, rank: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ranks, in order, that take part in a collective of ``rank`` along ``axis``."""
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


def group_share(count: int, mesh: Mapping[str, int]) -> int:
    """Return each dp group's share of a limit ``count`` of the whole engine, rounded up."""
    return -(-count // mesh.get("dp", 1))


def deal(full: int, parts: int, index: int, block: int = 1) -> tuple[int, int]:
    """Return (start, size) of part number ``index`` when ``full`` elements are split into parts.

    All parts begin at multiples of ``block``. They have the same size, except that the last ones
    are shorter or empty if the elements do not divide evenly.
    """
    each = -(-full // (parts * block)) * block
    start = min(each * index, full)
    return start, min(each, full - start)

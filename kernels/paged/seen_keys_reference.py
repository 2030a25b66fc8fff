"""The reference of ``kernels.paged.page_table.visible``: the keys that a query sees."""

from __future__ import annotations

from torch import Tensor


def seen_keys(
    length: int, width: int, token: int, first_key: int, tree: Tensor | None, tree_span: int
) -> list[int]:
    """Return the positions of the keys that a query of a row sees, ascending.

    Args:
        length: keys of the row
        width: W, query tokens of the row
        token: number of the query, 0 to W - 1
        first_key: position of the first visible key
        tree: masks of the row, int64 [W]; None for a causal chain
        tree_span: keys that a mask names, the row's last ones; 0: W
    """
    if tree is None:
        return list(range(first_key, length - width + token + 1))
    bits, begin = int(tree[token]), length - (tree_span or width)
    return [at for at in range(first_key, length) if at < begin or bits >> (at - begin) & 1]

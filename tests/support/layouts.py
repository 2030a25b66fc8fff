"""Layouts of ranks for tests, as sections ``[[parallel]]``."""

from __future__ import annotations

from typing import Any

Layout = list[dict[str, Any]]


def layout(tp: int, ep: int = 0, dp: int = 0, **experts: Any) -> Layout:
    """Return the strategies of a layout.

    Args:
        tp: number of tensor ranks; 1 for none.
        ep: number of shares of the experts; 0 for none.
        dp: number of groups; 0 for none.
        experts: further options of ``ep_moe``.
    """
    found: Layout = []
    if tp > 1:
        found.append({"use": "tensor", "size": tp})
    if ep:
        found.append({"use": "ep_moe", "size": ep, **experts})
    if dp:
        found.append({"use": "dp_attention", "size": dp})
    return found

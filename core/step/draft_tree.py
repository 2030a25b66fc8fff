"""Drafts of decoding rows as trees of tokens.

D is the number of decoding rows and W the number of tokens of each in a verify step (the width).
Token 0 of a row is its newest token, whose result is not known yet; the others are drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The tokens of the decoding rows of a step as trees. A parent precedes its children.

    Two children of one token differ.

    Attributes:
        parents: Index of each token's parent in its row, int64 [D, W]; 0 for token 0.
        depths: Number of ancestors of each token, int64 [D, W].
        mask: int64 [D, W]; bit j of a token is set for the token itself and for its ancestors.
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor

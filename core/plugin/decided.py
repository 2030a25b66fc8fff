"""Values that the plan has decided, which checks and the byte budget read. Plan zone: no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.draft_shape import DraftShape


class Undecided(GlowplugError):
    """The error of reading a value before the planning pass that decides it."""


#: items whose value has another name now
FORMER_NAMES = {"growing_segments": "expandable_segments"}


class Decided:
    """Values decided so far. A value that is read too early raises ``Undecided``.

    Attributes:
        device: device type, "cuda" or "cpu".
        dtype: compute dtype, by torch's name.
        kv_dtype: dtype of the KV cache.
        width: tokens of a row in a verify step; 1 without speculation.
        lookahead: positions behind a step's tokens that a draft writes to.
        draft_shape: size of the drafts of a round.
        draft_shapes: sizes of drafts that a step may have, ascending; the last is ``draft_shape``.
            It is the only one without ``speculative.adaptive``.
        draft_extends: the draft continues the target's hidden states, and stores entries for a
            step's tokens after the target's pass (draft extend).
        draft_layers: number of the draft's layers in the target's KV pool.
        draft_folder: folder of the draft model; None if the draft has no folder of its own.
        mesh: mesh axis -> size.
        ranks: number of ranks.
        hosts: number of hosts.
        overlap: the next step is launched before the results of this one are read.
        sampled_last_layer: the last layer runs only for sampled tokens.
        page_size: tokens per page.
        expandable_segments: torch's allocator uses expandable segments.
        positions: most positions of a row, drafted tokens included.
        short_rows: batch sizes that are captured a second time for short rows.
    """

    device: str
    dtype: str
    kv_dtype: str
    width: int
    draft_shapes: tuple[DraftShape, ...]
    lookahead: int
    draft_shape: DraftShape
    draft_extends: bool
    draft_layers: int
    draft_folder: str | None
    mesh: dict[str, int]
    ranks: int
    hosts: int
    overlap: bool
    sampled_last_layer: bool
    page_size: int
    expandable_segments: bool
    positions: int
    short_rows: tuple[int, ...]

    def __init__(self, **values: Any) -> None:
        unknown = sorted(values.keys() - type(self).__annotations__.keys())
        if unknown:
            raise TypeError(f"no decided values of these names: {', '.join(unknown)}")
        self.__dict__.update(values)

    def __getitem__(self, name: str) -> Any:
        """Return the value ``name``, for plugins written before the values had attributes."""
        name = FORMER_NAMES.get(name, name)
        if name not in type(self).__annotations__:
            raise KeyError(name)
        return getattr(self, name)

    if not TYPE_CHECKING:  # so that mypy refuses names that are not listed above

        def __getattr__(self, name: str) -> Any:
            if name in type(self).__annotations__:
                raise Undecided(f"{name} is read before the plan has decided it")
            raise AttributeError(f"no decided value has the name {name!r}")

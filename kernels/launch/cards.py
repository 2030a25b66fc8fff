"""Which CUDA devices this project's Triton kernels are made for. It imports no torch until it is
asked about a device.

Tiles of attention and of products are cut for the 227 KiB of shared memory that a block may have on
these: a decoding tile takes 164 KiB, which no other card has. Small kernels (norms, gates,
sampling) run wherever Triton does.
"""

from __future__ import annotations

from importlib.util import find_spec

HOPPER = 90  #: its compute capability
TILES = frozenset({HOPPER, 100, 103})  #: compute capabilities; only the first has been run
TRITON = 80  #: the first that Triton itself supports
LIBRARIES = frozenset(
    {HOPPER}
)  #: those on which other libraries' 8-bit products have been tried, and are called


def unfit_for_libraries() -> str:
    """Why 8-bit products of other libraries are not called on the current device; "" on a card for
    them, and on a CPU.
    """
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    supported = ", ".join(f"SM{card}" for card in sorted(LIBRARIES))
    return (
        ""
        if major * 10 + minor in LIBRARIES
        else f"called on {supported}, this card is SM{major}{minor}"
    )


def tiles_run_on(device: str) -> bool:
    """Is Triton here, and ``device`` a card whose shared memory holds the tiles?"""
    if find_spec("triton") is None or not device.startswith("cuda"):
        return False
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor in TILES

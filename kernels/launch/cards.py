"""Compute capabilities that this project's Triton kernels support.

torch is imported only when a device is checked. Attention and GEMM tiles are sized for the 227 KiB
of shared memory that a CTA may use on the cards in TILES: a decode tile takes 164 KiB, more than
other cards have. Small kernels (norms, gates, sampling) run wherever Triton does.
"""

from __future__ import annotations

from importlib.util import find_spec

HOPPER = 90  #: compute capability of Hopper
#: compute capabilities that the tiles fit; only the first has been tested
TILES = frozenset({HOPPER, 100, 103})
TRITON = 80  #: lowest compute capability that Triton supports
#: compute capabilities on which other libraries' 8-bit GEMMs have been tested and are called
LIBRARIES = frozenset({HOPPER})


def unfit_for_libraries() -> str:
    """Return the reason why libraries' 8-bit GEMMs are not called on the current device.

    Returns:
        the reason; "" on a card in LIBRARIES, where they are called, and without a GPU
    """
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    supported = ", ".join(f"SM{card}" for card in sorted(LIBRARIES))
    is_supported = major * 10 + minor in LIBRARIES
    return "" if is_supported else f"called on {supported}, this card is SM{major}{minor}"


def tiles_run_on(device: str) -> bool:
    """Return whether Triton kernels with large tiles (attention, GEMM) can run on ``device``.

    Triton must be installed, and a block of ``device`` must have the shared memory for the largest
    tiles.
    """
    if find_spec("triton") is None or not device.startswith("cuda"):
        return False
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor in TILES

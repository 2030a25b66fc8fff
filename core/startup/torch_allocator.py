"""How torch's allocator takes memory from a CUDA device: in segments as they come, or in ones that
grow.

A segment that comes as it is keeps its size, so that a large tensor cannot take the place of two
smaller ones that lay in two segments. One that grows is a range of addresses to which memory is
mapped as it is needed (torch's ``expandable_segments``).
"""

from __future__ import annotations

import os

import torch

from glowplug.core.errors import GlowplugError

VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)  #: torch's own, which go before an option of ours
#: of ``torch._C`` since torch 2.9; what stood in torch.cuda is deprecated
SETTER = "_accelerator_setAllocatorSettings"


class _Process:
    """What engines of this process have set: an engine in process may follow another that asked for
    something else.
    """

    grows = False


def use_segments(grows: bool) -> list[str]:
    """Have this process's allocator grow its segments, or no longer; remarks for the log.

    A variable of torch's stands as it is, whatever it says. Memory that is taken already stays
    where it is. GlowplugError where this torch cannot be told.
    """
    given = [f"{name}={value}" for name in VARIABLES if (value := os.environ.get(name))]
    if given:
        return [
            "memory: the allocator is as "
            + ", ".join(given)
            + " says"
            + ", memory.growing_segments has no effect" * grows
        ]
    if grows == _Process.grows:
        return []
    setter = getattr(torch._C, SETTER, None)
    if setter is None:
        raise GlowplugError(
            f"torch {torch.__version__} has no torch._C.{SETTER}. Fix: "
            f"memory.growing_segments = false, or set {VARIABLES[1]}=expandable_segments:True"
        )
    setter(f"expandable_segments:{grows}")
    _Process.grows = grows
    return ["memory: the allocator grows its segments"] * grows

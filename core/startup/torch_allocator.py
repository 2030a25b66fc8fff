"""The choice between fixed and expandable segments of torch's CUDA allocator.

A fixed segment keeps its size, so that a large tensor cannot take the place of two smaller ones in
different segments. An expandable segment is a range of addresses to which memory is mapped as it is
needed (torch's ``expandable_segments``).
"""

from __future__ import annotations

import os

import torch

from glowplug.core.errors import GlowplugError

#: torch's own environment variables, which take precedence over the option
ALLOCATOR_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
#: function of ``torch._C`` since torch 2.9; its predecessor in torch.cuda is deprecated
SETTINGS_FUNCTION = "_accelerator_setAllocatorSettings"


class _Process:
    """The allocator setting now in force in this process.

    An earlier engine of the process may have chosen otherwise, so the setting is stored.
    """

    expandable_segments = False


def use_expandable_segments(expandable: bool) -> list[str]:
    """Turn expandable segments of this process's allocator on or off.

    An environment variable of torch's takes precedence. Memory that is already taken is not moved.

    Args:
        expandable: use expandable segments.

    Returns:
        Remarks for the log: that expandable segments are in use from now on, or that environment
        variables decide; otherwise [].

    Raises:
        GlowplugError: this version of torch has no function to change the setting.
    """
    given = [f"{name}={value}" for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))]
    if given:
        return [
            "memory: torch's allocator follows "
            + ", ".join(given)
            + " of the environment"
            + "; memory.growing_segments has no effect" * expandable
        ]
    if expandable == _Process.expandable_segments:
        return []
    setter = getattr(torch._C, SETTINGS_FUNCTION, None)
    if setter is None:
        raise GlowplugError(
            f"torch {torch.__version__} has no torch._C.{SETTINGS_FUNCTION}. Fix: "
            "memory.growing_segments = false, or set "
            f"{ALLOCATOR_VARIABLES[1]}=expandable_segments:True"
        )
    setter(f"expandable_segments:{expandable}")
    _Process.expandable_segments = expandable
    return ["memory: the allocator uses expandable segments"] * expandable

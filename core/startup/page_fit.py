"""The KV pool's size, from the free memory of a device after weights and largest steps.

This module only calculates; the measurements come from ``MemoryMeter``. If the plan predicted too
little memory, start-up fails here, before the port opens, with an error that lists the measured and
the planned bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.budget.memory_share import CUDA_RESERVE
from glowplug.core.plan.budget.step import EXCHANGE_BUFFERS, EXCHANGE_LIBRARY, RUNTIME_LINE
from glowplug.core.plan.budget.units import human
from glowplug.core.plan.plan import EnginePlan


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one device after the largest steps.

    Attributes:
        total: size of the device.
        free: free bytes, with nothing cached by the allocator.
        step: most bytes that a step claims and releases.
        graphs: bytes that captured graphs will take.
    """

    total: int
    free: int
    step: int
    graphs: int = 0

    def for_cache(self, fraction: float | None, reserve: int) -> int:
        """Return the bytes for the KV pool; below 0 if even the steps do not fit.

        Args:
            fraction: share of the device that the engine may use; None: all but ``CUDA_RESERVE``.
            reserve: further bytes to leave free.
        """
        share = (1 - CUDA_RESERVE) if fraction is None else fraction
        used = self.total - self.free
        return int(self.total * share) - used - self.step - self.graphs - reserve


def pages_that_fit(
    plan: EnginePlan, measured: MeasuredMemory, page_bytes: int, lines: Mapping[str, int]
) -> int:
    """Return the number of pages of the KV pool, the scratch page included.

    Args:
        page_bytes: bytes of a page, with all other state that is kept per page.
        lines: measured bytes by budget line, for the error message.

    Raises:
        GlowplugError: the pages are too few for the plan.
    """
    memory = plan.config.get("memory") or {}
    sizes = plan.sizes
    room = measured.for_cache(memory.get("fraction"), int(memory.get("reserve_bytes") or 0))
    pages = min(sizes.most_pages or sizes.num_pages, max(0, room) // page_bytes)
    least = sizes.least_pages or sizes.num_pages
    if pages >= least:
        return pages
    static = memory.get("static_fraction") is not None
    raise GlowplugError(
        f"{human(max(0, room))} of {human(measured.total)} are left for the KV cache, which needs "
        f"{human(least * page_bytes)} for {(least - 1) * sizes.page_size} tokens; measured against "
        f"planned: {compared(plan, lines)}; a step takes {human(measured.step)}, "
        f"graphs {human(measured.graphs)}. Fix: context_length or "
        f"memory.kv_tokens = {max(1, (pages - 1) * sizes.page_size)} or less, fewer "
        "scheduler.max_running_requests, a smaller scheduler.chunk_size, "
        + ("or a smaller memory.static_fraction" if static else "or a larger memory.fraction")
    )


def compared(plan: EnginePlan, lines: Mapping[str, int]) -> str:
    """Return "weights 29.3 GiB (29.2 GiB planned), ..." for every measured line."""
    planned = planned_as_measured(plan)
    return ", ".join(
        f"{name} {human(size)} ({human(planned[name])} planned)"
        if name in planned
        else f"{name} {human(size)}"
        for name, size in lines.items()
    )


def differences(plan: EnginePlan, lines: Mapping[str, int]) -> str:
    """Return "weights 29.3 GiB (+0%), ..." for every measured line with bytes."""
    planned = planned_as_measured(plan)
    return ", ".join(
        f"{name} {human(size)}"
        + (f" ({size / planned[name] - 1:+.0%})" if planned.get(name) else "")
        for name, size in lines.items()
        if size
    )


def planned_as_measured(plan: EnginePlan) -> dict[str, int]:
    """Return the planned bytes by line, those of exchanges added to the runtime's.

    Both are outside torch's allocator, so they can only be measured together.
    """
    found = {line.name: line.bytes for line in plan.budget}
    for name in (EXCHANGE_BUFFERS, EXCHANGE_LIBRARY):
        if name in found:  # a plan with such a line has one of the runtime
            found[RUNTIME_LINE] += found.pop(name)
    return found

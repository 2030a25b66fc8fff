"""Memory in the pauses of a soak, and its growth from one pause to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP_SHARE = 1 / 3  #: share of the pauses after which memory must stay level


@dataclass
class Sample:
    """The engine's memory in one pause of the soak run; times in seconds, memory in bytes.

    Memory and pages are sums over all ranks.

    Attributes:
        seconds: time since the start.
        loaded: time under load since the start, pauses left out.
        host: resident sets of the ranks' processes.
        device_held: memory of tensors.
        device_claimed: memory reserved by torch's allocator.
        device_used: memory in use by all processes.
        device_process: memory of this process and its descendants; None if the driver does not
            report it.
        pages: page counts that the engine returned to ``LLM.control("check")``.
    """

    seconds: float
    loaded: float
    host: int
    device_held: int
    device_claimed: int
    device_used: int
    device_process: int | None
    pages: dict[str, int] = field(default_factory=dict)


def summed(reply: Mapping[str, Any]) -> dict[str, int]:
    """Return the sum over all ranks of each figure in the reply to a control request."""
    ranks = reply.get("ranks", [reply])
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


def judged_kinds(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the names of the fields of ``Sample`` that must not grow during a soak run.

    Device memory is that of this process if every sample has it, else that of all processes.
    """
    known = samples and all(sample.device_process is not None for sample in samples)
    return "host", "device_held", "device_claimed", "device_process" if known else "device_used"


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the growth in MiB of each kind in ``judged_kinds``; {} for fewer than three samples.

    The growth is the largest value in the last third of the samples, minus the first value after
    warm-up.
    """
    if len(samples) < 3:
        return {}
    first = samples[max(1, int(len(samples) * WARM_UP_SHARE))]
    late = samples[-max(1, len(samples) // 3) :]
    return {
        name: (max(getattr(one, name) for one in late) - getattr(first, name)) / 2**20
        for name in judged_kinds(samples)
    }


def device_scope(samples: Sequence[Sample], missing: str) -> str:
    """Return, as a phrase, whose device memory is checked for growth.

    The phrase is "this process's" or "the whole device's", the latter with ``missing`` added.

    Args:
        samples: the samples so far.
        missing: reason why the memory of this process is unknown; "" if there is none.
    """
    if judged_kinds(samples)[-1] == "device_process":
        return "this process's"
    return "the whole device's" + (f": {missing}" if missing else "")

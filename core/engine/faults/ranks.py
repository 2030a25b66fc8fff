"""Faults that must end all ranks: failed exchanges, and calls that fail on some ranks only.

Policy, cache and sampler run alike on every rank, so a call fails on all ranks or on none. If it
fails on some ranks only, their schedules differ from then on, and all ranks must end. A rank with
such a fault launches nothing in the same turn, so no other rank can complete a step that this one
schedules otherwise. In the next turn, ``Turn.failed`` has rank 0's faults, and every rank compares
them with its own before it does anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq

from glowplug.core.errors import ComponentFailed, GlowplugError
from glowplug.core.protocols import Collectives, RequestRouter
from glowplug.core.step.messages import Finished


class ContainedFaults:
    """The requests that failed calls have ended in this turn.

    Args:
        router: the request router. Rank 0's faults are those of its group; other groups compare
            theirs when they agree on a step, see ``ParallelStrategy.agree``.
        leads: this is rank 0.

    Attributes:
        noted: (sequence id, error) of each.
        count: number of all such requests since the start.
    """

    def __init__(self, router: RequestRouter | None, leads: bool) -> None:
        self.noted: list[tuple[int, str]] = []
        self.count = 0
        self._compares = router is None or router.group == 0
        self._checked = self._compares and not leads
        # faults of the last turn, if the comparison does not show that all ranks had them
        self._before: list[tuple[int, str]] = []

    def note(self, ends: Iterable[Finished]) -> None:
        """Note those of the ends that a failed call has caused."""
        for end in ends:
            if end.error_code == ComponentFailed.CODE:
                self.noted.append((end.id, end.error or ""))
                self.count += 1

    def compare(self, leader: Seq[tuple[int, str]]) -> None:
        """Compare the faults of the last turn with those of rank 0, and forget them.

        Args:
            leader: ``Turn.failed``.

        Raises:
            GlowplugError: they differ.
        """
        noted = self.noted
        self._before = [] if self._checked else noted
        if not noted and not leader:
            return
        self.noted = []
        own = {id for id, _ in noted}
        others = {id for id, _ in leader}
        if not self._compares or own == others:
            return
        cause = next(error for id, error in (*noted, *leader) if (id in own) != (id in others))
        raise GlowplugError(
            "a component fails on some ranks only: in the last turn requests "
            f"{sorted(own)} ended for this reason on this rank, {sorted(others)} on rank 0"
            f"\n    {cause}"
        )

    def raise_with_cause(self, error: GlowplugError) -> None:
        """Raise the error of a turn with a fault that other ranks may not have had, if any.

        Raises:
            GlowplugError: there is such a fault.
        """
        for _, cause in (*self._before, *self.noted):
            raise GlowplugError(
                f"{error}\n    possible cause: a component failed on this rank, perhaps on no "
                f"other: {cause}"
            ) from error


def check_exchanges(collectives: Collectives) -> None:
    """Raise the error of an exchange that has failed on the device, if the collectives notice any.

    Raises:
        CollectiveError: a kernel has waited for another rank in vain.
    """
    check: Callable[[], None] | None = getattr(collectives, "check", None)
    if check is not None:
        check()

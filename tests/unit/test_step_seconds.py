"""Seconds of a step by size of the drafts on a machine that other work makes slower at times."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.plugin.draft_costs import DraftCosts, ShapeCosts
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.speculation.adaptive import AdaptivePolicy
from glowplug.core.speculation.step_seconds import KEPT, LEAST_KEPT, StepSeconds

SLOWER = 1.6  #: seconds of a step beside other work, relative to those without it
PHASE = 40  #: steps beside other work
PLAIN = 0.010  #: seconds of a step without drafts
VERIFY = 0.014  #: seconds of a step with one draft


@pytest.mark.parametrize("again", [False, True])
def test_a_slow_phase_does_not_change_the_ratio_of_sizes(again: bool) -> None:
    """One size is measured before it, the other one during it and, if ``again``, after it."""
    found = StepSeconds(np.array([[0.0, PLAIN], [0.0, VERIFY]]))
    for _ in range(LEAST_KEPT):
        found.add(1, 1, VERIFY)
    for _ in range(KEPT):
        found.add(0, 1, PLAIN)
    for _ in range(PHASE):
        found.add(0, 1, SLOWER * PLAIN)
    for _ in range(PHASE if again else 0):
        found.add(0, 1, PLAIN)
    plain, verify = found.at(1)
    assert verify / plain == pytest.approx(VERIFY / PLAIN)


def test_a_lasting_difference_to_the_start_is_no_slow_phase() -> None:
    """Steps were always slower than the start measured, by the same time."""
    found = StepSeconds(np.array([[0.0, PLAIN], [0.0, VERIFY]]))
    for _ in range(PHASE):
        found.add(0, 1, PLAIN + 0.1)
    assert found.at(1) == pytest.approx([PLAIN + 0.1, VERIFY + 0.1])


def test_sizes_differ_alike_with_about_as_many_rows() -> None:
    """A size that was measured with four times as many rows need not be measured again."""
    found = StepSeconds(np.repeat([[PLAIN], [VERIFY]], 65, 1))
    for _ in range(LEAST_KEPT):
        found.add(1, 32, VERIFY + 0.1)
        found.add(0, 32, PLAIN + 0.08)
        found.add(1, 8, VERIFY + 0.05)
        found.add(1, 2, VERIFY + 0.05)
    found.refresh()
    assert found.at(8) == pytest.approx([PLAIN + 0.03, VERIFY + 0.05])
    assert found.at(2) == pytest.approx([PLAIN + 0.05, VERIFY + 0.05]), "differs like the other"
    assert found.unmeasured(8, 1) is None and found.unmeasured(2, 1) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_slow_phases_do_not_make_drafts_seem_cheap(seed: int) -> None:
    """Drafts gain 0.3 of a token and cost 0.4 of a step: nearly all steps are plain."""
    shapes = (NO_DRAFTS, DraftShape(1, 1, 2))
    seconds = {NO_DRAFTS: PLAIN, shapes[1]: VERIFY}
    entries = (ShapeCosts(shape, (4,), (cost,)) for shape, cost in seconds.items())
    policy = AdaptivePolicy(shapes, DraftCosts(tuple(entries)), 4, clocked=True)
    rows = np.arange(4, dtype=np.int32)
    random = np.random.default_rng(seed)
    chosen = []
    for step in range(2000):
        shape = policy.choose(rows, 4)
        hits = random.random(4) < 0.3
        policy.took(4, shape, seconds[shape] * (SLOWER if step // 200 % 2 else 1.0))
        policy.observe(rows, shape, (1 + hits * shape.steps).astype(np.int32))
        chosen.append(shape)
    assert chosen.count(shapes[1]) < 0.08 * len(chosen)

"""Random workloads on tiny pools: every sequence ends with the reference's output, and the accounts
are correct after each step.

``Drive`` checks page accounting and cache integrity after every step, and that the scheduler never
stalls; the fake model checks every KV slot that a step reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape, shorter_shapes
from glowplug.core.protocols import PrefixCache, Worker
from glowplug.core.step.request import Sequence
from glowplug.core.testing.harness.drive import Drive, sequence
from glowplug.core.testing.harness.fake_model import CacheFault
from glowplug.core.testing.harness.plans import VOCAB, bare_plan
from glowplug.core.testing.harness.prefix_hash import reference
from glowplug.plugins.cache.none import NoCacheOptions
from glowplug.plugins.cache.none_runtime import NoCache
from glowplug.plugins.cache.radix import RadixOptions
from glowplug.plugins.cache.radix_runtime import RadixCache
from glowplug.plugins.scheduler import continuous_batch, continuous_commit
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_rows import Rows
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from glowplug.plugins.scheduler.policies import FcfsOptions, LongestPrefixOptions, PriorityOptions
from glowplug.plugins.scheduler.policies_runtime import Fcfs, LongestPrefix, Priority
from tests.support.random_drafts import RandomDrafts, Widened

CONTEXT = 48
HEADS = np.random.default_rng(1).integers(0, VOCAB, (3, CONTEXT)).tolist()
STOPS = np.random.default_rng(2).permutation(VOCAB).tolist()
CACHES: dict[str, Callable[[EnginePlan], PrefixCache]] = {
    "radix": lambda plan: RadixCache(RadixOptions(), plan, Worker()),
    "small": lambda plan: RadixCache(RadixOptions(max_pages=7), plan, Worker()),
    "none": lambda plan: NoCache(NoCacheOptions(), plan, Worker()),
}
POLICIES = {
    "fcfs": lambda plan: Fcfs(FcfsOptions(), plan, Worker()),
    "priority": lambda plan: Priority(PriorityOptions(), plan, Worker()),
    "longest_prefix": lambda plan: LongestPrefix(LongestPrefixOptions(window=3), plan, Worker()),
}


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    made = []
    for id in range(draw(st.integers(1, 14))):
        shared = HEADS[draw(st.integers(0, 2))][: draw(st.integers(0, CONTEXT - 8))]
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        made.append(
            sequence(
                id,
                (shared + own)[: CONTEXT - 1],
                max_tokens=draw(st.integers(1, 30)),
                arrival=float(id),
                stop_ids=frozenset(STOPS[: draw(st.sampled_from([0, 2, 40]))]),
                min_tokens=0,
                priority=draw(st.integers(0, 2)),
                salt=draw(st.sampled_from(["", "", "x"])),
                logprobs=draw(st.sampled_from([None, 0])),
                prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
            )
        )
    return made


@st.composite
def drives(draw: st.DrawFn) -> Drive:
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    least = -(-CONTEXT // page_size)
    width = draw(st.sampled_from([1, 1, 2, 5]))
    adaptive = width > 1 and draw(st.booleans())
    shapes = shorter_shapes(DraftShape(width - 1, 1, width)) if adaptive else ()
    groups = draw(st.integers(1, 2))
    plan = bare_plan(
        context_length=CONTEXT,
        page_size=page_size,
        num_pages=1 + least + draw(st.integers(0, 2 * least)),
        width=width,
        draft_shapes=shapes,
        groups=groups,
        max_running=draw(st.integers(1, 8)),
        chunk_size=draw(st.sampled_from([1, 5, 16])),
        max_step_tokens=draw(st.sampled_from([8, 48])),
    )
    options = ContinuousOptions(
        mixed=draw(st.booleans()), share_prefill=draw(st.sampled_from([0, 1, 16]))
    )
    kind = Widened if groups > 1 else Continuous
    seed = draw(st.integers(0, 99))
    drive = Drive(
        kind(options, plan, Worker()),
        plan,
        CACHES[draw(st.sampled_from(sorted(CACHES)))](plan),
        POLICIES[draw(st.sampled_from(sorted(POLICIES)))](plan),
        depth=draw(st.integers(0, 2)),
        seed=seed,
    )
    if adaptive:
        drive.scheduler.adapt(RandomDrafts(shapes, seed))
    return drive


def expect(drive: Drive, one: Sequence, whole: bool = True) -> None:
    tokens, reason = reference(
        one.prompt.tolist(), one.params, one.stop_ids, vocab=VOCAB, context=CONTEXT
    )
    seen = drive.seen[one.id]
    if not whole:
        assert seen.tokens == tokens[: len(seen.tokens)]
        return
    assert seen.tokens == tokens and seen.finished is not None and seen.finished.reason == reason
    assert len(seen.logprobs) == (len(tokens) if one.params.logprobs is not None else 0)
    assert len(seen.prompt_logprobs) == (
        len(one.prompt) - 1 if one.params.prompt_logprobs is not None else 0
    )


def run(drive: Drive, work: list[Sequence], gaps: list[int], aborts: dict[int, int]) -> None:
    gone = set()
    for at, one in enumerate(work):
        drive.add(one)
        for _ in range(gaps[at % len(gaps)]):
            drive.step()
        if at in aborts and drive.abort(aborts[at]) is not None:
            gone.add(aborts[at])
    drive.run()
    for one in work:
        expect(drive, one, whole=one.id not in gone)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    drive=drives(),
    work=sequences(),
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    aborts=st.dictionaries(st.integers(0, 13), st.integers(0, 13), max_size=3),
)
def test_random_workloads(
    drive: Drive, work: list[Sequence], gaps: list[int], aborts: dict[int, int]
) -> None:
    run(drive, work, gaps, aborts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    drive=drives(),
    work=sequences(),
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    aborts=st.dictionaries(st.integers(0, 13), st.integers(0, 13), max_size=3),
)
def test_many_random_workloads(
    drive: Drive, work: list[Sequence], gaps: list[int], aborts: dict[int, int]
) -> None:
    run(drive, work, gaps, aborts)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_is_widened_leaves_room_for_the_drafts(seed: int) -> None:
    """Prompts beside decoding rows fit in a step also after another group has widened it."""
    shapes = shorter_shapes(DraftShape(1, 1, 2))
    plan = bare_plan(
        context_length=CONTEXT,
        num_pages=200,
        width=2,
        draft_shapes=shapes,
        groups=2,
        max_running=4,
        chunk_size=16,
        max_step_tokens=8,
    )
    options = ContinuousOptions(mixed=True, share_prefill=0)
    drive = Drive(
        Widened(options, plan, Worker()), plan, CACHES["none"](plan), POLICIES["fcfs"](plan)
    )
    drive.scheduler.adapt(RandomDrafts(shapes, seed))
    run(
        drive,
        [sequence(i, HEADS[0][:7], max_tokens=9, arrival=float(i)) for i in range(8)],
        [2],
        {},
    )


# ---- the kit finds faults ------------------------------------------------------------------------


def under_pressure(width: int = 1, adaptive: bool = False, groups: int = 1) -> Drive:
    """Run a workload that needs chunks, growth, sharing, preemption, overlap and stops."""
    shapes = shorter_shapes(DraftShape(width - 1, 1, width)) if adaptive else ()
    plan = bare_plan(
        context_length=CONTEXT, num_pages=30, width=width, draft_shapes=shapes, groups=groups
    )
    kind = Widened if groups > 1 else Continuous
    drive = Drive(
        kind(ContinuousOptions(share_prefill=8), plan, Worker()),
        plan,
        CACHES["radix"](plan),
        POLICIES["fcfs"](plan),
    )
    if adaptive:
        drive.scheduler.adapt(RandomDrafts(shapes))
    work = [
        sequence(
            i,
            HEADS[i % 2][: 20 + i % 3],
            max_tokens=24,
            arrival=float(i),
            logprobs=0,
            stop_ids=frozenset(STOPS[:30]),
        )
        for i in range(12)
    ]
    run(drive, work, [2], {})
    return drive


def test_under_pressure() -> None:
    under_pressure()
    under_pressure(width=3)


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_of_different_widths_under_pressure(groups: int) -> None:
    """Rows keep their tokens while the drafts of each step have another size, and steps are widened
    for another group; the policy sees every row's tokens.
    """
    drive = under_pressure(5, adaptive=True, groups=groups)
    policy = drive.scheduler.decodes.policy
    assert isinstance(policy, RandomDrafts)
    assert {shape.tokens for shape, _ in policy.observed} == {1, 2, 3, 5}
    stats = drive.scheduler.load()
    seen = [(shape, count) for shape, counts in policy.observed for count in counts]
    assert all(1 <= count <= shape.tokens for shape, count in seen)
    assert sum(count for _, count in seen) > 100
    assert stats.preemptions


def release_too_early(rows: Rows, row: int) -> None:
    rows.pages.give(rows.table.pages[row, rows.shared[row] : rows.table.num_pages[row]])


def keep_one_page_more(
    rows: Rows, members: np.ndarray, shape: DraftShape, lookahead: int
) -> np.ndarray:
    table = rows.table
    return np.minimum(table.launched[members] + shape.tokens, table.max_length[members] - 1) - 1


def forget_to_move_over(rows: Rows, row: int) -> None:
    whole = (int(rows.table.length[row]) - 1) // rows.table.page_size
    tokens = rows.table.tokens[row, : whole * rows.table.page_size]
    rows.pages.give(
        rows.cache.insert(
            tokens, rows.table.pages[row, :whole].copy(), rows.running[row].admission.salt
        )
    )


@pytest.mark.parametrize(
    "where, name, fault, width",
    [
        (Rows, "publish", release_too_early, 1),
        (Rows, "publish", forget_to_move_over, 1),
        (continuous_batch, "needed_tokens", keep_one_page_more, 1),
        (continuous_batch, "launchable", lambda rows: rows.decode_rows(), 1),
        (continuous_commit, "_reconcile", lambda *args: None, 3),
        (
            continuous_commit,
            "_stops",
            lambda rows, members, tokens, counts, length: (np.full(len(members), -1), counts),
            1,
        ),
        (Rows, "lacking", lambda rows, members, lengths: (members[:0], members[:0]), 1),
    ],
)
def test_a_broken_scheduler_is_detected(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, fault: object, width: int
) -> None:
    monkeypatch.setattr(where, name, fault)
    with pytest.raises((CacheFault, AssertionError, ValueError, IndexError)):
        under_pressure(width)

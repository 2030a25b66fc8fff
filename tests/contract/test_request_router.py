"""Routing of requests to dp groups: tokens, shared prefixes, room, equal decisions of all ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from glowplug.core.step.request import Admission, SamplingParams, Sequence
from glowplug.core.testing.harness.plans import sizes
from glowplug.plugins.parallel.request_router import (
    ANSWER_TOKENS,
    BLOCKS_MAX,
    COMPUTED_WEIGHT,
    GroupLoad,
    PrefixRecord,
    TokenRouter,
)
from tests.plan.test_cli import ENVIRONMENT

BLOCK = 4  #: tokens per page of the small sizes


def tokens(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(2, 900, length).astype(np.int32)


def request(
    prompt: NDArray[np.int32], salt: str = "", prompt_logprobs: int | None = None
) -> Sequence:
    return Sequence(
        id=0,
        prompt=prompt,
        params=SamplingParams(max_tokens=8, prompt_logprobs=prompt_logprobs),
        admission=Admission(salt=salt),
    )


@dataclass
class Ranks:
    """The routers of all groups, which must agree."""

    routers: list[TokenRouter]

    def route(self, prompt: NDArray[np.int32], **more: object) -> int:
        owners = [
            router.group
            for router in self.routers
            if router.owns(request(prompt, **more))  # type: ignore[arg-type]
        ]
        assert len(owners) == 1, f"groups {owners} own one request"
        return owners[0]

    def agree(self, loads: list[GroupLoad]) -> None:
        """Agree on ``loads``; pages are free without end where none are stated."""
        for router in self.routers:
            router.loads = [replace(load, free=load.free or 1 << 40) for load in loads]

    @property
    def loads(self) -> list[GroupLoad]:
        assert all(router.loads == self.routers[0].loads for router in self.routers)
        return self.routers[0].loads


def ranks(groups: int, shares: bool = True, **changes: int) -> Ranks:
    small = {"max_running": 1000, "num_pages": 100_000, **changes}
    made = [TokenRouter(group, groups, True, sizes(**small)) for group in range(groups)]
    for router in made:
        router.shares = shares
    return Ranks(made)


# ---- tokens --------------------------------------------------------------------------------------


def test_groups_get_equal_work_from_prompts_of_very_different_length() -> None:
    """Every fourth prompt is long; by the number of sequences, one group would get all of them."""
    every = ranks(4)
    longest = 8000
    for number in range(64):
        every.route(tokens(number, longest if number % 4 == 0 else 20))
    pending = [load.pending for load in every.loads]
    assert max(pending) - min(pending) <= longest
    assert sorted(pending)[0] >= 3 * longest


def test_short_prompts_go_round_all_groups() -> None:
    every = ranks(3)
    assert [every.route(tokens(number, 10)) for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_running_sequences_cost_their_answers_and_their_context() -> None:
    every = ranks(3)
    busy = GroupLoad(sequences=2, context=4000)
    every.agree([busy, GroupLoad(sequences=2, context=0), GroupLoad(sequences=3)])
    assert every.route(tokens(1, 10)) == 1
    every.agree([busy, GroupLoad(sequences=3, pending=5000), GroupLoad(sequences=4, pending=5000)])
    assert every.route(tokens(2, 10)) == 0


def test_an_agreement_replaces_the_loads_of_requests_that_have_ended() -> None:
    every = ranks(2)
    assert every.route(tokens(1, 5000)) == 0
    assert every.route(tokens(2, 10)) == 1
    every.agree([GroupLoad(), GroupLoad(sequences=1, pending=10)])  # the first was aborted
    assert every.route(tokens(3, 10)) == 0


# ---- room ----------------------------------------------------------------------------------------


def test_a_full_group_gets_a_request_only_if_all_are_full() -> None:
    every = ranks(2, max_running=1, max_queued=0)
    shared = tokens(1, 4000)
    assert every.route(shared) == 0
    assert every.route(shared) == 1, "the prefix is in the full group"
    assert every.route(tokens(2, 10)) == 0, "both are full, and the load of group 0 is not larger"


def test_a_request_goes_where_it_need_not_wait_for_a_row() -> None:
    every = ranks(2, max_running=2, max_queued=100)
    every.agree([GroupLoad(sequences=2), GroupLoad(sequences=1, pending=9000)])
    assert every.route(tokens(1, 10)) == 1


def test_a_request_goes_where_it_need_not_wait_for_pages() -> None:
    every = ranks(2)
    every.agree([GroupLoad(sequences=1, free=50), GroupLoad(sequences=9, free=2000)])
    assert every.route(tokens(1, 100)) == 1
    assert every.route(tokens(2, 20)) == 0


# ---- prefixes ------------------------------------------------------------------------------------


def test_prompts_with_a_shared_prefix_meet() -> None:
    every = ranks(4)
    prefixes = [tokens(seed, 3000) for seed in range(4)]
    found: dict[int, set[int]] = {}
    for number in range(12):
        prompt = np.concatenate([prefixes[number % 4], tokens(100 + number, 30)])
        found.setdefault(number % 4, set()).add(every.route(prompt))
    assert sorted(map(sorted, found.values())) == [[0], [1], [2], [3]]


def test_a_popular_prefix_does_not_overload_one_group() -> None:
    """Its group takes more than the others only by what the prefix is worth."""
    every = ranks(4)
    shared = 2000
    prefix = tokens(1, shared)
    counts = [0] * 4
    for number in range(200):
        counts[every.route(np.concatenate([prefix, tokens(100 + number, 50)]))] += 1
        costs = [load.cost for load in every.loads]
        assert max(costs) - min(costs) <= COMPUTED_WEIGHT * shared + shared + ANSWER_TOKENS + 100
    assert min(counts) >= 40
    computed = sum(load.pending for load in every.loads)
    assert computed == 200 * 50 + 4 * shared, "each group computes the prefix once"


def test_a_short_prefix_is_no_reason_to_crowd() -> None:
    every = ranks(2)
    prefix = tokens(1, 40)
    owners = [every.route(np.concatenate([prefix, tokens(2 + number, 10)])) for number in range(8)]
    assert owners.count(0) == owners.count(1) == 4


def test_a_router_notes_how_much_of_a_prompt_is_expected_in_the_cache() -> None:
    router = TokenRouter(0, 2, True, sizes(num_pages=1000))
    router.shares = True
    first, second = request(tokens(1, 42)), request(tokens(1, 42))
    assert router.owns(first) and first.expected_cached == 0
    router.loads = [GroupLoad(free=4000), GroupLoad(free=4000)]
    assert router.owns(second) and second.expected_cached == 40
    assert router.loads[0] == GroupLoad(sequences=1, pending=2, free=4000)


@pytest.mark.parametrize("salt", ["a", "b"])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("shares", [True, False])
def test_prefixes_count_only_where_a_cache_shares_them(
    shares: bool, salt: str, prompt_logprobs: int | None
) -> None:
    """They count under one salt, and not if a prompt's own log-probabilities are requested."""
    every = ranks(2, shares=shares)
    prompt = tokens(1, 400)
    assert every.route(tokens(2, 10), salt="a") == 0
    assert every.route(prompt, salt="a") == 1
    every.agree([GroupLoad(), GroupLoad()])
    counts = shares and salt == "a" and prompt_logprobs is None
    assert every.route(prompt, salt=salt, prompt_logprobs=prompt_logprobs) == int(counts)


def test_emptied_caches_are_forgotten() -> None:
    every = ranks(2)
    every.route(tokens(2, 10))
    prompt = tokens(1, 400)
    assert every.route(prompt) == 1
    for router in every.routers:
        router.forget_prefixes()
    every.agree([GroupLoad(), GroupLoad()])
    assert every.route(prompt) == 0


def test_the_record_is_bounded_and_keeps_beginnings_longest() -> None:
    record = PrefixRecord(BLOCK, 50)
    prefix = tokens(1, 10 * BLOCK)
    for number in range(100):
        keys = record.keys(np.concatenate([prefix, tokens(2 + number, 30 * BLOCK)]), "")
        assert len(keys) == 39
        record.add(keys, number % 3)
        assert len(record) <= 50
    assert record.matched(record.keys(prefix, ""), 3) == [9 * BLOCK] * 3
    longer = record.keys(tokens(500, 100 * BLOCK), "")
    record.add(longer, 0)
    assert len(record) == 50 and record.matched(longer, 1) == [50 * BLOCK]


def test_a_large_cache_does_not_make_the_record_larger() -> None:
    router = TokenRouter(0, 16, True, sizes(num_pages=100_000))
    assert router._prefixes._most == BLOCKS_MAX < 16 * 100_000
    assert TokenRouter(0, 4, True, sizes(num_pages=100))._prefixes._most == 400


def test_the_whole_prompt_up_to_the_last_token_is_compared() -> None:
    record = PrefixRecord(BLOCK, 50)
    one, other = tokens(1, 21), tokens(1, 21)
    other[5] += 1
    record.add(record.keys(one, ""), 1)
    assert record.matched(record.keys(one, ""), 2) == [0, 5 * BLOCK]
    assert record.matched(record.keys(one[:20], ""), 2) == [0, 4 * BLOCK]
    assert record.matched(record.keys(other, ""), 2) == [0, BLOCK]


# ---- equal decisions -----------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("route"), st.integers(0, 5), st.integers(0, 60), st.sampled_from("ab")),
        st.tuples(
            st.just("agree"),
            st.lists(st.integers(0, 20), min_size=9, max_size=9),
        ),
        st.just(("forget",)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_all_ranks_choose_the_same_group(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    every = ranks(3, max_running=4, max_queued=3, num_pages=40)
    for number, step in enumerate(steps):
        if step[0] == "route":
            _, prefix, length, salt = step
            every.route(
                np.concatenate([tokens(prefix, length), tokens(100 + number, 1 + length % 7)]),
                salt=salt,
            )
        elif step[0] == "agree":
            rows, pending, context = step[1][:3], step[1][3:6], step[1][6:]
            every.agree(
                [GroupLoad(a, 50 * b, 9 * c, 40 * b) for a, b, c in zip(rows, pending, context)]
            )
        else:
            for router in every.routers:
                router.forget_prefixes()
        assert every.loads is every.routers[0].loads
        assert len(every.routers[0]._prefixes) <= 3 * 40


def test_keys_are_the_same_in_every_process() -> None:
    """Ranks are processes, with a random seed of Python's hashes each."""
    program = (
        "import numpy as np\n"
        "from glowplug.plugins.parallel.request_router import PrefixRecord\n"
        "prompt = np.arange(12, dtype=np.int32)\n"
        "print(b''.join(PrefixRecord(4, 9).keys(prompt, 'salt')).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=ENVIRONMENT,
        ).stdout
        for _ in range(2)
    }
    here = b"".join(PrefixRecord(4, 9).keys(np.arange(12, dtype=np.int32), "salt")).hex()
    assert found == {here + "\n"} and len(here) == 2 * 8 * 2

"""Faults planted in caches, policies and schedulers."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixMatch, Worker
from glowplug.core.testing.suites.cache import SIZE, CacheSuite
from glowplug.core.testing.suites.policy import PolicySuite
from glowplug.core.testing.suites.scheduler import SchedulerSuite
from glowplug.plugins.cache.radix import RadixOptions
from glowplug.plugins.cache.radix_runtime import RadixCache
from glowplug.plugins.scheduler.continuous import ContinuousOptions
from glowplug.plugins.scheduler.continuous_runtime import Continuous
from glowplug.plugins.scheduler.policies import FcfsOptions
from glowplug.plugins.scheduler.policies_runtime import Fcfs
from tests.mutants.framework import Mutant, Planter

# ---- caches --------------------------------------------------------------------------------------


class Cache(CacheSuite):
    def make(self, plan: EnginePlan) -> Any:
        return RadixCache(RadixOptions(), plan, Worker())


cache = Planter("cache", Cache)


def _longer_match(match: Any, tokens: Any, salt: str) -> PrefixMatch:
    found: PrefixMatch = match(tokens, salt)
    return replace(found, length=found.length + 1) if found.length else found


def _mixed_pages(match: Any, tokens: Any, salt: str) -> PrefixMatch:
    found: PrefixMatch = match(tokens, salt)
    return replace(found, pages=found.pages[::-1])


CACHE: list[Mutant] = [
    cache.swap(
        "an eviction loses a page",
        "test_eviction_takes_the_least_recently_used_end",
        "evict",
        lambda evict, pages: evict(pages)[1:],
    ),
    cache.swap(
        "an eviction gives up one page too few",
        "test_eviction_gives_up_as_much_as_is_asked_for",
        "evict",
        lambda evict, pages: evict(pages - 1),
    ),
    cache.swap(
        "an eviction returns a page twice",
        "test_locked_pages_stay",
        "evict",
        lambda evict, pages: np.repeat(evict(pages), 2),
    ),
    cache.swap(
        "salts are ignored", "test_salts_are_apart", "match", lambda match, t, s: match(t, "a")
    ),
    cache.swap(
        "locks are ignored", "test_locked_pages_stay", "lock", lambda lock, match, delta: None
    ),
    cache.swap(
        "the first unlock releases all locks",
        "test_two_locks_hold_until_both_are_gone",
        "lock",
        lambda lock, match, delta: (
            lock(match, delta) if delta > 0 else (lock(match, -1), lock(match, -1))
        ),
    ),
    cache.swap("a match is longer than its pages", "test_whole_pages_only", "match", _longer_match),
    cache.swap("pages in reverse order", "test_whole_pages_only", "match", _mixed_pages),
    cache.swap(
        "duplicates are kept",
        "test_duplicates_are_given_back",
        "insert",
        lambda insert, tokens, pages, salt: insert(tokens, pages, salt)[:0],
    ),
    cache.swap(
        "pages that it keeps are given back",
        "test_whole_pages_only",
        "insert",
        lambda insert, tokens, pages, salt: (insert(tokens, pages, salt), pages)[1],
    ),
    cache.swap(
        "locked pages count as evictable",
        "test_locked_pages_stay",
        "size",
        lambda size: (size()[0], size()[0]),
    ),
    cache.swap(
        "the size is one page too large",
        "test_empty",
        "size",
        lambda size: (size()[0] + 1, size()[1]),
    ),
    cache.swap(
        "the last page of a prefix is not stored",
        "test_whole_pages_only",
        "insert",
        lambda insert, tokens, pages, salt: np.concatenate(
            [insert(tokens[:-SIZE], pages[:-1], salt), pages[-1:]]
        ),
    ),
    cache.swap(
        "the first token of a page is not compared",
        "test_branches",
        "match",
        lambda match, tokens, salt: match(np.where(np.arange(len(tokens)) < 8, tokens, 50), salt),
    ),
]

# ---- policies ------------------------------------------------------------------------------------


class Policy(PolicySuite):
    def make(self, plan: EnginePlan) -> Any:
        return Fcfs(FcfsOptions(), plan, Worker())


policy = Planter("policy", Policy)
PERMUTATION = "test_order_is_a_permutation"


def _in_place(order: Any, waiting: Any, cached: Any) -> Any:
    waiting.sort(key=lambda one: -one.arrival)
    return waiting


def _remembering() -> Any:
    calls: list[int] = []

    def victim(correct: Any, running: Any) -> Any:
        calls.append(len(running))
        return running[len(calls) % len(running)]

    return victim


def _counting(order: Any, waiting: Any, cached: Any) -> Any:
    for one in waiting:
        one.preemptions += 1
    return order(waiting, cached)


def _forgetting(order: Any, waiting: Any, cached: Any) -> Any:
    ordered = order(waiting, cached)
    cached.clear()
    return ordered


POLICY: list[Mutant] = [
    policy.swap("a request is left out", PERMUTATION, "order", lambda order, w, c: order(w, c)[1:]),
    policy.swap(
        "a request is named twice", PERMUTATION, "order", lambda order, w, c: order(w, c) + w[:1]
    ),
    policy.swap(
        "requests are copied",
        PERMUTATION,
        "order",
        lambda order, w, c: [copy.copy(one) for one in w],
    ),
    policy.swap("the queue is sorted in place", PERMUTATION, "order", _in_place),
    policy.swap("the queue itself is returned", PERMUTATION, "order", lambda order, w, c: w),
    policy.swap(
        "the order is random",
        PERMUTATION,
        "order",
        lambda order, w, c: random.sample(w, len(w)),
    ),
    policy.swap(
        "the last comes first",
        "test_a_newcomer_does_not_overtake_its_equals",
        "order",
        lambda order, w, c: order(w, c)[::-1],
    ),
    policy.swap(
        "equals change places",
        "test_equals_keep_the_queues_order",
        "order",
        lambda order, w, c: sorted(w, key=lambda one: (one.arrival, -one.id)),
    ),
    policy.swap(
        "requests are changed",
        "test_sequences_and_cached_prefixes_are_only_read",
        "order",
        _counting,
    ),
    policy.swap(
        "cached prefixes are changed",
        "test_sequences_and_cached_prefixes_are_only_read",
        "order",
        _forgetting,
    ),
    policy.swap(
        "the oldest is preempted",
        "test_a_victim_does_not_come_straight_back_first",
        "victim",
        lambda victim, running: running[0],
    ),
    policy.swap(
        "a copy is preempted",
        "test_victim_is_one_of_the_running",
        "victim",
        lambda v, r: copy.copy(r[-1]),
    ),
    policy.swap(
        "no request is preempted", "test_victim_is_one_of_the_running", "victim", lambda v, r: None
    ),
    policy.swap(
        "the victim depends on earlier calls",
        "test_victim_is_one_of_the_running",
        "victim",
        _remembering(),
    ),
]

# ---- schedulers ----------------------------------------------------------------------------------


class Schedules(SchedulerSuite):
    def make(self, plan: EnginePlan, clock: Any) -> Any:
        return Continuous(ContinuousOptions(), plan, Worker(), clock=clock)

    def cache(self, plan: EnginePlan) -> Any:
        return RadixCache(RadixOptions(), plan, Worker())


scheduler = Planter("scheduler", Schedules)
MANY = "test_many_sequences"


def _batch(change: Any) -> Any:
    def next_batch(correct: Any) -> Any:
        batch = correct()
        if batch is not None:
            change(batch)
        return batch

    return next_batch


def _swapped_pages(batch: Any) -> None:
    if batch.num_rows > 1:
        batch.pages = batch.pages[::-1].copy()


def _reversed_prompt(batch: Any) -> None:
    batch.prompt_ids = batch.prompt_ids[::-1].copy()


def _shorter(batch: Any) -> None:
    batch.kv_lens = batch.kv_lens.copy()
    batch.kv_lens[: batch.num_decodes] -= 1


def _result(change: Any) -> Any:
    def commit(correct: Any, batch: Any, result: Any) -> Any:
        return correct(batch, change(copy.copy(result)))

    return commit


def _of_one(result: Any) -> Any:
    result.counts = np.minimum(result.counts, 1)
    return result


def _good(result: Any) -> Any:
    result.bad = np.zeros_like(result.bad)
    return result


def _with(change: Any) -> Any:
    def add(correct: Any, sequence: Any) -> Any:
        changed = copy.copy(sequence)  # the expected tokens are those of the unchanged one
        change(changed)
        return correct(changed)

    return add


def _longer(sequence: Any) -> None:
    sequence.params = sequence.params.replace(max_tokens=sequence.params.max_tokens + 1)


def _leaking(bind: Any, table: Any, pages: Any, cache: Any, policy: Any) -> Any:
    bind(table, pages, cache, policy)
    pages.take(1)


def _unreported(output: Any) -> Any:
    if output is not None:
        output.admitted = []
    return output


def _silent(commit: Any, batch: Any, result: Any) -> Any:
    output = commit(batch, result)
    output.logprobs = []
    return output


class _Larger:
    """The plan of a scheduler with one size changed."""

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes

    def __call__(self, plan: EnginePlan, clock: Any) -> Any:
        sizes = {name: getattr(plan.sizes, name) * by for name, by in self._sizes.items()}
        changed = replace(plan, sizes=replace(plan.sizes, **sizes))
        return Continuous(ContinuousOptions(), changed, Worker(), clock=clock)


SCHEDULER: list[Mutant] = [
    scheduler.swap("rows have each other's pages", MANY, "next_batch", _batch(_swapped_pages)),
    scheduler.swap(
        "a prompt is reversed", "test_one_sequence", "next_batch", _batch(_reversed_prompt)
    ),
    scheduler.swap("a row is one token too short", MANY, "next_batch", _batch(_shorter)),
    scheduler.swap("accepted drafts are dropped", "test_speculation", "commit", _result(_of_one)),
    scheduler.swap(
        "NaN logits are ignored", "test_a_bad_row_costs_only_itself", "commit", _result(_good)
    ),
    scheduler.swap(
        "stop ids are ignored",
        "test_stop_id_is_kept_and_ends",
        "add",
        _with(lambda one: setattr(one, "stop_ids", frozenset())),
    ),
    scheduler.swap("one token too many", "test_one_sequence", "add", _with(_longer)),
    scheduler.swap("a page is lost", "test_one_sequence", "bind", _leaking),
    scheduler.swap(
        "an abort is ignored", "test_abort_at_any_moment", "abort", lambda abort, message: None
    ),
    scheduler.swap(
        "an abort ends all requests",
        "test_abort_at_any_moment",
        "abort",
        lambda abort, message: abort(replace_ids(message)),
    ),
    scheduler.swap("a flush drops nothing", "test_flush", "flush", lambda flush: True),
    scheduler.swap("log-probabilities are lost", "test_logprobs_go_with_tokens", "commit", _silent),
    scheduler.swap(
        "admissions are not reported",
        "test_admission_is_reported_once_with_its_wait",
        "take_pending",
        lambda take_pending: _unreported(take_pending()),
    ),
    scheduler.returning("chunks are too large", MANY, _Larger(chunk_size=2)),
    scheduler.returning(
        "the queue has no bound", "test_the_queue_is_bounded", _Larger(max_queued=9)
    ),
    scheduler.returning(
        "deadlines never pass",
        "test_deadlines",
        lambda plan, clock: Continuous(ContinuousOptions(), plan, Worker(), clock=lambda: 0.0),
    ),
    scheduler.returning(
        "the context has no limit",
        "test_a_prompt_as_long_as_the_context_is_refused",
        _Larger(context_length=4),
    ),
]


def replace_ids(message: Any) -> Any:
    """Return an abort of the sequences 0 to 9."""
    from glowplug.core.step.messages import Abort

    return Abort(list(range(10)), message.reason)


MUTANTS = [*CACHE, *POLICY, *SCHEDULER]

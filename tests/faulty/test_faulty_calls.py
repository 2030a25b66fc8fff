"""Faulty plugins that fail in a call for one request: it ends by name, others are right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import ComponentFailed, GlowplugError
from glowplug.core.step.messages import Submit, encode
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from tests.faulty.test_faulty_at_start import config, names_it, site as site
from tests.faulty.written import ORIGIN, write

MARKED = 13  #: ``max_tokens`` of the request that a component fails at
FIRST = 6  #: first token of its prompt
BUILT_IN = {"policy": "fcfs", "cache": "radix", "sampling": "torch"}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Fault:
    """A fault in a call for the marked request.

    Attributes:
        slot: slot of the component.
        body: body of its runtime class.
        said: part of the message.
        method: the method that fails.
        settings: settings of the configuration.
        prompt: tokens of each prompt.
    """

    slot: str
    body: str
    said: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    prompt: int = 4


#: beginning of each runtime class, which fails on some ranks
BEGINNING = """
    def __init__(self, options, plan, worker):
        super().__init__(options, plan, worker)
        self.fails = worker.rank in {ranks}

    def passes(self, unmarked):
        return not self.fails or all(unmarked)

"""
EVERY = range(8)
SHORT_OF_PAGES = {"memory": {"kv_tokens": 48}, "context_length": 47}
FAULTS = {
    "a policy that cannot order a request": Fault(
        "policy",
        "    def order(self, waiting, cached):\n"
        f"        assert self.passes(one.params.max_tokens != {MARKED} for one in waiting), 'no'\n"
        "        return super().order(waiting, cached)",
        "AssertionError: no",
        "in order",
    ),
    "a policy that cannot hold a request": Fault(
        "policy",
        "    def hold(self, sequence):\n"
        f"        return 0.0 / self.passes([sequence.params.max_tokens != {MARKED}])",
        "ZeroDivisionError",
        "in hold",
    ),
    "a policy that cannot reject a request": Fault(
        "policy",
        "    def reject(self, waiting):\n"
        f"        assert self.passes(one.params.max_tokens != {MARKED} for one in waiting), 'no'\n"
        "        return {}",
        "AssertionError: no",
        "in reject",
    ),
    "a policy that cannot make room for a request": Fault(
        "policy",
        "    def preempts(self, first, running):\n"
        f"        if first.params.max_tokens == {MARKED}:\n"
        "            raise LookupError('no room')",
        "LookupError: no room",
        "in preempts",
        {"scheduler": {"max_running_requests": 1}},
    ),
    "a policy that cannot choose a victim": Fault(
        "policy",
        "    def victim(self, running):\n"
        f"        assert self.passes(one.params.max_tokens != {MARKED} for one in running), 'no'\n"
        "        return super().victim(running)",
        "AssertionError: no",
        "in victim",
        SHORT_OF_PAGES,
        prompt=12,
    ),
    "a cache that cannot find a prefix": Fault(
        "cache",
        "    def match(self, tokens, salt):\n"
        f"        if not self.passes([tokens[0] != {FIRST}]):\n"
        "            raise KeyError('lost')\n"
        "        return super().match(tokens, salt)",
        "KeyError: 'lost'",
        "in match",
    ),
    "a cache that cannot find the prefix that a policy asks for": Fault(
        "cache",
        "    def match(self, tokens, salt):\n"
        f"        if not self.passes([tokens[0] != {FIRST}]):\n"
        "            raise KeyError('lost')\n"
        "        return super().match(tokens, salt)",
        "KeyError: 'lost'",
        "in match",
        {"policy": {"use": "longest_prefix"}},
    ),
    "a cache that cannot take the pages of an answer": Fault(
        "cache",
        "    def insert(self, tokens, pages, salt):\n"
        f"        if not self.passes([tokens[0] != {FIRST}]):\n"
        "            return pages[5000]\n"
        "        return super().insert(tokens, pages, salt)",
        "IndexError",
        "in insert",
    ),
    "a cache that cannot take the pages of a prompt": Fault(
        "cache",
        "    def insert(self, tokens, pages, salt):\n"
        f"        if not self.passes([tokens[0] != {FIRST}]):\n"
        "            return pages[5000]\n"
        "        return super().insert(tokens, pages, salt)",
        "IndexError",
        "in insert",
        prompt=40,
    ),
    "a cache that cannot take the pages of a preempted request": Fault(
        "cache",
        "    def insert(self, tokens, pages, salt):\n"
        f"        if not self.passes([tokens[0] != {FIRST}]):\n"
        "            return pages[5000]\n"
        "        return super().insert(tokens, pages, salt)",
        "IndexError",
        "in insert",
        SHORT_OF_PAGES,
        prompt=12,
    ),
    "a sampler that cannot take a request": Fault(
        "sampling",
        "    cleared = frozenset()\n"
        "    def join(self, row, params, *rest):\n"
        "        super().join(row, params, *rest)\n"
        f"        assert self.passes([params.max_tokens != {MARKED}]), 'unlucky'\n"
        "        self.cleared -= {row}\n"
        "    def leave(self, row):\n"
        "        super().leave(row)\n"
        "        self.cleared |= {row}\n"
        "    def plan_step(self, batch):\n"
        "        assert self.cleared.isdisjoint(batch.rows.tolist()), 'a row is not set up'\n"
        "        super().plan_step(batch)",
        "AssertionError: unlucky",
        "in join",
    ),
}


def prompts(length: int, count: int = 3) -> list[list[int]]:
    """Return prompts of ``length`` tokens; that of number 1 begins with ``FIRST``."""
    return [
        [5 + number, *((7 * at + number) % 150 for at in range(1, length))]
        for number in range(count)
    ]


def asked(length: int, *outputs: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of requests of these numbers of output tokens."""
    return prompts(length, len(outputs)), [SamplingParams(max_tokens=n, **GREEDY) for n in outputs]


def pages_conserved(llm: LLM) -> None:
    """Check that no request holds a page, and that each page has one owner."""
    pages = llm.control("check")
    assert pages["running"] == 0 and pages["free"] + pages["cached"] == pages["total"]
    assert pages["evictable"] == pages["cached"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_the_request_ends_by_name_and_others_are_right(
    site: Path, name: str, overlap: bool
) -> None:
    fault = FAULTS[name]
    write(site, fault.slot, BEGINNING.format(ranks=EVERY) + fault.body)
    chosen = {**config(site, fault.slot), **fault.settings}
    scheduler = {**chosen.get("scheduler", {}), "overlap": overlap}
    chosen["scheduler"] = scheduler
    requests = asked(fault.prompt, 20, MARKED, 20)
    with LLM(**chosen) as llm:
        failed = llm.generate(*requests)
        pages_conserved(llm)
        again = llm.generate(*requests)
        pages_conserved(llm)
    with LLM(**{**chosen, fault.slot: {"use": BUILT_IN[fault.slot]}}) as llm:
        right = llm.generate(*requests)
    for found in (failed, again):
        assert [found[i].token_ids for i in (0, 2)] == [right[i].token_ids for i in (0, 2)]
        assert found[1].finish_reason == "error" and found[1].error is not None
        names_it(found[1].error, fault.said, f"phase serve, {fault.method}")
        assert f"{fault.slot} 'cracked' ({ORIGIN})" in found[1].error
    assert right[1].finish_reason == "length"


def test_a_policy_that_orders_no_two_requests_ends_the_newest(site: Path) -> None:
    """The oldest request alone is ordered, so the calls end after as many faults as requests."""
    write(site, "policy", "    def order(self, waiting, cached):\n        return sorted(waiting)")
    chosen = config(site, "policy")
    requests = asked(4, 8, 8, 8)
    with LLM(**chosen) as llm:
        found = llm.generate(*requests)
        pages_conserved(llm)
    with LLM(**{**chosen, "policy": {"use": "fcfs"}}) as llm:
        assert found[0].token_ids == llm.generate(*requests)[0].token_ids
    for answer in found[1:]:
        assert answer.finish_reason == "error" and answer.error is not None
        names_it(answer.error, "TypeError", "phase serve, in order")


def test_a_policy_may_refuse_a_request_with_an_error_of_its_own(site: Path) -> None:
    body = (
        "    def hold(self, sequence):\n"
        "        from glowplug.core.errors import RequestError\n"
        "        raise RequestError('too busy', code='busy')"
    )
    write(site, "policy", body)
    with LLM(**config(site, "policy")) as llm:
        (found,) = llm.generate(*asked(4, 8))
    assert found.error == "too busy"


# ---- several ranks -------------------------------------------------------------------------------

RANKS = {"parallel": [{"use": "tensor", "size": 2}]}
GROUPS = {"parallel": [{"use": "tensor", "size": 4}, {"use": "dp_attention", "size": 2}]}
ON_RANKS = {
    name: FAULTS[name]
    for name in (
        "a policy that cannot order a request",
        "a policy that cannot hold a request",
        "a cache that cannot find a prefix",
        "a cache that cannot take the pages of an answer",
        "a sampler that cannot take a request",
    )
}


def ranks_of(site: Path, slot: str, layout: dict[str, Any]) -> RankSet:
    """Return the ranks of an engine with the faulty component, as threads."""
    chosen = {**config(site, slot), **layout}
    del chosen["executor"]
    return RankSet(rank_plan(chosen))


def messages() -> list[Submit]:
    """Return three requests, the second of which is marked."""
    lengths = (20, MARKED, 20)
    return [submit(n + 1, prompt, lengths[n]) for n, prompt in enumerate(prompts(4))]


@pytest.mark.parametrize("layout", [RANKS, GROUPS], ids=["two ranks", "two groups"])
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_fault_of_all_ranks_ends_the_request_alone(
    site: Path, name: str, layout: dict[str, Any]
) -> None:
    fault = FAULTS[name]
    write(site, fault.slot, BEGINNING.format(ranks=EVERY) + fault.body)
    with ranks_of(site, fault.slot, layout) as ranks:
        found = ranks.run(messages())
        ranks.check_idle()
    assert [len(found[id].tokens) for id in (1, 3)] == [20, 20]
    end = found[2].finished
    assert end is not None and end.error_code == ComponentFailed.CODE
    names_it(end.error or "", fault.said, f"phase serve, {fault.method}")


@pytest.mark.parametrize(
    "name",
    [
        "a policy that cannot hold a request",
        "a policy that cannot order a request",
        "a cache that cannot find a prefix",
    ],
)
def test_nothing_is_launched_in_the_turn_of_a_fault(site: Path, name: str) -> None:
    """Ranks compare their faults before they launch a step without the request."""
    fault = FAULTS[name]
    write(site, fault.slot, BEGINNING.format(ranks=EVERY) + fault.body)
    with ranks_of(site, fault.slot, {}) as ranks:
        ranks.turn(messages())
        assert ranks.collected[2].finished is not None
        assert ranks.engines[0].scheduler.load().steps == 0
        ranks.turn()
        assert ranks.engines[0].scheduler.load().steps == 1


def serve(ranks: RankSet) -> None:
    """Run turns of every rank, as processes do, until one of them fails."""
    frames = [encode(messages())]

    def loop(rank: int) -> None:
        engine = ranks.engines[rank]
        engine.turn(frames if rank == 0 else ())
        for _ in range(200):
            engine.turn()

    ranks._each(loop)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_fault_of_one_rank_ends_the_engine(site: Path, name: str, rank: int) -> None:
    fault = FAULTS[name]
    write(site, fault.slot, BEGINNING.format(ranks=[rank]) + fault.body)
    with ranks_of(site, fault.slot, RANKS) as ranks, pytest.raises(GlowplugError) as caught:
        serve(ranks)
    names_it(str(caught.value), fault.said, f"phase serve, {fault.method}")
    said = str(caught.value)
    assert "on some ranks only" in said or "on this rank, perhaps on no other" in said


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_fault_of_one_rank_of_a_group_ends_the_engine(site: Path, name: str, rank: int) -> None:
    """The marked request is the second group's."""
    fault = FAULTS[name]
    write(site, fault.slot, BEGINNING.format(ranks=[rank]) + fault.body)
    with ranks_of(site, fault.slot, GROUPS) as ranks, pytest.raises(GlowplugError) as caught:
        serve(ranks)
    assert "rank 3 proposes another step than rank 2" in str(caught.value)

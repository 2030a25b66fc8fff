"""The offline engine of one rank of a layout, for ``glowplug bench one-batch --alone``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.protocols import Executor, Worker
from glowplug.core.startup.components import build_component
from glowplug.core.startup.lone_rank import plan_of_ranks
from glowplug.entrypoints.bench.alone.copies import HOST
from glowplug.entrypoints.bench.others.in_process import BatchTimes, random_ids, run_static_batch
from glowplug.entrypoints.bench.ranks.exchange_times import (
    EXCHANGE,
    CountedExchange,
    ExchangeTimes,
)
from glowplug.entrypoints.front.llm import LLM

FLAG = "--alone"
COUNTED_TOKENS = 8  #: tokens that sequences generate while exchanges are counted
NOTE = (
    "one rank of the layout on one device, without the others: every exchange was replaced by a "
    "copy of the same size on the device, the answers are meaningless, and the times of the "
    "exchanges and of waiting for other ranks are not in it"
)


class LoneRankLLM(LLM):
    """One rank of a configuration's layout, in this process and on one device.

    The plan is that of all ranks. Groups other than the rank's seem to have its tokens.

    Args:
        rank: number of the rank.
        batches: numbers of sequences, of all groups together, that will run at once.
        config: as for ``LLM``.

    Raises:
        ValueError: the layout has one rank, several hosts or no such rank, or its groups cannot
            share a batch equally. Nothing was loaded.
        PlanRefused: see ``LLM``.
    """

    def __init__(self, rank: int, batches: Sequence[int] = (), **config: Any) -> None:
        self.rank = rank
        self._batches = batches
        super().__init__(**config)

    def _make_plan(self, config: dict[str, Any]) -> EnginePlan:
        """Return the plan of all ranks, on as many devices of this machine's kind."""
        hosts = config.get("executor", {}).get("hosts", 1)
        if hosts > 1:
            raise ValueError(f"{FLAG}: the layout has {hosts} hosts; leave --nnodes out")
        plan = plan_of_ranks(config, self._plugins, f"bench one-batch {FLAG}")
        if plan.ranks == 1:
            raise ValueError(
                f"{FLAG}: the layout has one rank, which runs by itself: leave {FLAG} out, or give "
                "the layout, such as --tp 8"
            )
        if not 0 <= self.rank < plan.ranks:
            raise ValueError(
                f"{FLAG} {self.rank}: the layout has {plan.ranks} ranks; give 0 to {plan.ranks - 1}"
            )
        groups = plan.sizes.groups
        uneven = [batch for batch in self._batches if batch > groups and batch % groups]
        if uneven:
            raise ValueError(
                f"{FLAG}: all groups have as many sequences as this rank's: a batch of {uneven[0]} "
                f"is not a multiple of the {groups} groups"
            )
        return plan

    def _start(self) -> Executor:
        """Build the rank in this process."""
        from glowplug.entrypoints.bench.alone.rank import builder_of

        self._plugins.call_each("plan_ready", plan=self.plan)
        found = self._plugins.find("executor", "inline")
        assert found is not None, "the inline executor is built in"
        choice = Choice("executor", "inline", found.component.factory, {"use": "inline"})
        executor: Any = build_component(self._plugins, choice, self.plan, Worker())
        try:
            executor.start(self.plan, builder_of(self.rank))
        except BaseException:
            executor.stop()
            raise
        return executor  # type: ignore[no-any-return]

    @cached_property
    def _about(self) -> dict[str, Any]:
        return self.control("alone")

    def _rows(self, batch: int) -> int:
        """Return the sequences of a batch that this rank's group runs."""
        return -(-batch // self.plan.sizes.groups)

    def _prompts(self, rng: random.Random, batch: int, length: int) -> list[list[int]]:
        """Return random prompts of tokens whose embeddings this rank holds."""
        first, count = self._about["tokens"]
        rows = self._rows(batch)
        return [[first + id for id in ids] for ids in random_ids(rng, rows, length, count)]

    def run_batch(self, rng: random.Random, batch: int, length: int, output: int) -> BatchTimes:
        """Run this rank's share of a static batch, and return the times of the whole batch.

        Args:
            rng: source of the prompts.
            batch: number of sequences of all groups.
            length: prompt tokens of each.
            output: tokens to generate for each.

        Raises:
            RequestError: there are fewer sequences than groups, and the layout has no exchange of
                experts' tokens.
        """
        groups = self.plan.sizes.groups
        busy = min(batch, groups)
        if groups > 1:
            self.control("busy_groups", groups=busy)
        times = run_static_batch(self, self._prompts(rng, batch, length), output)
        return replace(times, batch=batch, gained=tuple(busy * count for count in times.gained))

    def record(
        self, rng: random.Random, times: BatchTimes, exchange_times: ExchangeTimes | None
    ) -> dict[str, Any]:
        """Return the keys of a batch's record that describe the rank and the replaced exchanges.

        Args:
            rng: source of prompts.
            times: times of the batch.
            exchange_times: measured times of exchanges; None: unknown.
        """
        step = self.step_exchanges(rng, times) if times.decodes else []
        found: dict[str, Any] = {
            "alone": True,
            "about": NOTE,
            "rank": self.rank,
            "ranks": self.plan.ranks,
            "rows_of_rank": self._rows(times.batch),
            "routing": self._about["routing"],
            "exchanges": step,
            "copied_bytes": sum(one["bytes"] * one["count"] for one in step if one["axis"] != HOST),
        }
        if exchange_times is None or not step:
            return found
        try:
            spent = 1e3 * exchange_seconds(step, exchange_times)
        except ValueError as error:
            return found | {"exchange_ms": None, "exchange_error": str(error)}
        whole = times.median_decode * 1e3 + spent
        return found | {"exchange_ms": spent, "decode_with_exchanges_ms": whole}

    def step_exchanges(self, rng: random.Random, times: BatchTimes) -> list[dict[str, Any]]:
        """Return the exchanges of a decode step of the batch ``times``, each with its "count".

        They are those of the most frequent step of a short run without graphs.
        """
        self.control("count_exchanges", on=True)
        try:
            self.run_batch(rng, times.batch, times.input_len, min(times.output_len, COUNTED_TOKENS))
        finally:
            turns = self.control("count_exchanges", on=False)["turns"]
        return most_frequent([turn for turn in turns if any(one["axis"] != HOST for one in turn)])


def most_frequent(turns: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the most frequent of some turns by the exchanges on the device.

    The host's exchanges are those of the first such turn.
    """
    keys = [
        frozenset(tuple(sorted(one.items())) for one in turn if one["axis"] != HOST)
        for turn in turns
    ]
    (best, _), *_ = Counter(keys).most_common(1)
    return turns[keys.index(best)]


def exchange_seconds(step: Sequence[dict[str, Any]], times: ExchangeTimes) -> float:
    """Return the seconds of a step's exchanges on devices.

    An expert exchange is taken as a whole, without the exchanges that it consists of.

    Args:
        step: exchanges as ``LoneRankLLM.step_exchanges`` returns them.
        times: measured times.

    Raises:
        ValueError: an exchange was not measured.
    """
    found = 0.0
    for one in step:
        if one["axis"] != HOST and one["part_of"] != EXCHANGE:
            size = one["tokens"] if one["operation"] == EXCHANGE else one["bytes"]
            exchange = CountedExchange(one["operation"], one["ranks"], size, one["count"])
            found += exchange.count * times.seconds(exchange)
    return found

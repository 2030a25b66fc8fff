"""The ranks that run one combination after the other: processes that stay, each of which builds the
engine of a plan, serves the prompts and gives the engine up.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import msgspec
import torch

from glowplug.core.engine.engine import Engine
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.startup.build_rank import build_rank
from glowplug.core.startup.components import build_component, load_plugins_for, make_worker
from glowplug.core.startup.phases import Note, Report
from glowplug.core.step.messages import (
    Control,
    Outbound,
    Reply,
    Stats,
    StepOutput,
    Submit,
    decode_outbound,
    encode,
    packed_ids,
)
from glowplug.core.step.request import SamplingParams
from glowplug.core.testing.harness.drive import Collected, collect
from glowplug.entrypoints.bench.ranks.measured_rank import MeasuredRank
from glowplug.entrypoints.bench.ranks.rank_processes import RankProcesses
from tests.gpu.combinations import Answers

CHECK = 1  #: id of the Control that checks pool and cache


class RankPair(RankProcesses):
    """The processes of the ranks; a context manager that ends them.

    The first plan starts them. After a failure they are started anew.
    """

    def __init__(self, plugins: PluginSet) -> None:
        super().__init__(plugins, build, "serve")

    def answers(self, plan: EnginePlan, prompts: Sequence[list[int]], tokens: int) -> Answers:
        """Return the greedy answers of the plan's ranks, ``tokens`` to each prompt.

        Raises:
            EngineDead: a rank has failed.
            AssertionError: a request or the check of pool and cache ended with an error.
        """
        reply = self.send(plan, {"prompts": list(prompts), "tokens": tokens})
        assert reply.ok, reply.error
        return Answers(**reply.data)


# ---- in a rank's process -------------------------------------------------------------------------


def build(
    plan: EnginePlan, rank: int, plugins: PluginSet, report: Report, rendezvous: str, note: Note
) -> ServingRank:
    """Return the loop of one rank; see ``core.startup.build_rank.build_rank``."""
    worker = make_worker(plan, rank, rendezvous)
    if worker.device != "cpu":
        torch.cuda.set_device(worker.device)
    collectives = build_component(plugins, plan.choice("collectives"), plan, worker)
    report("ready", 1, 1)
    return ServingRank(collectives, plugins, rank, rendezvous)


class ServingRank(MeasuredRank):
    """A rank's loop that serves the prompts of each message with an engine of its own."""

    def _reply(self, message: Control) -> Reply:
        plan = EnginePlan.from_json(message.args["plan"].encode())
        engine = build_rank(
            plan,
            self._rank,
            load_plugins_for(plan),
            lambda phase, done, total: None,
            f"{self._rendezvous}-{message.id}",
            lambda line: None,
        )
        self._closed.append(engine.collectives)
        prompts = message.args["prompts"]
        try:
            outputs = served(engine, prompts, message.args["tokens"])
        finally:
            engine.close()
        del engine
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
        every = self.collectives.all_gather_bytes(encode(outputs))
        try:
            found = answers_of([decode_outbound(one) for one in every], len(prompts))
        except AssertionError as error:  # the same on every rank
            return Reply(message.id, False, error=str(error))
        return Reply(message.id, True, msgspec.to_builtins(found))


def served(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[Outbound]:
    """Serve two waves of the prompts, check pool and cache, and return this rank's outputs.

    The second wave requests log-probabilities. Rank 0 leads; other ranks follow until it stops.
    """
    found: list[Outbound] = []
    if not engine.leads:
        while (outputs := engine.turn()) is not None:
            found += outputs
        return found
    for wave in range(2):
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=wave or None
        )
        messages = [
            Submit(wave * len(prompts) + number, packed_ids(prompt), params)
            for number, prompt in enumerate(prompts)
        ]
        found += engine.turn([encode(messages)]) or []
        while not engine.idle:
            found += engine.turn() or []
    found += engine.turn([encode([Control(CHECK, "check")])]) or []
    engine.turn(stop=True)
    return found


def answers_of(outputs: Sequence[Sequence[Outbound]], prompts: int) -> Answers:
    """Return the answers in the outputs of all ranks, for this number of prompts.

    Raises:
        AssertionError: a request or the check of pool and cache ended with an error, or an output
            is one that no engine may return.
    """
    seen = {number: Collected() for number in range(2 * prompts)}
    stats: dict[int, Stats] = {}
    for output in (output for own in outputs for output in own):
        if isinstance(output, Reply):
            assert output.ok, output.error
        elif isinstance(output, StepOutput):
            collect(seen, output)
            errors = [one.error for one in output.finished if one.reason == "error"]
            assert not errors, errors[0]
            if output.stats is not None:
                stats[output.stats.group] = output.stats
    first, again = (
        [seen[wave * prompts + number] for number in range(prompts)] for wave in range(2)
    )
    return Answers(
        [one.tokens for one in first],
        [one.tokens for one in again],
        [one.logprobs for one in again],
        sum(one.drafted_tokens for one in stats.values()),
        sum(one.accepted_tokens for one in stats.values()),
    )

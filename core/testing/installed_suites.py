"""Conformance suites for components as they are installed, with their default options.

The other suites need inputs that only a component's author can give, such as a checkpoint or texts
with their pieces; ``suite_of`` has none for their slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import Registration, import_factory
from glowplug.core.plugin.offers import AttentionOffers, CacheOffers, SpeculativeOffers
from glowplug.core.protocols import Limits, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.attention import MhaSuite, MlaSuite
from glowplug.core.testing.suites.cache import CacheSuite
from glowplug.core.testing.suites.ops import OpsSuite
from glowplug.core.testing.suites.parallel import CollectivesSuite, ParallelSuite
from glowplug.core.testing.suites.policy import PolicySuite
from glowplug.core.testing.suites.sampler import SamplerSuite
from glowplug.core.testing.suites.scheduler import SchedulerSuite
from glowplug.core.testing.suites.speculative import SpeculativeSuite
from glowplug.core.testing.suites.tiers import TieredCacheSuite

#: function from a plan and a worker to a new runtime object
Make = Callable[[EnginePlan, Worker], Any]


def suite_of(slot: str, found: Registration) -> type | None:
    """Return the test class that runs the suite of a slot on a component.

    Args:
        slot: name of the slot.
        found: the component.

    Returns:
        The class; None if the suite needs inputs of the component's author.

    Raises:
        PluginLoadError: the runtime class cannot be imported.
        ValueError: an option without a default.
    """
    component = found.component
    if slot not in _SUITES:
        return None
    options = component.options(use=component.name)
    factory = import_factory(component, f"{found.distribution} {found.version}".rstrip())
    made: type | None = _SUITES[slot](
        lambda plan, worker: factory(options, plan, worker), component.offers, options
    )
    return made


def _attention(make: Make, offers: Any, options: Any) -> type:
    assert isinstance(offers, AttentionOffers)

    class Test(MlaSuite if "mla" in offers.kinds else MhaSuite):  # type: ignore[misc]
        tree = offers.tree

        def make(self, plan: EnginePlan, worker: Worker) -> Any:
            return make(plan, worker)

    return Test


def _cache(make: Make, offers: Any, options: Any) -> type:
    assert isinstance(offers, CacheOffers)

    class Test(TieredCacheSuite if offers.tier else CacheSuite):  # type: ignore[misc]
        def make(self, plan: EnginePlan) -> Any:
            return make(plan, Worker())

    return Test


def _policy(make: Make, offers: Any, options: Any) -> type:
    class Test(PolicySuite):
        def make(self, plan: EnginePlan) -> Any:
            return make(plan, Worker())

    return Test


def _scheduler(make: Make, offers: Any, options: Any) -> type:
    class Test(SchedulerSuite):
        def make(self, plan: EnginePlan, clock: Callable[[], float]) -> Any:
            return make(plan, Worker(clock=clock))

    return Test


def _parallel(make: Make, offers: Any, options: Any) -> type:
    class Test(ParallelSuite):
        def make(self, rank: int) -> Any:
            return make(replace(bare_plan(), mesh={"tp": 1}), Worker(rank=rank))

    return Test


def _speculative(make: Make, offers: Any, options: Any) -> type | None:
    assert isinstance(offers, SpeculativeOffers)
    if offers.nextn_layer or offers.eagle_head or offers.whole_model:
        return None  # its author builds the draft model
    plan = bare_plan(width=options.width(), draft_shape=options.draft_shape())

    class Test(SpeculativeSuite):
        shape = options.draft_shape()

        def make(self, limits: Limits) -> Any:
            made = make(plan, Worker())
            made.reserve(limits)
            return made

    return Test


def _alone(suite: type) -> Callable[[Make, Any, Any], type]:
    """Return the function for a suite whose ``make`` has no arguments."""

    def made(make: Make, offers: Any, options: Any) -> type:
        class Test(suite):  # type: ignore[misc]
            def make(self) -> Any:
                return make(bare_plan(), Worker(device="cpu"))

        return Test

    return made


#: slot -> function from (make, offers, options) to a test class
_SUITES: dict[str, Callable[[Make, Any, Any], type | None]] = {
    "attention": _attention,
    "cache": _cache,
    "collectives": _alone(CollectivesSuite),
    "ops": _alone(OpsSuite),
    "parallel": _parallel,
    "policy": _policy,
    "sampling": _alone(SamplerSuite),
    "scheduler": _scheduler,
    "speculative": _speculative,
}

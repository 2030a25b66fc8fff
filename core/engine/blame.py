"""Attribution of an exception, or of a call that does not return, to the component at fault.

It reads the stack of an exception that has already been raised, or of a rank that stands still, so
nothing is done per step. A frame belongs to a component if its module is the one of the component's
runtime class or, for a third party's component, a module of the same top-level package.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from types import FrameType

import numpy as np

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.loading import (
    BUILT_IN,
    PluginSource,
    component_failure,
    component_fix,
    describe,
    plugin_fix,
)
from glowplug.core.step.batch import Batch, StepResult
from glowplug.core.step.messages import RunningCall


def failure_of(error: BaseException, plan: EnginePlan | None, phase: str) -> str:
    """Return the reason of a failure, which names the component that raised ``error``.

    Args:
        error: the exception.
        plan: the plan, whose components may be at fault; None: not known yet.
        phase: the rank's phase, such as "kv" or "serve".

    Returns:
        The component with distribution, version, phase and method, then the exception and what to
        do. Type and text of the exception alone if no component raised it, or if it is one of the
        engine's own errors, whose text says all.
    """
    stated = f"{type(error).__name__}: {error}"
    if plan is None or isinstance(error, GlowplugError):
        return stated
    found = component_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)], plan)
    others = _third_party(plan)
    if found is None:
        return f"{stated}{others}"
    choice, method = found
    text = component_failure(
        choice.slot,
        choice.name,
        choice.distribution,
        choice.version,
        f"{phase}, in {method}",
        describe(error),
    )
    return f"{text}{others}" if choice.distribution == BUILT_IN else text


def _third_party(plan: EnginePlan) -> str:
    """Return a line with the plan's third-party components; "" if it has none.

    The results of one of them may be the cause of an exception in built-in code.
    """
    titles = [one.title for one in plan.choices if one.distribution != BUILT_IN]
    if not titles:
        return ""
    named = ", ".join(dict.fromkeys(titles))
    return f"\n    possible cause: what {named} returned | fix: run its conformance suite"


def component_of(frames: Iterable[FrameType], plan: EnginePlan) -> tuple[Choice, str] | None:
    """Return the innermost component that runs in ``frames``, and the method that was called.

    Args:
        frames: a stack, the outermost frame first.
        plan: the plan, whose components are searched.

    Returns:
        The component's choice, and the name of its function that other code called.
    """
    owners = [(frame, _owner(frame, plan)) for frame in frames]
    found: tuple[Choice, str] | None = None
    previous: Choice | None = None
    for frame, owner in owners:
        if owner is not None and owner != previous:
            found = owner, frame.f_code.co_name
        previous = owner
    return found


def running_call(
    frames: Sequence[FrameType], plan: EnginePlan, sources: Iterable[PluginSource] = ()
) -> RunningCall | None:
    """Return the innermost call of a component in ``frames``, or else of a third party's plugin.

    Args:
        frames: a stack, the outermost frame first.
        plan: the plan, whose components are searched.
        sources: the loaded plugins, whose hooks are searched if no component runs.

    Returns:
        The call; None if only the engine's own code runs.
    """
    found = component_of(frames, plan)
    if found is not None:
        choice, method = found
        fix = component_fix(choice.slot, choice.distribution, choice.version)
        return RunningCall(choice.title, method, fix, choice.slot == "collectives")
    packages = {
        source.target.partition(":")[0].partition(".")[0]: source
        for source in sources
        if source.distribution != BUILT_IN
    }
    for frame in frames:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in packages:
            source = packages[package]
            return RunningCall(f"plugin {source.label}", frame.f_code.co_name, plugin_fix(source))
    return None


def _owner(frame: FrameType, plan: EnginePlan) -> Choice | None:
    """Return the component that the code of ``frame`` belongs to, or None."""
    module = str(frame.f_globals.get("__name__", ""))
    every = plan.every_choice
    choices = [choice for choice in every if choice.slot != "executor"]  # it runs the others
    same = [choice for choice in choices if choice.factory.partition(":")[0] == module]
    if not same:
        package = module.partition(".")[0]
        same = [
            choice
            for choice in choices
            if choice.distribution != BUILT_IN and choice.factory.partition(".")[0] == package
        ]
    if len(same) > 1:
        classes = {kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__}
        same = [one for one in same if one.factory.rpartition(":")[2] in classes] or same
    return same[0] if same else None


def result_fault(plan: EnginePlan, batch: Batch, result: StepResult) -> str:
    """Return how the results of a step break the contract of algorithm and sampler; "" if not.

    The self-test calls it, so wrong shapes and token ids end the start by name, not a later step
    elsewhere.
    """
    width = plan.sizes.width
    rows = batch.num_rows
    wanted = {"tokens": (rows, width), "counts": (rows,), "bad": (rows,)}
    for name, shape in wanted.items():
        found = getattr(result, name)
        if found.shape != shape:
            return _result_failure(plan, f"{name} of shape {list(found.shape)}, not {list(shape)}")
    return _count_fault(plan, batch, result) or _token_fault(plan, result)


def _count_fault(plan: EnginePlan, batch: Batch, result: StepResult) -> str:
    """Return how the counts of a step break the contract; "" if they do not."""
    counts = result.counts
    samples = batch.samples
    width = plan.sizes.width
    if (counts > width).any() or (counts[samples] < 1).any() or counts[~samples].any():
        expected = f"1 to {width} for rows that sample, 0 for others"
        return _result_failure(plan, f"counts {counts.tolist()}, not {expected}")
    return ""


def _token_fault(plan: EnginePlan, result: StepResult) -> str:
    """Return the gained token that the vocabulary does not have; "" if there is none."""
    vocab = plan.facts.model.vocab_size
    gained = result.tokens[np.arange(plan.sizes.width) < result.counts[:, None]]
    outside = gained[(gained < 0) | (gained >= vocab)]
    if not len(outside):
        return ""
    return _result_failure(plan, f"token {int(outside[0])} of a vocabulary of {vocab}")


def _result_failure(plan: EnginePlan, reason: str) -> str:
    """Return the message for wrong results, which names algorithm and sampler.

    The first third-party component of the two is named as the cause.
    """
    pair = [plan.choice("speculative"), plan.choice("sampling")]
    cause, other = sorted(pair, key=lambda choice: choice.distribution == BUILT_IN)
    return component_failure(
        cause.slot,
        cause.name,
        cause.distribution,
        cause.version,
        "self-test",
        f"a step with {other.title} yields {reason}",
    )

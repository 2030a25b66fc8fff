"""Faults planted in quantization schemes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.suites.quantization import QuantizationSuite
from tests.mutants.framework import Mutant, Planter


class Schemes(QuantizationSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> Any:
        return make("quantization", "none", plan, worker)


schemes = Planter("quantization", Schemes)
FUSED = "test_a_fused_linear_layer_is_the_product"
EXPERTS = "test_experts_are_summed_by_weight"


def shaped(fault: str, by: str, method: str, **changes: Callable[[Any], Any]) -> Mutant:
    """Return the mutant that makes layers of another shape."""

    def body(correct: Any, shape: Any) -> Any:
        return correct(replace(shape, **{name: f(shape) for name, f in changes.items()}))

    return schemes.swap(fault, by, method, body)


def applied(fault: str, by: str, method: str, member: str, body: Callable[..., Any]) -> Mutant:
    """Return the mutant whose layers' ``member`` is ``body``, called with the correct one first."""

    def change(correct: Any, shape: Any) -> Any:
        made = correct(shape)
        inner = getattr(made, member)
        setattr(made, member, lambda *given: body(inner, *given))
        return made

    return schemes.swap(fault, by, method, change)


def _doubling(apply: Any, x: Tensor) -> Tensor:
    found: Tensor = apply(x)
    x.mul_(2)
    return found


def _one_weight() -> Any:
    kept: list[Any] = []

    def linear(correct: Any, shape: Any) -> Any:
        made = correct(shape)
        kept.append(made)
        made.apply = lambda x: type(made).apply(kept[-1], x)
        return made

    return linear


MUTANTS = [
    shaped(
        "slices of rows are ignored",
        "test_a_rank_has_its_rows",
        "linear",
        row_starts=lambda s: (0,) * len(s.parts),
    ),
    shaped(
        "slices of columns are ignored",
        "test_a_rank_has_its_columns",
        "linear",
        col_start=lambda s: 0,
    ),
    shaped("the bias is left out", "test_a_bias_is_added", "linear", bias=lambda s: False),
    applied(
        "later ranks add the bias, too",
        "test_a_rank_has_its_columns",
        "linear",
        "finalize",
        lambda f: None,
    ),
    applied("fused parts are exchanged", FUSED, "linear", "apply", lambda f, x: f(x).roll(1, -1)),
    applied("the product is half precision", FUSED, "linear", "apply", lambda f, x: f(x).half()),
    applied(
        "the product is rounded", FUSED, "linear", "apply", lambda f, x: f(x).bfloat16().to(x.dtype)
    ),
    applied("the activations are changed", FUSED, "linear", "apply", _doubling),
    applied(
        "tokens are normed by the step",
        "test_a_token_does_not_depend_on_the_others",
        "linear",
        "apply",
        lambda f, x: f(x) * (1 + 0.01 * len(x)),
    ),
    applied(
        "the dense weight is transposed",
        "test_the_dense_weight_is_the_one_that_is_applied",
        "linear",
        "dense",
        lambda f: f().t(),
    ),
    applied("a part has no target", FUSED, "linear", "targets", lambda f: iter(list(f())[1:])),
    applied(
        "targets have the layer's name",
        "test_each_part_has_targets_under_its_name",
        "linear",
        "targets",
        lambda f: (setattr(t, "name", f"m.{t.name.split('.')[-1]}") or t for t in f()),
    ),
    schemes.swap(
        "layers share a weight", "test_layers_have_weights_of_their_own", "linear", _one_weight()
    ),
    applied(
        "weights of experts are ignored",
        EXPERTS,
        "experts",
        "apply",
        lambda f, x, ids, w: f(x, ids, torch.ones_like(w)),
    ),
    applied(
        "only the first expert counts",
        EXPERTS,
        "experts",
        "apply",
        lambda f, x, ids, w: f(x, ids[:, :1], w[:, :1]),
    ),
    applied(
        "experts of other ranks are the last one",
        "test_experts_of_other_ranks_add_nothing",
        "experts",
        "apply",
        lambda f, x, ids, w: f(x, ids.clamp(min=0), w),
    ),
    shaped(
        "a part of an expert is its first",
        "test_a_rank_has_its_part_of_each_expert",
        "experts",
        inter_start=lambda s: 0,
    ),
    applied(
        "the activation is on the wrong half",
        EXPERTS,
        "experts",
        "activate",
        lambda f, hidden: f(hidden.roll(hidden.shape[-1] // 2, -1)),
    ),
    schemes.change(
        "it may be split anywhere",
        "test_it_states_what_it_covers_and_where_it_may_be_split",
        lambda made: setattr(made, "block", 0),
    ),
]

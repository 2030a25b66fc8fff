"""A mixture whose shared expert may begin before its gate has chosen gives the results of one
without our kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.facts.model_folder import model_facts, normalise
from glowplug.core.layers.gate import MoeSizes
from glowplug.core.layers.moe import Moe
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.step.batch import Padding, idle_batch
from glowplug.core.testing.harness.build import build_context
from glowplug.kernels.moe.route import route
from glowplug.plugins.quantization.dense import experts_cuda
from tests.support.tiny import CONFIGS

SIZES = MoeSizes(hidden=32, width=16, experts=5, topk=2, shared=32, sigmoid=False)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted on CPU tensors"
)


def nine_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    fused_shared: int,
) -> tuple[Tensor, Tensor]:
    """Route with exactly the arguments of ``protocols.Route``."""
    return route(x, weight, bias, k, groups, topk_groups, renormalize, scale, fused_shared)


def context(fused: bool, sets_ready: bool = True) -> BuildContext:
    """Return the build context of one rank.

    Args:
        fused: the gate is one call, and the experts in Triton include the shared expert.
        sets_ready: the table has a gate for experts that start before it.
    """
    made: Any = build_context(model_facts(normalise(CONFIGS["v2"])))
    if fused:
        made.ops.route = nine_arguments
        if sets_ready:
            made.ops.route_and_set_ready = route
        else:
            del made.ops.route_and_set_ready
        made.scheme.fused_shared = made.plain.fused_shared = True
    return made  # type: ignore[no-any-return]


def filled(fused: bool, sets_ready: bool = True, groups: bool = False) -> Moe:
    """Return a mixture with seeded weights. ``groups``: its tokens are those of several groups."""
    made = context(fused, sets_ready)
    made.parallel.moves_tokens = groups
    mixture, generator = Moe(made, "mlp", SIZES), torch.Generator().manual_seed(0)
    for target in sorted(mixture.targets(), key=lambda target: target.name):
        target.store(
            (torch.randn(target.shape, generator=generator) * target.shape[-1] ** -0.5)[
                target.index
            ]
        )
    mixture.finalize()
    return mixture


@pytest.mark.parametrize("tokens", [0, 1, 5, 32, 33, 40])
def test_early_and_plain_mixtures_agree(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early where tokens share wide tiles; the ready flag is cleared each time."""
    monkeypatch.setattr(experts_cuda, "dependent_launch", SimpleNamespace(supported=lambda: True))
    plain, fused = filled(False), filled(True)
    assert (plain.gate.fused_shared, fused.gate.fused_shared, fused.shared) == (0, 2, None)
    flags: list[Tensor] = []
    finish = experts_cuda.Started.finish

    def seen(started: experts_cuda.Started, ids: Tensor, weights: Tensor) -> Any:
        flags.append(started.ready.clone())
        return finish(started, ids, weights)

    monkeypatch.setattr(experts_cuda.Started, "finish", seen)
    for seed in range(2):
        x = torch.randn(tokens, SIZES.hidden, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(fused.forward(x), plain.forward(x), atol=1e-5, rtol=1e-4)
        assert not fused.experts.method._ready.any()  # type: ignore[attr-defined]
    assert [flag.tolist() for flag in flags] == ([[1, 0]] * 2 if tokens > 32 else [])


def test_a_gate_without_a_ready_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shared expert is fused all the same, and starts when the gate has chosen."""
    monkeypatch.setattr(experts_cuda, "dependent_launch", SimpleNamespace(supported=lambda: True))
    plain, fused = filled(False), filled(True, sets_ready=False)
    monkeypatch.setattr(experts_cuda.CudaExperts, "start", refused)
    x = torch.randn(40, SIZES.hidden, generator=torch.Generator().manual_seed(5))
    assert fused.gate.fused_shared == 2 and not fused.gate.sets_ready
    torch.testing.assert_close(fused.forward(x), plain.forward(x), atol=1e-5, rtol=1e-4)


def test_a_step_that_failed_behind_its_gate_leaves_no_ready_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_cuda, "dependent_launch", SimpleNamespace(supported=lambda: True))
    fused, x = (
        filled(True),
        torch.randn(40, SIZES.hidden, generator=torch.Generator().manual_seed(3)),
    )
    wanted, method = fused.forward(x), fused.experts.method
    assert isinstance(method, experts_cuda.CudaExperts)
    with monkeypatch.context() as failing, pytest.raises(torch.OutOfMemoryError):
        failing.setattr(experts_cuda.moe_experts, "products", refused)
        fused.forward(x)
    assert method._ready.tolist() == [1, 0]
    few = fused.forward(x[:5])  # begins no expert early
    started = method.start(x, SIZES.topk + 2)
    assert started is not None and not started.ready.any()
    assert torch.equal(fused.forward(x), wanted) and not method._ready.any()
    torch.testing.assert_close(few, wanted[:5])


@pytest.mark.parametrize("tokens", [2, 5, 40])
def test_padding_of_several_groups_chooses_no_routed_expert(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts begin behind the gate, because they need the masked ids; the fused shared expert
    takes every token.
    """
    monkeypatch.setattr(experts_cuda, "dependent_launch", SimpleNamespace(supported=lambda: True))
    plain, fused = filled(False), filled(True, groups=True)
    monkeypatch.setattr(experts_cuda.CudaExperts, "start", refused)
    chosen: list[Tensor] = []
    apply = fused.experts.forward

    def watched(x: Any, ids: Tensor, weights: Tensor) -> Any:
        chosen.append(ids.clone())
        return apply(x, ids, weights)

    fused.experts.forward = watched
    x = torch.randn(tokens, SIZES.hidden, generator=torch.Generator().manual_seed(7))
    live = torch.arange(tokens) % 3 != 1
    batch = idle_batch()
    batch.padding = Padding(None, ~live[:, None])
    y = fused.forward(x, batch)
    assert isinstance(y, Tensor)
    torch.testing.assert_close(y[live], plain.forward(x)[live], atol=1e-5, rtol=1e-4)
    (ids,) = chosen
    assert ((ids[:, : SIZES.topk] >= 0) == live[:, None]).all() and (
        ids[:, SIZES.topk :] >= 0
    ).all()


def refused(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("nothing left")


def test_experts_do_not_begin_early_before_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_cuda, "dependent_launch", SimpleNamespace(supported=lambda: False))
    method = filled(True).experts.method
    assert (
        isinstance(method, experts_cuda.CudaExperts)
        and method.start(torch.zeros(40, SIZES.hidden), 4) is None
    )

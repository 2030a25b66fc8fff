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
from glowplug.core.layers.moe import Moe, MoeSizes
from glowplug.core.protocols.build_context import BuildContext
from glowplug.core.testing.harness.build import build_context
from glowplug.kernels.moe.route import route
from glowplug.plugins.quantization.dense import experts_cuda as dense_cuda
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
    appended: int,
) -> tuple[Tensor, Tensor]:
    """Route with exactly the arguments of ``protocols.Route``."""
    return route(x, weight, bias, k, groups, topk_groups, renormalize, scale, appended)


def context(riding: bool, signals: bool = True) -> BuildContext:
    """Return the context of one rank.

    Args:
        riding: The gate is one call, and experts in Triton include the shared one.
        signals: The table has a gate that sets the ready flag for experts started before it.
    """
    made: Any = build_context(model_facts(normalise(CONFIGS["v2"])))
    if riding:
        made.ops.route = nine_arguments
        if signals:
            made.ops.route_signalling = route
        else:
            del made.ops.route_signalling
        made.scheme.fuses_shared = made.plain.fuses_shared = True
    return made  # type: ignore[no-any-return]


def filled(riding: bool, signals: bool = True) -> Moe:
    mixture, generator = (
        Moe(context(riding, signals), "mlp", SIZES),
        torch.Generator().manual_seed(0),
    )
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
    """The shared expert begins early where tokens share wide tiles; the ready flag is cleared each
    time.
    """
    monkeypatch.setattr(dense_cuda, "dependent", SimpleNamespace(supported=lambda: True))
    plain, riding = filled(False), filled(True)
    assert (plain.gate.appended, riding.gate.appended, riding.shared) == (0, 2, None)
    begun: list[Tensor] = []
    finish = dense_cuda.Started.finish

    def seen(started: dense_cuda.Started, ids: Tensor, weights: Tensor) -> Any:
        begun.append(started.begun.clone())
        return finish(started, ids, weights)

    monkeypatch.setattr(dense_cuda.Started, "finish", seen)
    for seed in range(2):
        x = torch.randn(tokens, SIZES.hidden, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(riding.forward(x), plain.forward(x), atol=1e-5, rtol=1e-4)
        assert not riding.experts.method._ready.any()  # type: ignore[attr-defined]
    assert [sign.tolist() for sign in begun] == ([[1, 0]] * 2 if tokens > 32 else [])


def test_a_gate_without_a_ready_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused shared expert then begins when the gate has chosen."""
    monkeypatch.setattr(dense_cuda, "dependent", SimpleNamespace(supported=lambda: True))
    plain, riding = filled(False), filled(True, signals=False)
    monkeypatch.setattr(dense_cuda.CudaExperts, "start", refused)
    x = torch.randn(40, SIZES.hidden, generator=torch.Generator().manual_seed(5))
    assert riding.gate.appended == 2 and not riding.gate.signals
    torch.testing.assert_close(riding.forward(x), plain.forward(x), atol=1e-5, rtol=1e-4)


def test_a_step_that_failed_after_its_gate_leaves_no_ready_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dense_cuda, "dependent", SimpleNamespace(supported=lambda: True))
    riding, x = (
        filled(True),
        torch.randn(40, SIZES.hidden, generator=torch.Generator().manual_seed(3)),
    )
    wanted, method = riding.forward(x), riding.experts.method
    assert isinstance(method, dense_cuda.CudaExperts)
    with monkeypatch.context() as failing, pytest.raises(torch.OutOfMemoryError):
        failing.setattr(dense_cuda.moe_experts, "products", refused)
        riding.forward(x)
    assert method._ready.tolist() == [1, 0]
    few = riding.forward(x[:5])  # begins no expert early
    started = method.start(x, SIZES.topk + 2)
    assert started is not None and not started.begun.any()
    assert torch.equal(riding.forward(x), wanted) and not method._ready.any()
    torch.testing.assert_close(few, wanted[:5])


def refused(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("nothing left")


def test_experts_do_not_begin_early_before_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_cuda, "dependent", SimpleNamespace(supported=lambda: False))
    method = filled(True).experts.method
    assert (
        isinstance(method, dense_cuda.CudaExperts)
        and method.start(torch.zeros(40, SIZES.hidden), 4) is None
    )

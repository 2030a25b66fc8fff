"""Every table of small kernels against the references, through ``protocols.Ops``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.protocols import Ops, RouteSettingReady, Worker
from glowplug.kernels.elementwise import norm_reference as norm, rope_reference as rope
from glowplug.kernels.moe import route_reference as routing
from glowplug.plugins.ops import torch_ops, triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_torch() -> Ops:
    from glowplug.plugins.ops.torch_ops_runtime import TorchOps

    plan: Any = SimpleNamespace()
    return TorchOps(torch_ops.TorchOpsOptions(), plan, Worker(device=DEVICE))


def make_triton() -> Ops:
    pytest.importorskip("triton")
    from glowplug.plugins.ops.triton_ops_runtime import TritonOps

    plan: Any = SimpleNamespace()
    return TritonOps(triton_ops.TritonOpsOptions(), plan, Worker(device=DEVICE))


both = pytest.mark.parametrize("make", [make_torch, make_triton])


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@both
def test_the_table_equals_the_offers(make: Callable[[], Ops]) -> None:
    ops = make()
    (component,) = (triton_ops if make is make_triton else torch_ops).register_ops()
    assert {
        name for name in component.offers.ops if getattr(ops, name) is not None
    } == component.offers.ops


@both
def test_norms_and_activation(make: Callable[[], Ops]) -> None:
    ops, x, residual, weight = make(), randn(3, 48), randn(3, 48, seed=1), randn(48, seed=2)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-6), norm.rms_norm_reference(x, weight, 1e-6)
    )
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, norm.rms_norm_reference(total, weight, 1e-6))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(ops.silu_and_mul(x), gate * gate.sigmoid() * up)


@both
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_of_queries_and_keys_and_of_keys_alone(
    make: Callable[[], Ops], interleaved: bool
) -> None:
    ops = make()
    table = ops.rope_table(16, 64, 10_000.0, None, 64)
    positions = torch.tensor([5, 0, 63], device=DEVICE)
    at = ops.rope_at(table, positions, interleaved)
    query, key = randn(3, 4, 24)[..., 8:], randn(3, 1, 16, seed=1)
    rows = table[positions]
    q, k = ops.rope(query, key, at)
    torch.testing.assert_close(q, rope.rotate_reference(query, rows, interleaved))
    torch.testing.assert_close(k, rope.rotate_reference(key, rows, interleaved))
    none, alone = ops.rope(key[:, :0], key, at)
    assert none.shape == (3, 0, 16)
    torch.testing.assert_close(alone, k)


def test_a_gate_in_one_call() -> None:
    ops, x, weight, bias = make_triton(), randn(5, 32), randn(8, 32, seed=1), randn(8, seed=2)
    assert ops.route is not None
    logits = x @ weight.t()
    for given, wanted in (
        (None, routing.topk_softmax(logits, 3, 1, 1, True, 2.0)),
        (bias, routing.topk_sigmoid(logits, bias, 3, 4, 2, True, 2.0)),
    ):
        groups = (1, 1) if given is None else (4, 2)
        weights, ids = ops.route(x, weight, given, 3, *groups, True, 2.0, 1)
        assert ids[:, 3].tolist() == [8] * 5 and weights[:, 3].tolist() == [1.0] * 5
        dense = torch.zeros(2, 5, 8, device=DEVICE)
        dense[0].scatter_(1, ids[:, :3].long(), weights[:, :3])
        dense[1].scatter_(1, wanted[1], wanted[0])
        torch.testing.assert_close(dense[0], dense[1])


@pytest.mark.parametrize("tokens", [5, 40])
def test_a_gate_sets_the_ready_flag(tokens: int) -> None:
    """It chooses as without the flag, and sets the flag for experts that started early."""
    ops, x, weight, bias = make_triton(), randn(tokens, 32), randn(8, 32, seed=1), randn(8, seed=2)
    assert ops.route is not None
    ready, given = (
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
        (x, weight, bias, 3, 4, 2, True, 2.0, 1),
    )
    route_and_set_ready: RouteSettingReady = ops.route_and_set_ready  # type: ignore[attr-defined]
    for got, wanted in zip(route_and_set_ready(*given, ready), ops.route(*given), strict=True):
        assert torch.equal(got, wanted)
    assert ready.tolist() == [1, 0]


@pytest.mark.gpu
def test_producers_of_fp8_hand_over_what_the_plain_ones_compute() -> None:
    ops, weight = make_triton(), randn(256, seed=2).bfloat16()
    x, residual = randn(5, 256).bfloat16(), randn(5, 256, seed=1).bfloat16()
    made = {
        name: ops.fused[name, "fp8_group128"]
        for name in ("cast", "rms_norm", "add_rms_norm", "silu_and_mul")
    }
    added, total = made["add_rms_norm"](x, residual, weight, 1e-6)
    plain, wanted = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, wanted)
    for quantized, exact in (
        (made["cast"](x), x),
        (made["rms_norm"](x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)),
        (added, plain),
        (made["silu_and_mul"](x.repeat(1, 2)), ops.silu_and_mul(x.repeat(1, 2))),
    ):
        values = quantized.values.float() * quantized.scales.repeat_interleave(128, dim=1)
        torch.testing.assert_close(values, exact.float(), atol=0.02, rtol=0.07)

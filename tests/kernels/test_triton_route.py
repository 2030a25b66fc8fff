"""The gate in Triton against the torch references. Interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.moe import route as triton_route, route_reference as routing
from glowplug.kernels.moe.route import route

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16  #: the interpreter does not multiply bfloat16


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights, ids, scores [T, E])."""
    logits = F.linear(x.double(), weight.double()).float()
    if bias is None:
        return *routing.topk_softmax(logits, k, groups, topk_groups, renormalize, scale), logits
    return *routing.topk_sigmoid(logits, bias, k, groups, topk_groups, renormalize, scale), logits


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    topk_groups: int,
    renormalize: bool,
    scale: float,
    appended: int,
) -> None:
    tokens, experts = x.shape[0], weight.shape[0]
    weights, ids = route(x, weight, bias, k, groups, topk_groups, renormalize, scale, appended)
    assert weights.shape == ids.shape == (tokens, k + appended)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert (ids[:, k:] == torch.arange(experts, experts + appended, device=x.device)).all()
    assert (weights[:, k:] == 1).all()
    wanted, wanted_ids, _ = reference(x, weight, bias, k, groups, topk_groups, renormalize, scale)
    order, wanted_order = ids[:, :k].sort(1), wanted_ids.sort(1)
    same = (order.values == wanted_order.values).all(1)
    assert same.float().mean() >= (1 - 2 / tokens if tokens > 1000 else 1.0), (
        "the experts are the same except for near ties"
    )
    torch.testing.assert_close(
        weights[:, :k].gather(1, order.indices)[same],
        wanted.gather(1, wanted_order.indices)[same],
        atol=1e-5,
        rtol=2e-5,
    )


def draw(
    tokens: int,
    experts: int,
    hidden: int,
    sigmoid: bool,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(experts, hidden, generator=generator) * 2 / hidden**0.5).to(dtype)
    bias = torch.randn(experts, generator=generator).mul_(0.1).to(DEVICE) if sigmoid else None
    return x.to(DEVICE), weight.to(DEVICE), bias


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Token counts whose scores a library's GEMM computed."""
    found: list[int] = []
    product = triton_route._library_scores

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        found.append(len(x))
        return product(x, weight)

    monkeypatch.setattr(triton_route, "_library_scores", counted)
    return found


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "k", "groups", "topk_groups", "appended"),
    [
        (1, 8, 24, 2, 1, 1, 0),
        (3, 9, 40, 3, 1, 1, 2),
        (5, 12, 30, 4, 3, 2, 1),
        (18, 40, 70, 3, 4, 2, 1),
        (2, 16, 1030, 8, 8, 4, 0),
        (7, 20, 16, 6, 1, 1, 2),
    ],
)
@pytest.mark.parametrize("sigmoid", [False, True])
def test_route(
    tokens: int,
    experts: int,
    hidden: int,
    k: int,
    groups: int,
    topk_groups: int,
    appended: int,
    sigmoid: bool,
) -> None:
    given = draw(tokens, experts, hidden, sigmoid, tokens)
    check(*given, k, groups, topk_groups, sigmoid, 1.0, appended)
    x, weight, bias = draw(tokens, experts, hidden, sigmoid, tokens + 100)
    wider = torch.cat([x, x], 1)[:, :hidden]
    check(wider, weight, bias, k, groups, topk_groups, not sigmoid, 2.5, appended)


def test_blocks_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_route, "LARGE_BLOCK_TOKENS_MIN", 8)
    check(*draw(70, 20, 48, True, 0), 4, 4, 2, True, 2.5, 1)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_equal_scores_and_no_numbers(sigmoid: bool) -> None:
    x, weight, bias = draw(3, 12, 16, sigmoid, 0)
    weight[5:] = weight[4]
    if bias is not None:
        bias.zero_()
    x[1] = float("nan")
    weights, ids = route(x, weight, bias, 6, 1, 1, True, 1.0, 1)
    assert ids[1].tolist() == [0, 1, 2, 3, 4, 5, 12] and weights[1, :6].isnan().all()
    for token in (0, 2):
        tied = [expert for expert in ids[token, :6].tolist() if expert >= 4]
        assert tied == sorted(tied) and (not tied or tied[0] == 4)
    if not GPU:
        return
    again = route(x, weight, bias, 6, 1, 1, True, 1.0, 1)
    assert torch.equal(again[1], ids)


@pytest.mark.parametrize("tokens", [5, 6, 7])
@pytest.mark.parametrize(
    ("experts", "k", "groups", "topk_groups", "appended", "sigmoid"),
    [
        (129, 3, 1, 1, 2, False),
        (132, 4, 3, 2, 1, True),
        (132, 4, 3, 2, 0, False),
        (160, 8, 1, 1, 1, True),
    ],
)
def test_from_where_on_a_library_scores(
    tokens: int,
    experts: int,
    k: int,
    groups: int,
    topk_groups: int,
    appended: int,
    sigmoid: bool,
    scored: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_route, "LIBRARY_TOKENS_MANY_EXPERTS", 6)
    x, weight, bias = draw(tokens, experts, 24, sigmoid, tokens, HALF)
    check(
        torch.cat([x, x], 1)[:, :24], weight, bias, k, groups, topk_groups, sigmoid, 2.5, appended
    )
    assert scored == [tokens] * (tokens >= 6)


def test_a_library_scores_large_half_precision_steps_only(
    scored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library scores only many tokens, more of them where experts are few, with 16-bit weights,
    and not for a gate that sets the ready flag.
    """
    for tokens, experts, dtype, pays in (
        (255, 256, torch.bfloat16, False),
        (256, 256, torch.bfloat16, True),
        (2047, 128, torch.bfloat16, False),
        (2048, 128, torch.bfloat16, True),
        (2048, 64, torch.float16, True),
        (256, 129, torch.float16, True),
        (256, 256, torch.float32, False),
        (8192, 64, torch.float32, False),
    ):
        x, weight = torch.empty(tokens, 8, dtype=dtype), torch.empty(experts, 8, dtype=dtype)
        assert triton_route._library_pays(x, weight) is pays
    assert not triton_route._library_pays(torch.empty(256, 8).bfloat16(), torch.empty(256, 8))
    monkeypatch.setattr(triton_route, "LIBRARY_TOKENS_MANY_EXPERTS", 6)
    x, weight, _ = draw(6, 130, 16, False, 0, HALF)
    begun, rest = torch.zeros(1, dtype=torch.int32, device=DEVICE), (None, 2, 1, 1, True, 1.0, 0)
    wanted = route(x, weight, *rest)
    _, found = route(x, weight, *rest, begun)
    assert scored == [6] and int(begun) == 1 and torch.equal(found, wanted[1])


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_library_s_scores_give_the_same_bits(
    sigmoid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are small whole numbers, whose sums are exact in any order: there are many ties, and
    rows of NaN.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-2, 3, shape, generator=generator).to(DEVICE, HALF)
        for shape in ((9, 48), (132, 48))
    )
    x[3], x[5, 7] = float("nan"), float("nan")
    bias = (
        torch.randint(-1, 2, (132,), generator=generator).mul(0.25).to(DEVICE) if sigmoid else None
    )
    found = []
    for least in (1, 10):
        monkeypatch.setattr(triton_route, "LIBRARY_TOKENS_MANY_EXPERTS", least)
        found.append(route(x, weight, bias, 6, 4, 2, sigmoid, 2.5, 1))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(*(weights for weights, _ in found), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_few_experts_that_a_library_scores(
    sigmoid: bool, scored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is the same, by the same scores in a launch of their own: ties, and rows of NaN.
    On a device a softmax adds up in another order.
    """
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randint(-2, 3, shape, generator=generator).to(DEVICE, HALF)
        for shape in ((37, 32), (64, 32))
    )
    x[3], x[5, 7] = float("nan"), float("nan")
    bias = (
        torch.randint(-1, 2, (64,), generator=generator).mul(0.25).to(DEVICE) if sigmoid else None
    )
    wanted = route(x, weight, bias, 6, 1, 1, False, 1.0, 2)
    monkeypatch.setattr(triton_route, "LIBRARY_TOKENS_FEW_EXPERTS", 37)
    found = route(x, weight, bias, 6, 1, 1, False, 1.0, 2)
    assert scored == [37] and torch.equal(found[1], wanted[1])
    assert (
        sum(len(set(scores)) < 64 for scores in (x.float() @ weight.float().t()).tolist()) > 30
    ), "there are ties"
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6 if GPU else 0, atol=0, equal_nan=True)
    begun = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    told = route(x, weight, bias, 6, 1, 1, False, 1.0, 2, begun)
    assert scored == [37] and int(begun) == 1
    for got, first in zip(told, wanted, strict=True):
        torch.testing.assert_close(got, first, rtol=0, atol=0, equal_nan=True)


def test_no_tokens() -> None:
    weights, ids = route(*draw(0, 8, 16, False, 0), 2, 1, 1, False, 1.0, 1)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 33, 128, 1000, 1024, 4099])
@pytest.mark.parametrize(
    ("experts", "hidden", "k", "groups", "topk_groups", "appended", "sigmoid"),
    [(64, 2048, 6, 1, 1, 2, False), (256, 7168, 8, 8, 4, 1, True), (160, 5120, 6, 8, 3, 2, False)],
)
def test_published_shapes(
    tokens: int,
    experts: int,
    hidden: int,
    k: int,
    groups: int,
    topk_groups: int,
    appended: int,
    sigmoid: bool,
) -> None:
    for seed, dtype in ((0, torch.bfloat16), (1, torch.bfloat16), (2, torch.float32)):
        x, weight, bias = draw(tokens, experts, hidden, sigmoid, seed, dtype)
        check(
            x.bfloat16(),
            weight,
            bias,
            k,
            groups,
            topk_groups,
            sigmoid,
            2.5 if sigmoid else 1.0,
            appended,
        )

"""Conformance suite of the ``ops`` slot. Subclass it and define ``make``.

Every function of the table is compared with its definition in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glowplug.core.protocols import Ops

Chosen = tuple[Tensor, Tensor]
EPS = 1e-3  #: large enough that a result shows it
THETA = 100.0
CONTEXT = 64
EXPERTS = 8
SIZES = (1, 5, 33)  #: tokens of a step


class OpsSuite:
    """Tests that every table of small kernels must pass.

    Attributes:
        device: torch device of the arguments.
        dtype: dtype of activations.
        tolerance: largest difference from the definition.
    """

    device = "cpu"
    dtype = torch.float32
    tolerance = 1e-5

    def make(self) -> Ops:
        """Return the table under test."""
        raise NotImplementedError

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return random numbers in the dtype of activations."""
        generator = torch.Generator().manual_seed(sum(shape) + seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def close(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=self.tolerance, atol=self.tolerance
        )

    # ---- norms and activation --------------------------------------------------------------------

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm by definition."""
        wide = x.double()
        return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    @pytest.mark.parametrize("tokens", SIZES)
    def test_rms_norm(self, tokens: int) -> None:
        x = self.random(tokens, 48) * 0.1
        weight = self.random(48, seed=2)
        kept = x.clone()
        self.close(self.make().rms_norm(x, weight, EPS), self.norm(x, weight))
        assert torch.equal(x, kept), "the argument was changed"

    @pytest.mark.parametrize("tokens", SIZES)
    def test_add_rms_norm(self, tokens: int) -> None:
        x = self.random(tokens, 48) * 0.1
        residual = self.random(tokens, 48, seed=1) * 0.1
        weight = self.random(48, seed=2)
        expected = x.double() + residual.double()
        normed, total = self.make().add_rms_norm(x, residual, weight, EPS)
        self.close(total, expected)
        self.close(normed, self.norm(expected, weight))

    @pytest.mark.parametrize("tokens", SIZES)
    def test_silu_and_mul(self, tokens: int) -> None:
        x = self.random(tokens, 64)
        gate, up = x.double().chunk(2, dim=-1)
        self.close(self.make().silu_and_mul(x), gate * torch.sigmoid(gate) * up)

    def test_no_tokens(self) -> None:
        ops = self.make()
        none = self.random(0, 48)
        weight = self.random(48)
        assert ops.rms_norm(none, weight, EPS).shape == (0, 48)
        assert ops.add_rms_norm(none, none, weight, EPS)[0].shape == (0, 48)
        assert ops.silu_and_mul(none).shape == (0, 24)

    # ---- rotation --------------------------------------------------------------------------------

    @staticmethod
    def rotated(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        """Return x [T, H, R] rotated by definition."""
        half = x.shape[-1] // 2
        wide = x.double()
        speeds = THETA ** (-torch.arange(half, device=x.device).double() / half)
        angles = (positions.double()[:, None] * speeds)[:, None]
        first, second = (
            (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.split(half, dim=-1)
        )
        turned = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("tokens", SIZES)
    def test_rope(self, tokens: int, interleaved: bool) -> None:
        """Positions repeat and do not ascend; the rotated part may be a slice of the query."""
        ops = self.make()
        table = ops.rope_table(16, CONTEXT, THETA, None, CONTEXT)
        positions = (torch.arange(tokens, device=self.device) * 29 + 7) % CONTEXT
        query = self.random(tokens, 4, 24)[..., 8:]
        key = self.random(tokens, 1, 16, seed=1)
        expected = [self.rotated(part, positions, interleaved) for part in (query, key)]
        got = ops.rope(query, key, ops.rope_at(table, positions, interleaved))
        for found, wanted in zip(got, expected, strict=True):
            assert found.shape == wanted.shape
            self.close(found, self.joined(wanted, interleaved, found))

    def joined(self, wanted: Tensor, interleaved: bool, found: Tensor) -> Tensor:
        """Return the definition's result in the order of elements that the table returns.

        Interleaved pairs may come back as halves: scores of a query and a key are the same.
        """
        halves = torch.cat((wanted[..., 0::2], wanted[..., 1::2]), -1)
        same = torch.allclose(found.double(), halves, atol=self.tolerance, rtol=self.tolerance)
        return halves if interleaved and same else wanted

    # ---- routing ---------------------------------------------------------------------------------

    @staticmethod
    def chosen(
        scores: Tensor,
        ranked: Tensor,
        k: int,
        groups: int,
        topk_groups: int,
        best: int,
        renormalize: bool,
        scale: float,
    ) -> Tensor:
        """Return the weights of all experts by definition, 0 for those not chosen, [T, E].

        Args:
            scores: weights of the experts before renormalisation, [T, E].
            ranked: numbers by which experts are chosen, [T, E].
            k: number of experts to choose.
            groups: number of expert groups.
            topk_groups: number of groups from which experts are chosen.
            best: a group ranks by the sum of so many of its best experts.
            renormalize: divide the weights by their sum.
            scale: factor on the weights.
        """
        found = torch.zeros_like(scores)
        size = scores.shape[1] // groups
        for token in range(len(scores)):
            by_group = ranked[token].view(groups, size)
            order = by_group.topk(best, dim=-1).values.sum(-1).topk(topk_groups).indices.tolist()
            eligible = [g * size + i for g in order for i in range(size)]
            kept = sorted(eligible, key=lambda e: -float(ranked[token, e]))[:k]
            found[token, kept] = scores[token, kept]
        if renormalize:
            found = found / found.sum(-1, keepdim=True)
        return found * scale

    def check_routing(self, got: Chosen, expected: Tensor, k: int) -> None:
        weights, ids = got
        assert weights.dtype == torch.float32 and weights.shape == ids.shape == (len(expected), k)
        assert all(len(set(row)) == k for row in ids.tolist()), "an expert was chosen twice"
        dense = torch.zeros_like(expected)
        dense.scatter_(1, ids.long(), weights.to(expected.dtype))
        self.close(dense, expected)

    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (4, 2)])
    @pytest.mark.parametrize("tokens", SIZES)
    def test_topk_softmax(
        self, tokens: int, groups: int, topk_groups: int, renormalize: bool
    ) -> None:
        logits = self.random(tokens, EXPERTS).float()
        scores = logits.double().softmax(-1)
        got = self.make().topk_softmax(logits, 3, groups, topk_groups, renormalize, 2.5)
        wanted = self.chosen(scores, scores, 3, groups, topk_groups, 1, renormalize, 2.5)
        self.check_routing(got, wanted, 3)

    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize(("groups", "topk_groups"), [(1, 1), (4, 2)])
    @pytest.mark.parametrize("tokens", SIZES)
    def test_topk_sigmoid(
        self, tokens: int, groups: int, topk_groups: int, renormalize: bool
    ) -> None:
        """The bias decides which experts are chosen, not their weights."""
        logits = self.random(tokens, EXPERTS).float()
        bias = self.random(EXPERTS, seed=3).float()
        scores = logits.double().sigmoid()
        got = self.make().topk_sigmoid(logits, bias, 3, groups, topk_groups, renormalize, 2.5)
        ranked = scores + bias.double()
        wanted = self.chosen(scores, ranked, 3, groups, topk_groups, 2, renormalize, 2.5)
        self.check_routing(got, wanted, 3)

    def test_a_whole_gate(self) -> None:
        """``route`` may be None; else it is the product, the choice and the shared expert."""
        route = self.make().route
        if route is None:
            pytest.skip("the table has no whole gate")
        x = self.random(5, 32)
        weight = self.random(EXPERTS, 32, seed=1)
        scores = (x.double() @ weight.double().t()).softmax(-1)
        weights, ids = route(x, weight, None, 3, 1, 1, True, 2.0, 1)
        assert ids[:, 3].tolist() == [EXPERTS] * 5 and weights[:, 3].tolist() == [1.0] * 5
        wanted = self.chosen(scores, scores, 3, 1, 1, 1, True, 2.0)
        self.check_routing((weights[:, :3], ids[:, :3]), wanted, 3)

"""Conformance suite of the ``quantization`` slot. Subclass it and define ``make``.

A scheme that stores weights in a format of its own also defines ``store``, the tensors of a
checkpoint for a weight, and ``value``, the weight that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    ExpertsMethod,
    ExpertsShape,
    LinearMethod,
    LinearShape,
    Parts,
    QuantizationScheme,
    Worker,
)
from glowplug.core.testing.harness.plans import bare_plan

Method = TypeVar("Method", LinearMethod, ExpertsMethod)
EXPERTS = 4  #: experts of a layer
CHOSEN = 2  #: experts of a token


def apply_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the result of an expert for one token, by definition."""
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


def held_rows(shape: LinearShape, parts: Sequence[Tensor]) -> Tensor:
    """Return this rank's rows of the fused parts, in float64."""
    spans = zip(parts, shape.row_starts, shape.outputs, strict=True)
    return torch.cat([part[start : start + size] for part, start, size in spans]).double()


class QuantizationSuite:
    """Tests that every quantization scheme must pass, on dense references in float64.

    Attributes:
        unit: all sizes and slices are multiples of this number (the block of a block format).
        tolerance: largest difference, relative to the largest element of a result.
        dtype: compute dtype.
    """

    unit = 8
    tolerance = 1e-5
    dtype = torch.float32

    def make(self, plan: EnginePlan, worker: Worker) -> QuantizationScheme:
        """Return the scheme under test."""
        raise NotImplementedError

    def plan(self) -> EnginePlan:
        """Return the plan that the scheme is made with."""
        return bare_plan()

    def store(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a checkpoint's tensors for a weight, by the last part of their names."""
        return {"weight": weight}

    def value(self, weight: Tensor) -> Tensor:
        """Return the weight for which the tensors of ``store`` stand."""
        return weight

    # ---- driving ---------------------------------------------------------------------------------

    @property
    def scheme(self) -> QuantizationScheme:
        return self.make(self.plan(), Worker(dtype=self.dtype))

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return random numbers in the compute dtype."""
        generator = torch.Generator().manual_seed(sum(shape) + seed)
        return torch.randn(shape, generator=generator).to(self.dtype)

    def load(self, method: LinearMethod | ExpertsMethod, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors in the method's targets, each once, and finalize the method."""
        names = [target.name for target in method.targets()]
        assert len(set(names)) == len(names), "two targets have the same name"
        for target in method.targets():
            assert target.optional or target.name in tensors, f"no tensor {target.name}"
            if target.name in tensors:
                value = tensors[target.name]
                assert target.shape == tuple(value.shape), target.name
                target.store(value[target.index])
        method.finalize()

    def taken(self, method: Method | None) -> Method:
        """Return a method that the scheme must not hand back; the test is skipped if it does."""
        if method is None:
            pytest.skip("the scheme hands layers of this shape back")
        return method

    def named(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """Return a checkpoint's tensors for the weight of ``module``."""
        return {f"{module}.{leaf}": value for leaf, value in self.store(weight).items()}

    def fused_shape(self) -> LinearShape:
        """Return the shape of a linear layer of two fused parts."""
        unit = self.unit
        return LinearShape(
            name="m.fused",
            parts=("m.first", "m.second"),
            outputs=(4 * unit, 2 * unit),
            inputs=6 * unit,
            row_starts=(0, 0),
            col_start=0,
            full=((4 * unit, 6 * unit), (2 * unit, 6 * unit)),
        )

    def experts_shape(self) -> ExpertsShape:
        """Return the shape of a layer of experts, all on this rank."""
        unit = self.unit
        return ExpertsShape(
            prefix="m.experts",
            count=EXPERTS,
            first=0,
            hidden=4 * unit,
            inter=6 * unit,
            inter_start=0,
            inter_full=6 * unit,
            total=EXPERTS,
        )

    def expert_weights(self, shape: ExpertsShape, expert: int) -> dict[str, Tensor]:
        """Return the random weights of an expert in the checkpoint, by the names of its parts."""
        wide = (shape.inter_full, shape.hidden)
        sizes = (wide, wide, wide[::-1])
        return {
            name: self.random(*size, seed=10 * expert + at)
            for at, (name, size) in enumerate(zip(shape.names, sizes, strict=True))
        }

    def linear(self, **changes: Any) -> tuple[LinearMethod, Tensor, Tensor | None]:
        """Return a loaded method of two fused parts, its weight and its bias on this rank.

        ``changes`` replace fields of its ``LinearShape``.
        """
        shape = replace(self.fused_shape(), **changes)
        weights = [self.random(*full) for full in shape.full]
        added = [self.random(full[0], seed=9) for full in shape.full]
        tensors: dict[str, Tensor] = {}
        for part, weight, bias in zip(shape.parts, weights, added, strict=True):
            tensors |= self.named(part, weight) | ({f"{part}.bias": bias} if shape.bias else {})
        method = self.taken(self.scheme.linear(shape))
        self.load(method, tensors)
        columns = slice(shape.col_start, shape.col_start + shape.inputs)
        values = [self.value(weight)[:, columns] for weight in weights]
        return method, held_rows(shape, values), held_rows(shape, added) if shape.bias else None

    def experts(self, **changes: Any) -> tuple[ExpertsMethod, list[tuple[Tensor, Tensor, Tensor]]]:
        """Return loaded experts, and (gate, up, down) of each one held on this rank."""
        shape = replace(self.experts_shape(), **changes)
        held = slice(shape.inter_start, shape.inter_start + shape.inter)
        tensors: dict[str, Tensor] = {}
        found = []
        for expert in shape.numbers:
            weights = self.expert_weights(shape, expert)
            for name, weight in weights.items():
                tensors |= self.named(f"{shape.prefix}.{expert}.{name}", weight)
            gate, up, down = (self.value(weight).double() for weight in weights.values())
            found.append((gate[held], up[held], down[:, held]))
        method = self.taken(self.scheme.experts(shape))
        self.load(method, tensors)
        return method, found

    def close(self, got: Tensor, expected: Tensor) -> None:
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=self.tolerance * scale)

    # ---- linear layers ---------------------------------------------------------------------------

    @pytest.mark.parametrize("tokens", [0, 1, 3, 40])
    def test_a_fused_linear_layer_is_the_product(self, tokens: int) -> None:
        method, weight, _ = self.linear()
        x = self.random(tokens, weight.shape[1])
        kept = x.clone()
        got = method.apply(x)
        assert got.shape == (tokens, len(weight)) and got.dtype == self.dtype
        self.close(got, x.double() @ weight.t())
        assert torch.equal(x, kept), "the activations were changed"

    def test_a_bias_is_added(self) -> None:
        method, weight, bias = self.linear(bias=True)
        assert bias is not None
        x = self.random(5, weight.shape[1])
        self.close(method.apply(x), x.double() @ weight.t() + bias)

    @pytest.mark.parametrize("bias", [False, True])
    def test_a_rank_has_its_rows(self, bias: bool) -> None:
        unit = self.unit
        method, weight, added = self.linear(
            outputs=(2 * unit, unit), row_starts=(2 * unit, unit), bias=bias
        )
        x = self.random(5, weight.shape[1])
        expected = x.double() @ weight.t()
        self.close(method.apply(x), expected if added is None else expected + added)

    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("first", [False, True])
    def test_a_rank_has_its_columns(self, first: bool, bias: bool) -> None:
        """The ranks' products are added up, so only the first one has the bias."""
        unit = self.unit
        start = 0 if first else 4 * unit
        method, weight, added = self.linear(inputs=2 * unit, col_start=start, bias=bias)
        x = self.random(5, 2 * unit)
        expected = x.double() @ weight.t()
        self.close(method.apply(x), expected + added if added is not None and first else expected)

    def test_the_dense_weight_is_the_one_that_is_applied(self) -> None:
        method, weight, _ = self.linear()
        dense = method.dense()
        assert dense.shape == weight.shape and dense.dtype == self.dtype
        self.close(dense, weight)

    def test_a_token_does_not_depend_on_the_others(self) -> None:
        method, weight, _ = self.linear()
        x = self.random(9, weight.shape[1])
        alone = torch.cat([method.apply(x[row : row + 1]) for row in range(9)])
        self.close(alone, method.apply(x).double())

    def test_layers_have_weights_of_their_own(self) -> None:
        first, weight, _ = self.linear()
        self.linear(parts=("m.third", "m.fourth"), outputs=(2 * self.unit, self.unit))
        x = self.random(2, weight.shape[1])
        self.close(first.apply(x), x.double() @ weight.t())

    # ---- experts ---------------------------------------------------------------------------------

    def check_experts(
        self,
        method: ExpertsMethod,
        held: list[tuple[Tensor, Tensor, Tensor]],
        ids: Tensor,
    ) -> None:
        """Compare the sums of weighted experts with their definition; -1 is no expert here."""
        hidden = held[0][0].shape[1]
        x = self.random(len(ids), hidden) * 0.5
        weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5))
        expected = torch.zeros(len(ids), hidden, dtype=torch.float64)
        for token, row in enumerate(ids.tolist()):
            for place, expert in enumerate(row):
                if expert >= 0:
                    result = apply_expert(x[token].double(), *held[expert])
                    expected[token] += float(weights[token, place]) * result
        got = method.apply(x, ids, weights)
        assert not isinstance(got, Parts), "Parts were not asked for"
        self.close(got, expected)

    def test_experts_are_summed_by_weight(self) -> None:
        method, held = self.experts()
        for tokens in (0, 1, 7, 40):
            generator = torch.Generator().manual_seed(tokens)
            ids = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOSEN).indices
            self.check_experts(method, held, ids)

    def test_experts_of_other_ranks_add_nothing(self) -> None:
        method, held = self.experts(count=2, first=1)
        ids = torch.tensor([[0, 1], [-1, 0], [1, -1], [-1, -1]])
        self.check_experts(method, held, ids)

    def test_a_rank_has_its_part_of_each_expert(self) -> None:
        unit = self.unit
        method, held = self.experts(inter=2 * unit, inter_start=4 * unit)
        self.check_experts(method, held, torch.tensor([[0, 3], [2, 1], [1, 0]]))

    # ---- the scheme ------------------------------------------------------------------------------

    def test_each_part_has_targets_under_its_name(self) -> None:
        scheme = self.scheme
        unit = self.unit
        shape = LinearShape("m.one", ("m.one",), (unit,), unit, (0,), 0, ((unit, unit),), bias=True)
        names = {target.name for target in self.taken(scheme.linear(shape)).targets()}
        leaves = self.store(self.random(unit, unit))
        assert {f"m.one.{leaf}" for leaf in leaves} <= names and "m.one.bias" in names

    def test_it_states_what_it_covers_and_where_it_may_be_split(self) -> None:
        scheme = self.scheme
        assert scheme.block >= 1 and self.unit % scheme.block == 0
        for name in ("lm_head", "model.layers.0.mlp.up_proj"):
            assert isinstance(scheme.covers(name, 4 * self.unit, 6 * self.unit), bool)

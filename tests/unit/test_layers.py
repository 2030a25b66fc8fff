"""Layers split over several ranks add up to the layer on one rank, and producers write the format
that all readers accept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import model_facts, normalise
from glowplug.core.layers.linear import (
    Both,
    Linear,
    Part,
    agreed_format,
    both_formats,
    caster,
    producer,
)
from glowplug.core.layers.module import Module, Target, part_of
from glowplug.core.layers.rope import RopeConfig
from glowplug.core.protocols import LinearShape, Parts, Quantized, Shard
from glowplug.core.protocols.parallel_stack import GENERAL_ROLES, ParallelStack
from glowplug.core.testing.harness.build import Stepper, build_context, build_model
from glowplug.plugins.parallel.unsplit import Unsplit
from tests.support.tiny import CONFIGS


@dataclass
class Ring:
    """Collectives of ranks that are threads: each rank deposits a tensor, waits, and reads all of
    them.
    """

    size: int
    barrier: threading.Barrier = field(init=False)
    left: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.left = threading.Barrier(self.size, timeout=60), [None] * self.size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.left[rank] = value
        self.barrier.wait()
        taken = list(self.left)
        self.barrier.wait()
        return taken


class Rank(Unsplit):
    """One rank's ``ParallelStrategy`` and ``Collectives``: tensor parallel, with experts split by
    number or by width.
    """

    def __init__(self, ring: Ring, rank: int, experts_by_number: bool) -> None:
        self.ring, self.rank, self.by_number = ring, rank, experts_by_number

    def axes(self) -> Mapping[str, int]:
        return {"tp": self.ring.size}

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        if role in GENERAL_ROLES:
            return None  # called again with the general role
        whole = (
            role == "replicated"
            or (role == "experts") != self.by_number
            and role in {"experts", "expert_width"}
        )
        if whole:
            return Shard(0, full, full)
        units = -(-full // block)
        per_rank = -(-units // self.ring.size) * block
        start = min(self.rank * per_rank, full)
        summed = role in {"row", "experts", "expert_width"}
        return Shard(
            start,
            min(per_rank, full - start),
            full,
            reduce=summed,
            gather=not summed,
            parts=self.ring.size,
        )

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return torch.stack(self.ring.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor, axis: str, dim: int = 0) -> Tensor:
        return torch.cat(self.ring.exchange(self.rank, x), dim)


def on_ranks(size: int, work: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(size)]]


def facts_of(name: str, **changes: Any) -> ModelFacts:
    return model_facts(normalise({**CONFIGS[name], **changes}))


def random_tensors(facts: ModelFacts, quantization: str) -> dict[str, Tensor]:
    """Return a checkpoint for ``facts``, in FP8 where the scheme stores FP8."""
    from tests.unit.test_loading import build

    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for target in build(facts, quantization).targets():
        value = torch.randn(target.shape, generator=generator)
        if target.name.endswith("weight_scale_inv"):
            value = value.abs() * 1e-3
        elif target.dtype is not None:
            value = (value * 90).clamp(-448, 448).to(getattr(torch, target.dtype))
        else:
            value = value / target.shape[-1] ** 0.5 if value.dim() > 1 else value * 0.1 + 1
        tensors[target.name] = value
    return tensors


@pytest.mark.parametrize("name", ["v3", "v2", "v3_fp8"])
@pytest.mark.parametrize("experts_by_number", [False, True])
def test_two_ranks_compute_the_result_of_one(name: str, experts_by_number: bool) -> None:
    """Heads, vocabulary, widths and experts are split; FP8 slices begin at block boundaries and
    within blocks.
    """
    facts = (
        facts_of(name, moe_intermediate_size=256, intermediate_size=256)
        if name == "v3_fp8"
        else facts_of(name)
    )
    quantization = "block_fp8" if facts.quant_method == "fp8" else "none"
    options = (
        {"quantization_options": {"activations": "none"}} if quantization == "block_fp8" else {}
    )
    tensors = random_tensors(facts, quantization)
    ids = {0: [3, 1, 4, 1, 5, 9], 1: [2, 6]}
    plain = build_context(facts, quantization=quantization, **options)
    model, context = build_model(facts, tensors, plain)
    wanted = Stepper(model, context).logits(ids)

    ring = Ring(2)

    def work(rank: int) -> Tensor:
        one = Rank(ring, rank, experts_by_number)
        ranked = build_context(
            facts,
            quantization=quantization,
            parallel=ParallelStack([one]),
            collectives=one,
            **options,
        )
        ranked = replace(ranked, worker=replace(ranked.worker, rank=rank, ranks=2))
        model, context = build_model(facts, tensors, ranked)
        return Stepper(model, context).logits(ids)

    for got in on_ranks(2, work):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_row_parallel_bias_is_added_once() -> None:
    facts = facts_of("llama")
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(6, 8, generator=generator), torch.randn(6, generator=generator)
    x = torch.randn(3, 8, generator=generator)
    ring = Ring(2)

    def work(rank: int) -> Tensor:
        one = Rank(ring, rank, False)
        linear = Linear(
            build_context(facts, parallel=ParallelStack([one]), collectives=one),
            "down",
            8,
            [Part("down", 6, "replicated", bias=True)],
            input_role="row",
        )
        for target in linear.targets():
            target.store({"down.weight": weight, "down.bias": bias}[target.name][target.index])
        linear.finalize()
        return linear.forward(x[:, rank * 4 : rank * 4 + 4])

    for got in on_ranks(2, work):
        torch.testing.assert_close(got, x @ weight.t() + bias)


@pytest.mark.parametrize(
    ("adds", "ranks", "in_parts"), [(True, 1, True), (False, 1, False), (True, 2, True)]
)
def test_gemm_parts_are_returned_where_the_ops_add_them(
    adds: bool, ranks: int, in_parts: bool
) -> None:
    context = build_context(facts_of("llama"))
    method = context.scheme.linear

    def linear(shape: LinearShape) -> Any:
        made: Any = method(shape)
        made.apply_parts = lambda x: Parts(
            made.apply(x).repeat_interleave(2, 0) / 2, torch.zeros(len(x), 2)
        )
        return made

    context.scheme.linear = context.plain.linear = linear  # type: ignore[method-assign]
    context.ops.adds_parts = adds
    made = Linear(
        replace(context, worker=replace(context.worker, ranks=ranks)),
        "o",
        8,
        [Part("o", 6, "replicated")],
    )
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for target in made.targets():
        target.store(torch.ones(6, 8))
    made.finalize()
    found, whole = made.forward_parts(x), made.forward(x)
    assert isinstance(found, Parts) is in_parts
    torch.testing.assert_close(
        found.rows.view(3, 2, 6).sum(1) if isinstance(found, Parts) else found, whole
    )


@dataclass
class Reader:
    input_format: str


def test_producers_write_the_format_of_their_readers() -> None:
    ops = build_context(facts_of("llama")).ops
    fp8, plain, other = (
        Reader("fp8_group128_values"),
        Reader("plain"),
        Reader("a format no table provides"),
    )
    assert agreed_format([fp8, fp8]) == "fp8_group128_values"
    assert agreed_format([fp8, plain]) == agreed_format([]) == "plain"
    assert producer(ops, "rms_norm", plain) is producer(ops, "rms_norm", fp8, plain) is ops.rms_norm
    assert producer(ops, "rms_norm", other) is ops.rms_norm
    assert caster(ops, plain) is caster(ops, other) is None
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    weight = torch.rand(256)
    fused = producer(ops, "rms_norm", fp8)(x, weight, 1e-6)
    cast = caster(ops, fp8)
    assert cast is not None and isinstance(fused, Quantized)
    rounded = cast(ops.rms_norm(x, weight, 1e-6))
    assert isinstance(rounded, Quantized)
    assert torch.equal(fused.values, rounded.values)
    assert not torch.equal(fused.values, ops.rms_norm(x, weight, 1e-6))


def test_a_mixture_rounds_its_input_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The routed and the shared expert read one rounded tensor."""
    from glowplug.kernels.elementwise import cpu_small as few

    facts = facts_of("v3_fp8")
    model, context = build_model(
        facts,
        random_tensors(facts, "block_fp8"),
        build_context(
            facts, quantization="block_fp8", quantization_options={"activations": "dynamic"}
        ),
    )
    mixture: Any = model.layers[1].feed_forward  # type: ignore[attr-defined]
    rounded: list[int] = []
    real = few.round_into_e4m3

    def spy(x: few.Floats) -> few.Floats:
        rounded.append(x.shape[1])
        return real(x)

    monkeypatch.setattr(few, "round_into_e4m3", spy)
    mixture.forward(torch.randn(4, facts.hidden_size))
    assert (
        rounded.count(facts.hidden_size) == 3
    )  # the input once, and two inner activations of the same width
    assert len(rounded) == 3


def test_a_norm_hands_a_mixture_both_forms() -> None:
    """Where a kernel writes plain and rounded activations at once, the gate reads the plain and the
    experts the rounded ones.
    """
    facts = facts_of("v3_fp8")
    chosen: dict[str, Any] = {
        "quantization": "block_fp8",
        "quantization_options": {"activations": "dynamic"},
    }
    context = build_context(facts, **chosen)
    tensors = random_tensors(facts, "block_fp8")
    model, _ = build_model(facts, tensors, context)
    norm, cast = context.ops.rms_norm, context.ops.fused["cast", "fp8_group128_values"]

    def both(x: Tensor, weight: Tensor, eps: float) -> Both:
        normed = norm(x, weight, eps)
        return Both(normed, cast(normed))

    def add_both(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Both, Tensor]:
        return both(residual + x, weight, eps), residual + x

    kind = both_formats("fp8_group128_values")
    again = build_context(facts, **chosen)
    again.ops.fused = {
        **again.ops.fused,
        ("rms_norm", kind): both,
        ("add_rms_norm", kind): add_both,
    }
    other, _ = build_model(facts, tensors, again)
    layers: list[Any] = [each.layers[1] for each in (model, other)]  # type: ignore[attr-defined]
    assert [layer.feed_forward.input_format for layer in layers] == ["plain", kind]
    x, residual = (
        torch.randn(4, facts.hidden_size, generator=torch.Generator().manual_seed(n))
        for n in (0, 1)
    )
    plain, fused = (
        layer.feed_forward.forward(layer.post_norm.add(x, residual)[0]) for layer in layers
    )
    assert torch.equal(plain, fused)


def test_targets_come_from_children_in_order() -> None:
    class Leaf(Module):
        def __init__(self, name: str) -> None:
            self.name, self.finalized = name, False

        def own_targets(self) -> Any:
            yield Target(self.name, (2,), torch.zeros(2))

        def finalize(self) -> None:
            self.finalized = True

    class Tree(Module):
        def __init__(self) -> None:
            self.first, self.many, self.number = Leaf("a"), [Leaf("b"), Leaf("c")], 3

    tree = Tree()
    assert [target.name for target in tree.targets()] == ["a", "b", "c"]
    tree.finalize()
    assert tree.first.finalized and all(leaf.finalized for leaf in tree.many)


def test_whole_slices_are_recognisable() -> None:
    assert part_of(0, 8, 8) == slice(None)
    assert part_of(4, 4, 8) == slice(4, 8)


@pytest.mark.parametrize(
    ("config", "scale", "theta"),
    [
        ({"rope_theta": 5.0}, 1.0, 5.0),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
            1.36888794541139,
            10000.0,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 7.0,
                    "factor": 40,
                    "mscale_all_dim": 1.0,
                }
            },
            1.36888794541139,
            7.0,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, 1.0, 10000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 1.0, 7.0),
    ],
)
def test_rope_config_in_either_spelling(config: dict[str, Any], scale: float, theta: float) -> None:
    read = RopeConfig.read(config)
    assert read.softmax_scale(64) == pytest.approx(64**-0.5 * scale**2)
    assert read.theta == theta

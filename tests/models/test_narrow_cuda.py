"""Int8 and int4 methods whose weights stay narrow, against the dequantised ones: fused parts,
slices, a shared expert.

Without a GPU the kernels are interpreted.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.plan.plan import EnginePlan  # noqa: E402
from glowplug.core.protocols import ExpertsShape, LinearShape, Quantized, Worker  # noqa: E402
from glowplug.core.testing.harness.build import plan_for  # noqa: E402
from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import int8, int8_triton as int8_quant  # noqa: E402
from glowplug.plugins.quantization.awq.cuda import AwqCuda  # noqa: E402
from glowplug.plugins.quantization.awq.plugin import AwqOptions  # noqa: E402
from glowplug.plugins.quantization.int8.cuda import W8A8Int8Cuda  # noqa: E402
from glowplug.plugins.quantization.int8.plugin import W8A8Int8Options  # noqa: E402
from tests.support.narrow_checkpoints import AWQ, INT8, awq_matrix, int8_matrix, tiny_facts  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,)
KINDS = ("int8", "online int8", "awq")


class Checkpoint:
    """Random matrices by module name, in one format; ``dense`` holds their values."""

    def __init__(self, kind: str, group: int = 32, seed: int = 1) -> None:
        self.kind, self.group, self.tensors, self.dense = kind, group, {}, {}  # type: ignore[var-annotated]
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, rows: int, columns: int) -> None:
        weight = self.randn(rows, columns) / columns**0.5
        if self.kind == "awq":
            parts, self.dense[name] = awq_matrix(weight, self.group)
            self.tensors |= {f"{name}.{leaf}": part for leaf, part in parts.items()}
            return
        stored, scales, self.dense[name] = int8_matrix(weight)
        self.tensors |= (
            {f"{name}.weight": weight}
            if self.kind != "int8"
            else {f"{name}.weight": stored, f"{name}.weight_scale": scales}
        )

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def plan(self, dtype: torch.dtype) -> EnginePlan:
        config = {"int8": INT8, "awq": {**AWQ, "group_size": self.group}, "online int8": None}[
            self.kind
        ]
        facts = tiny_facts("v2", quantization_config=config, moe_intermediate_size=64)
        return replace(plan_for(facts), dtype=str(dtype).removeprefix("torch."))

    def scheme(self, dtype: torch.dtype, **options: Any) -> Any:
        made, read = (
            (AwqCuda, AwqOptions) if self.kind == "awq" else (W8A8Int8Cuda, W8A8Int8Options)
        )
        return made(read(**options), self.plan(dtype), Worker(device=DEVICE, dtype=dtype))  # type: ignore[operator]

    def load(self, method: Any) -> None:
        """Load every target once, in any order."""
        left = set(self.tensors)
        for target in reversed(list(method.targets())):
            left.discard(target.name)
            value = self.tensors[target.name]
            assert tuple(value.shape) == target.shape
            target.store(value[target.index].to(DEVICE))
        assert not left
        method.finalize()

    def rounded(self, x: Tensor) -> Tensor:
        return x.float() if self.kind == "awq" else int8.fake_quantize_tokens(x.float())


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, tolerance: float = 4e-3) -> None:
    assert found.dtype == dtype and torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= (
        1e-5 if dtype is torch.float32 else tolerance
    ) * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(128, 64), (576,), (136, 8, 120)])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_linear(kind: str, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    checkpoint, columns = Checkpoint(kind, seed=sum(rows)), 192
    names = tuple(f"m.{i}" for i in range(len(rows)))
    for name, size in zip(names, rows):
        checkpoint.add(name, size, columns)
        checkpoint.tensors[f"{name}.bias"] = checkpoint.randn(size)
    shape = LinearShape(
        "m",
        names,
        rows,
        columns,
        (0,) * len(rows),
        0,
        tuple((size, columns) for size in rows),
        bias=True,
    )
    method = checkpoint.scheme(dtype).linear(shape)
    checkpoint.load(method)
    weight = torch.cat([checkpoint.dense[name] for name in names]).to(DEVICE)
    bias = (
        torch.cat([checkpoint.tensors[f"{name}.bias"] for name in names]).to(DEVICE, dtype).float()
    )
    near(method.dense(), weight, dtype)
    for tokens in (0, 1, 5):
        x = checkpoint.randn(tokens, columns).to(DEVICE, dtype)
        near(method.apply(x), checkpoint.rounded(x) @ weight.t() + bias, dtype)
    if kind != "awq":
        assert torch.equal(method.apply(Quantized(*int8_quant.quantize(x))), method.apply(x))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_rank(kind: str) -> None:
    dtype = DTYPES[0]
    checkpoint = Checkpoint(kind)
    checkpoint.add("m", 96, 256)
    method = checkpoint.scheme(dtype).linear(
        LinearShape("m", ("m",), (32,), 64, (64,), 128, ((96, 256),))
    )
    checkpoint.load(method)
    weight = checkpoint.dense["m"][64:96, 128:192].to(DEVICE)
    near(method.dense(), weight, dtype)
    x = checkpoint.randn(3, 64).to(DEVICE, dtype)
    near(method.apply(x), checkpoint.rounded(x) @ weight.t(), dtype)


def test_a_slice_that_cuts_a_group_names_its_layer() -> None:
    checkpoint = Checkpoint("awq")
    checkpoint.add("model.layers.4.down_proj", 96, 256)
    name = "model.layers.4.down_proj"
    method = checkpoint.scheme(DTYPES[0]).linear(
        LinearShape("m", (name,), (96,), 48, (0,), 48, ((96, 256),))
    )
    with pytest.raises(
        ValueError,
        match=f"{name}: the slice from channel 48 to 96 does not consist of whole groups of 32",
    ):
        list(method.targets())


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("kind", [*KINDS, "awq, a group a row"])
def test_experts(kind: str, shared: int) -> None:
    dtype, count, hidden, inter = DTYPES[0], 4, 96, 64
    checkpoint = Checkpoint(kind.partition(",")[0], group=-1 if "," in kind else 32, seed=shared)
    for expert in range(count):
        for part in ("gate_proj", "up_proj"):
            checkpoint.add(f"e.{expert}.{part}", inter, hidden)
        checkpoint.add(f"e.{expert}.down_proj", hidden, inter)
    if shared:
        for part, size in (
            ("gate_proj", (shared * inter, hidden)),
            ("up_proj", (shared * inter, hidden)),
            ("down_proj", (hidden, shared * inter)),
        ):
            checkpoint.add(f"s.{part}", *size)
    method = checkpoint.scheme(dtype).experts(
        ExpertsShape("e", count, 0, hidden, inter, 0, inter, count, shared, "s")
    )
    checkpoint.load(method)
    dense = {name: weight.to(DEVICE) for name, weight in checkpoint.dense.items()}
    for tokens in (1, 6):
        x = checkpoint.randn(tokens, hidden).to(DEVICE, dtype)
        ids = torch.tensor([[t % count, (t + 1) % count] for t in range(tokens)])
        weights = torch.rand(tokens, 2)
        if shared:
            ids = torch.cat([ids, torch.arange(count, count + shared).expand(tokens, shared)], 1)
            weights = torch.cat([weights, torch.ones(tokens, shared)], 1)
        found = method.apply(x, ids.int().to(DEVICE), weights.to(DEVICE))
        near(
            found,
            experts(checkpoint, dense, x, ids, weights.to(DEVICE), count, inter),
            dtype,
            1.5e-2,
        )


def experts(
    checkpoint: Checkpoint,
    dense: dict[str, Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    count: int,
    inter: int,
) -> Tensor:
    """Return float32 results; slices of the shared expert are experts of their own."""
    out = torch.zeros(x.shape, device=x.device)
    for token in range(len(ids)):
        for slot, expert in enumerate(ids[token].tolist()):
            name, span = (
                (f"e.{expert}", slice(None))
                if expert < count
                else ("s", slice((expert - count) * inter, (expert - count + 1) * inter))
            )
            gate, up = (dense[f"{name}.{part}"][span] for part in ("gate_proj", "up_proj"))
            hidden = checkpoint.rounded(x[token : token + 1]) @ torch.cat([gate, up]).t()
            inner = checkpoint.rounded(silu_and_mul(hidden).to(x.dtype))
            out[token] += (inner @ dense[f"{name}.down_proj"][:, span].t())[0] * weights[
                token, slot
            ]
    return out

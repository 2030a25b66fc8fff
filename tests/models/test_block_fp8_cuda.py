"""FP8 methods whose weights stay E4M3, against the dequantising ones: fused and ragged parts,
slices, a shared expert.

Without a GPU the kernels are interpreted, and the interpreter casts a few activations in a hundred
wrongly: there GEMMs agree only approximately, weights exactly.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from glowplug.core.protocols import ExpertsShape, LinearShape, Quantized  # noqa: E402
from glowplug.kernels.elementwise.activation_reference import silu_and_mul  # noqa: E402
from glowplug.kernels.formats import fp8, fp8_triton as fp8_quant  # noqa: E402
from glowplug.plugins.quantization.block_fp8 import gemm_providers  # noqa: E402
from glowplug.plugins.quantization.block_fp8.cuda import Fp8ExpertsCuda, Fp8LinearCuda, grouped  # noqa: E402
from glowplug.plugins.quantization.block_fp8.gemm_providers import Providers  # noqa: E402
from glowplug.plugins.quantization.block_fp8.grouped import Grouped  # noqa: E402
from glowplug.plugins.quantization.block_fp8.plugin import SIXTEEN_BIT_ONLY  # noqa: E402

TOLERANCE = 4e-3 if DEVICE == "cuda" else 0.12
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def near(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.dtype == DTYPE and torch.isfinite(found).all()
    assert (found.float() - wanted).norm() <= tolerance * wanted.norm()


class Checkpoint:
    """Random matrices by module name, in FP8 blocks unless ``native`` is False; ``dense`` holds
    their values.
    """

    def __init__(self, native: bool, seed: int) -> None:
        self.native, self.tensors, self.dense = native, {}, {}  # type: ignore[var-annotated]
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, rows: int, columns: int) -> None:
        weight = torch.randn(rows, columns, generator=self._generator) / columns**0.5
        stored, scales = fp8.quantize_weight(weight)
        self.dense[name] = fp8.dequantize_weight(stored, scales, torch.float32)
        if self.native:
            self.tensors |= {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}
        else:
            self.tensors[f"{name}.weight"] = weight

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def load(self, method: Any) -> None:
        """Load every target once, in any order."""
        left = set(self.tensors)
        for target in reversed(list(method.targets())):
            left.remove(target.name)
            value = self.tensors[target.name]
            assert tuple(value.shape) == target.shape
            target.store(value[target.index])
        assert not left
        method.finalize()


def linear(shape: LinearShape, native: bool, gemm: str = "triton") -> Fp8LinearCuda:
    return Fp8LinearCuda(shape, DTYPE, DEVICE, native, Providers(gemm))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rows", [(128, 64), (576,), (192, 160), (130, 1, 127)])
@pytest.mark.parametrize("columns", [256, 192])
def test_fused_linear(native: bool, rows: tuple[int, ...], columns: int) -> None:
    checkpoint = Checkpoint(native, seed=sum(rows) + columns)
    names = tuple(f"m.{i}" for i in range(len(rows)))
    for name, size in zip(names, rows):
        checkpoint.add(name, size, columns)
    shape = LinearShape(
        "m", names, rows, columns, (0,) * len(rows), 0, tuple((size, columns) for size in rows)
    )
    method = linear(shape, native)
    checkpoint.load(method)
    weight = torch.cat([checkpoint.dense[name] for name in names]).to(DEVICE)
    assert torch.equal(method.dense(), weight.to(DTYPE))
    for tokens in (1, 5):
        x = checkpoint.randn(tokens, columns).to(DEVICE, DTYPE)
        wanted = fp8.fake_quantize_tokens(x.float()) @ weight.t()
        near(method.apply(x), wanted)
        assert torch.equal(method.apply(Quantized(*fp8_quant.quantize(x))), method.apply(x))
    assert method.apply(x[:0]).shape == (0, sum(rows))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("row", "size"), [(0, 128), (128, 128), (192, 192), (100, 300)])
def test_a_slice(native: bool, row: int, size: int) -> None:
    checkpoint = Checkpoint(native, seed=row)
    checkpoint.add("m", 576, 512)
    method = linear(LinearShape("m", ("m",), (size,), 256, (row,), 128, ((576, 512),)), native)
    checkpoint.load(method)
    assert torch.equal(
        method.dense(), checkpoint.dense["m"][row : row + size, 128:384].to(DEVICE, DTYPE)
    )


def test_a_slice_that_cuts_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="column 100"):
        linear(LinearShape("m", ("m",), (128,), 128, (0,), 100, ((128, 512),)), True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("inter", "shared"), [(128, 0), (128, 1), (256, 2), (96, 1), (72, 2)])
def test_experts(native: bool, inter: int, shared: int) -> None:
    count, hidden, per_token = 3, 256, 2
    checkpoint = Checkpoint(native, seed=inter + shared)
    for expert in range(count):
        for part in ("gate_proj", "up_proj"):
            checkpoint.add(f"m.experts.{expert}.{part}", inter, hidden)
        checkpoint.add(f"m.experts.{expert}.down_proj", hidden, inter)
    if shared:
        for part in ("gate_proj", "up_proj"):
            checkpoint.add(f"m.shared_experts.{part}", shared * inter, hidden)
        checkpoint.add("m.shared_experts.down_proj", hidden, shared * inter)
    method = Fp8ExpertsCuda(
        ExpertsShape(
            "m.experts", count, 0, hidden, inter, 0, inter, count, shared, "m.shared_experts"
        ),
        DTYPE,
        DEVICE,
        native,
        Grouped("triton"),
    )
    checkpoint.load(method)

    x = checkpoint.randn(4, hidden).to(DEVICE, DTYPE)
    chosen = torch.tensor([[0, 1], [2, 0], [1, -1], [2, 1]], dtype=torch.int32)
    weights = torch.rand(4, per_token + shared)
    weights[:, per_token:] = 1.0
    ids = torch.cat(
        [chosen, torch.arange(count, count + shared, dtype=torch.int32).expand(4, -1)], 1
    ).contiguous()
    found = method.apply(x, ids.to(DEVICE), weights.to(DEVICE))
    again = (
        shared > 1 and inter % 128 != 0
    )  # slices quantised by blocks of their own: one more rounding
    near(
        found,
        mixture(checkpoint, x.float().cpu(), chosen, weights, shared).to(DEVICE),
        max(TOLERANCE, 0.06 if again else 0.02),
    )
    assert method.apply(x[:0], ids[:0].to(DEVICE), weights[:0].to(DEVICE)).shape == (0, hidden)


def mixture(
    checkpoint: Checkpoint,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: int,
    between: torch.dtype = torch.float32,
) -> Tensor:
    """Return the experts' weighted sum, with the whole shared expert at weight 1; between the GEMMs
    rows have the dtype ``between``.
    """
    x = fp8.fake_quantize_tokens(x)

    def expert(prefix: str, row: Tensor) -> Tensor:
        gate, up, down = (
            checkpoint.dense[f"{prefix}.{part}_proj"] for part in ("gate", "up", "down")
        )
        hidden = torch.cat([row @ gate.t(), row @ up.t()], 1).to(between).float()
        return fp8.fake_quantize_tokens(silu_and_mul(hidden)) @ down.t()

    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        row = x[token : token + 1]
        for slot, chosen in enumerate(ids[token].tolist()):
            if chosen >= 0:
                out[token] += weights[token, slot] * expert(f"m.experts.{chosen}", row)[0]
        if shared:
            out[token] += expert("m.shared_experts", row)[0]
    return out


@pytest.mark.parametrize("wanted", ["auto", "cublas"])
def test_providers_of_16_bits_are_not_chosen_for_float32(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured and other shapes are tried, with every library installed."""
    monkeypatch.setattr(gemm_providers._Library, "missing", lambda self: "")
    table = {"N=512,K=512": {"64": "cutlass", "512": "cublas"}}
    for rows, columns in ((1, 512), (64, 512), (512, 512), (512, 768)):
        assert (
            Providers(wanted, table, torch.float32).pick(rows, columns, 512).name
            not in SIXTEEN_BIT_ONLY
        )
    assert {
        Providers("auto", table, dtype).pick(64, 512, 512).name
        for dtype in (torch.float16, torch.bfloat16)
    } == {"cutlass"}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 70])
def test_float32_by_whoever_is_measured(tokens: int) -> None:
    checkpoint = Checkpoint(True, seed=tokens)
    checkpoint.add("m", 512, 512)
    shape = LinearShape("m", ("m",), (512,), 512, (0,), 0, ((512, 512),))
    method = Fp8LinearCuda(shape, torch.float32, DEVICE, True, Providers(dtype=torch.float32))
    checkpoint.load(method)
    x = checkpoint.randn(tokens, 512).to(DEVICE)
    found = method.apply(x)
    assert found.dtype is torch.float32
    near(
        found.to(DTYPE), fp8.fake_quantize_tokens(x.float()) @ checkpoint.dense["m"].to(DEVICE).t()
    )


@pytest.mark.parametrize("rows", [1, 4, 6, 33])
@pytest.mark.parametrize("laid_out", ["side by side", "by row", "a slice"])
def test_flashinfer_gets_scales_in_its_kernels_layout(rows: int, laid_out: str) -> None:
    """The scale of a row's group is read from place ``group * ceil4(M) + row`` of the memory, in
    every layout.
    """
    depth, columns = 384, 128
    x, stored = torch.randn(rows, depth), fp8.quantize_weight(torch.randn(columns, depth))
    values, scales = fp8_quant.empty_quantized(
        rows + 3 if laid_out == "a slice" else rows, depth, torch.device("cpu")
    )
    values, scales = values[:rows], scales[:rows]
    scales.copy_(x.view(rows, -1, 128).abs().amax(2) / 448)
    values.copy_((x.view(rows, -1, 128) / scales.unsqueeze(2)).view(rows, depth))
    held = -(-rows // 4) * 4

    def product(x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, out: Tensor) -> None:
        read = torch.as_strided(x_scales, (rows, depth // 128), (1, held))
        wide = x.float() * read.repeat_interleave(128, 1)
        out.copy_(wide @ fp8.dequantize_weight(weight, w_scales, torch.float32).t())

    provider = gemm_providers.Flashinfer()
    provider._call = product
    given = scales.contiguous() if laid_out == "by row" else scales
    found = provider(values, given, *stored, torch.float32)
    wanted = (values.float() * scales.repeat_interleave(128, 1)) @ fp8.dequantize_weight(
        *stored, torch.float32
    ).t()
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.timeout(
    900
)  # compiling flashinfer's kernels takes a minute, beside other processes several
@pytest.mark.parametrize("gemm", ["triton", "deep_gemm", "cutlass", "cublas", "flashinfer", "auto"])
@pytest.mark.parametrize("tokens", [1, 6, 8, 31, 70, 512])
def test_every_provider(gemm: str, tokens: int) -> None:
    if Providers()._all.get(gemm) is not None and (why := Providers()._all[gemm].missing()):
        pytest.skip(why)
    checkpoint = Checkpoint(True, seed=tokens)
    checkpoint.add("a", 256, 1024)
    checkpoint.add("b", 576, 1024)
    method = linear(
        LinearShape("m", ("a", "b"), (256, 576), 1024, (0, 0), 0, ((256, 1024), (576, 1024))),
        True,
        gemm,
    )
    checkpoint.load(method)
    weight = torch.cat([checkpoint.dense["a"], checkpoint.dense["b"]]).to(DEVICE)
    for _ in range(2):
        x = checkpoint.randn(tokens, 1024).to(DEVICE, DTYPE)
        near(method.apply(x), fp8.fake_quantize_tokens(x.float()) @ weight.t())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("wanted", ["deep_gemm", "deep_gemm_masked", "cutlass"])
def test_experts_by_grouped_products(wanted: str, tokens: int) -> None:
    """The library's rows are bfloat16 between its GEMMs, where our kernel's may be float32: some
    numbers then round to the next step of E4M3, and the two differ by 1.5e-2, so they are
    compared with rows rounded alike. The order of sums remains: 2^-12 of a row's size moves the
    result by 0.7e-2, rounding to E4M3 as such by 2.3e-2. Of a single token's two rows one number
    may make 3.5e-2, hence draws of 48 rows or more.
    """
    pytest.importorskip("sgl_kernel" if wanted == "cutlass" else "deep_gemm")
    count, hidden, inter = 6, 512, 256
    checkpoint = Checkpoint(True, seed=tokens)
    for expert in range(count):
        for part, shape in (
            ("gate", (inter, hidden)),
            ("up", (inter, hidden)),
            ("down", (hidden, inter)),
        ):
            checkpoint.add(f"m.experts.{expert}.{part}_proj", *shape)
    method = Fp8ExpertsCuda(
        ExpertsShape("m.experts", count, 0, hidden, inter, 0, inter, count),
        DTYPE,
        DEVICE,
        True,
        grouped(wanted),
    )
    checkpoint.load(method)
    found, wanted = [], []
    for _ in range(max(2, 24 // tokens)):
        x = checkpoint.randn(tokens, hidden).to(DTYPE)
        ids = checkpoint.randn(tokens, count).argsort(1)[:, :3].to(torch.int32).contiguous()
        ids[0, 0] = -1
        weights = checkpoint.randn(tokens, 3).sigmoid()
        found.append(method.apply(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)))
        wanted.append(mixture(checkpoint, x.float(), ids, weights, 0, between=torch.bfloat16))
    near(torch.cat(found), torch.cat(wanted).to(DEVICE), 2e-2)

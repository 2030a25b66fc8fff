"""The LM head's GEMM in Triton against float64, in the interpreter or on a GPU. It compiles for
Hopper without such a GPU, and only a table lets it replace cuBLAS.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.gemm import lm_head as head_gemm
from glowplug.kernels.launch import tuned_tables as tuned
from glowplug.kernels.launch.tuned_tables import Config
from tests.support import uninterpreted
from tests.support.tables import forget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.gemm import lm_head as tiles

for tma, tokens in ((True, 32), (False, 128)):
    build(tiles.tiles_kernel, dict(x="*bf16", weight="tensordesc<bf16[64, 64]>" if tma else "*bf16",
                                   stored="*bf16",
          out="*fp32"), dict(TOKENS=tokens, BLOCK_N=64, BLOCK_K=64, TMA=tma, FETCH=4, EVEN=True,
                             DEPENDENT=True),
          ("size", "depth", "x_stride"), num_stages=5, launch_pdl=True)
"""


def tiles(rows: int, depth: int, tma: bool) -> Config:
    return {
        "way": "tiles",
        "BLOCK_N": rows,
        "BLOCK_K": depth,
        "TMA": tma,
        "FETCH": 2,
        "num_warps": 4,
        "num_stages": 3,
    }


def drawn(tokens: int, size: int, depth: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x, weight = (
        torch.randn(shape, generator=generator, device=DEVICE)
        for shape in ((tokens, depth), (size, depth))
    )
    dtype = (
        torch.bfloat16 if DEVICE == "cuda" else torch.float32
    )  # the interpreter does not multiply bfloat16
    return x.to(dtype), (weight * depth**-0.5).to(dtype)


def difference(found: Tensor, x: Tensor, weight: Tensor) -> float:
    wanted = x.double() @ weight.double().t()
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["tiles_kernel"] * 2


@pytest.mark.parametrize(
    ("config", "tokens", "size", "depth"),
    [
        (tiles(16, 16, False), 1, 50, 72),
        (tiles(32, 32, False), 20, 500, 96),
        (tiles(32, 16, True), 5, 100, 64),
        (tiles(16, 64, True), 17, 40, 128),
    ],
)
def test_tiles(config: Config, tokens: int, size: int, depth: int) -> None:
    for seed in (0, 1):
        x, weight = drawn(tokens, size, depth, seed)
        assert difference(head_gemm.multiply(x, weight, config), x, weight) < 5e-5


def test_cublas_is_used_without_a_table(own_tables: Path) -> None:
    assert head_gemm.lm_head_config(32, 1000, 64) is None
    ours = tiles(64, 64, True)
    tuned.keep(own_tables / tuned.head_file_name(1000, 64), {8: {"way": "cublas"}, 32: ours})
    forget()
    chosen = {
        tokens: head_gemm.lm_head_config(tokens, 1000, 64) for tokens in (0, 1, 8, 30, 64, 65, 200)
    }
    assert chosen == {0: None, 1: None, 8: None, 30: ours, 64: ours, 65: None, 200: None}
    assert head_gemm.lm_head_config(32, 1000, 72) is None


def test_a_slice_of_the_vocabulary_uses_the_table_of_the_whole_head(own_tables: Path) -> None:
    ours, other = tiles(64, 64, True), tiles(32, 64, True)
    tuned.keep(own_tables / tuned.head_file_name(2000, 64), {8: ours, 32: {"way": "cublas"}})
    tuned.keep(own_tables / tuned.head_file_name(500, 64), {8: other})
    forget()
    found = {size: head_gemm.lm_head_config(8, size, 64) for size in (2000, 1000, 500, 250, 400)}
    assert found == {2000: ours, 1000: ours, 500: other, 250: other, 400: None}
    assert head_gemm.lm_head_config(32, 1000, 64) is None


def test_supported_dtypes_and_shapes() -> None:
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(9, 64, dtype=torch.bfloat16)
    assert head_gemm.lm_head_fits(x, weight)
    assert not head_gemm.lm_head_fits(x.float(), weight.float()) and not head_gemm.lm_head_fits(
        x[:0], weight
    )
    assert not head_gemm.lm_head_fits(x[:, :32], weight[:, :32]) and not head_gemm.lm_head_fits(
        x.repeat(50, 1), weight
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [tiles(64, 64, True), tiles(64, 64, False), tiles(64, 128, True)],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
@pytest.mark.parametrize(
    ("size", "depth"), [(102400, 2048), (40001, 1536), (1000, 1024), (24, 576)]
)
def test_bfloat16(size: int, depth: int, config: Config) -> None:
    """It runs after a kernel that computes x and is replayed with other inputs; a token's scores do
    not depend on others.
    """
    for tokens in (1, 8, 32, 33, 128):
        x, weight = drawn(tokens, size, depth, tokens)
        head_gemm.multiply(x, weight, config)
        torch.cuda.synchronize()
        graph, half = torch.cuda.CUDAGraph(), x * 0.5
        with torch.cuda.graph(graph):
            made = half + half
            found = head_gemm.multiply(made, weight, config)
        for seed in (3, 4):
            x = drawn(tokens, 8, depth, seed)[0]
            half.copy_(x * 0.5)
            found.fill_(float("nan"))
            graph.replay()
            assert difference(found, x, weight) < 5e-5
            assert torch.equal(found, head_gemm.multiply(x, weight, config)), "repeats bit by bit"
        if tokens == 33:
            assert torch.equal(
                found[5:22], head_gemm.multiply(x[5:22].contiguous(), weight, config)
            )


@pytest.mark.gpu
def test_a_head_with_a_table(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glowplug.core.protocols import LinearShape
    from glowplug.plugins.quantization.dense.layers_cuda import CudaLinear

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    shape = LinearShape(
        name="lm_head",
        parts=("lm_head",),
        outputs=(4000,),
        inputs=1024,
        row_starts=(0,),
        col_start=0,
        full=((4000, 1024),),
        bias=False,
        wide=True,
    )
    head = CudaLinear(shape, torch.bfloat16, "cuda")
    x, weight = drawn(32, 4000, 1024, 0)
    head.rows.copy_(weight)
    plain = head.apply(x)
    asked: list[int] = []
    multiply = head_gemm.multiply
    monkeypatch.setattr(
        head_gemm, "multiply", lambda *given: asked.append(len(given[0])) or multiply(*given)
    )
    tuned.keep(
        own_tables / tuned.head_file_name(4000, 1024),
        {16: {"way": "cublas"}, 32: tiles(64, 64, True)},
    )
    forget()
    assert difference(head.apply(x), x, weight) < 5e-5 and difference(plain, x, weight) < 5e-5
    assert difference(head.apply(x.repeat(5, 1)), x.repeat(5, 1), weight) < 5e-5
    assert asked == [32], "160 rows and those of cuBLAS are no business of theirs"
    head.apply(x[:8])
    assert asked == [32]

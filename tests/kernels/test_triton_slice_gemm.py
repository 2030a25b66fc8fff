"""GEMMs split along their depth, on Hopper; elsewhere they are at least compiled for it."""

from __future__ import annotations

import pytest
import torch

from tests.support import uninterpreted

pytest.importorskip("triton")

SCRIPT = """
from tests.support.compiled import build, tile
from glowplug.kernels.gemm import split_depth as slice_gemm

for tokens in (32, 64):
    build(slice_gemm.slice_kernel, dict(out="*fp32", x_at=tile(tokens, 64),
                                        w_at=tile(slice_gemm.PROGRAM_ROWS, 64)),
          dict(SPLITS=4, STEPS=8, ROWS=slice_gemm.PROGRAM_ROWS, TOKENS=tokens, DEPENDENT=True),
          num_warps=4, launch_pdl=True)
"""


@pytest.mark.slow
def test_they_compile_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["slice_kernel"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 24, 32, 33, 64])
@pytest.mark.parametrize(("size", "depth"), [(2048, 2048), (1000, 1024)])
def test_parts_add_up(tokens: int, size: int, depth: int) -> None:
    """The following norm gives the same result as for the whole GEMM; other inputs run in the same
    graph.
    """
    from glowplug.core.protocols import Parts
    from glowplug.kernels.elementwise import norm
    from glowplug.kernels.gemm import split_depth as slice_gemm
    from glowplug.plugins.quantization.dense.layers_cuda import _split_parts

    generator = torch.Generator("cuda").manual_seed(tokens)
    x, weight, residual = (
        torch.randn(shape, generator=generator, device="cuda").mul_(scale).bfloat16()
        for shape, scale in (
            ((tokens, depth), 1.0),
            ((size, depth), depth**-0.5),
            ((tokens, size), 1.0),
        )
    )
    gain = torch.ones(size, device="cuda", dtype=torch.bfloat16)

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        parts = _split_parts(x, weight)
        assert isinstance(parts, Parts) and parts.ids.shape == (tokens, slice_gemm.SPLITS)
        return norm.add_rms_norm(parts.rows, residual, gain, 1e-6, parts.ids)

    made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made()
    for seed in range(3):
        x.copy_(torch.randn(tokens, depth, device="cuda", generator=generator.manual_seed(seed)))
        for part in found:
            part.fill_(float("nan"))
        graph.replay()
        total = residual.double() + x.double() @ weight.double().t()
        wanted = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6)
        for part, want in zip(found, (wanted, total), strict=True):
            assert ((part.double() - want).norm() / want.norm()).item() < 5e-3
        assert all(torch.equal(a, b) for a, b in zip(found, made(), strict=True))


@pytest.mark.gpu
def test_what_it_is_for() -> None:
    from glowplug.kernels.gemm import split_depth as slice_gemm

    device = torch.device("cuda", 0)
    for tokens, size, depth, fits in (
        (32, 2048, 2048, True),
        (64, 2048, 2048, True),
        (16, 2048, 2048, False),
        (65, 2048, 2048, False),
        (32, 3648, 2048, False),
        (32, 2048, 1408, False),
        (32, 1024, 4096, False),
    ):
        assert slice_gemm.split_depth_pays(tokens, size, depth, torch.bfloat16, device) is fits
    assert not slice_gemm.split_depth_pays(32, 2048, 2048, torch.float32, device)

"""The synthetic source: tensors depend on seed and name, with scales that keep a model's outputs
finite and varied.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from glowplug.core.protocols import Worker
from glowplug.plugins.weights import random_runtime
from glowplug.plugins.weights.random import RandomOptions
from glowplug.plugins.weights.random_runtime import RandomSource


def source(seed: int = 0, **facts: Any) -> RandomSource:
    made = RandomSource(RandomOptions(), cast(Any, SimpleNamespace(seed=seed)), Worker())
    given = {"dtype": "float32", "config": {}, "num_layers": 8, "quant_block": (128, 128), **facts}
    made.open(cast(Any, SimpleNamespace(**given)))
    return made


def target(
    name: str, *shape: int, index: tuple[slice, ...] | None = None, dtype: str | None = None
) -> Any:
    return SimpleNamespace(
        name=name, shape=shape, index=index or (slice(None),) * len(shape), dtype=dtype
    )


def test_deterministic_by_seed_and_name_only() -> None:
    q = "model.layers.0.self_attn.q_proj.weight"
    value = source().read(target(q, 64, 32))
    other = source()
    other.read(target("something.weight", 9, 9))
    assert torch.equal(other.read(target(q, 64, 32)), value)
    assert torch.equal(
        source().read(target(q, 64, 32, index=(slice(8, 24), slice(3, 9)))), value[8:24, 3:9]
    )
    assert not torch.equal(source(seed=1).read(target(q, 64, 32)), value)
    assert not torch.equal(source().read(target(q.replace("0", "1"), 64, 32)), value)


@pytest.mark.parametrize(
    ("name", "shape", "deviation"),
    [
        ("model.embed_tokens.weight", (500, 256), 1.0),
        ("lm_head.weight", (500, 256), 256**-0.5),
        ("model.layers.3.mlp.gate.weight", (64, 256), 256**-0.5),
        ("model.layers.3.mlp.experts.5.down_proj.weight", (256, 512), (16 * 512) ** -0.5),
    ],
)
def test_scales_of_weights(name: str, shape: tuple[int, ...], deviation: float) -> None:
    assert source().read(target(name, *shape)).std().item() == pytest.approx(deviation, rel=0.05)


def test_norms_are_near_one_and_biases_small_but_not_zero() -> None:
    norm = source().read(target("model.norm.weight", 512))
    assert norm.mean().item() == pytest.approx(1.0, abs=0.02) and 0.05 < norm.std().item() < 0.2
    bias = source(dtype="bfloat16").read(
        target("model.layers.3.mlp.gate.e_score_correction_bias", 256)
    )
    assert bias.dtype == torch.float32 and bias.abs().min() > 0 and bias.abs().max() < 0.5


def test_dtype_follows_the_checkpoint() -> None:
    assert source(dtype="bfloat16").read(target("lm_head.weight", 8, 8)).dtype == torch.bfloat16
    assert (
        source(dtype="bfloat16").read(target("x.weight", 8, 8, dtype="float32")).dtype
        == torch.float32
    )


def test_fp8_weight_and_scale_give_a_weight_of_fan_in_scale() -> None:
    made, name = source(), "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    codes = made.read(target(name, 576, 256, dtype="float8_e4m3fn"))
    scale = made.read(target(name + "_scale_inv", 5, 2, dtype="float32"))
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and (scale > 0).all()
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:576]
    weight = codes.float() * full
    assert torch.isfinite(weight).all() and weight.std().item() == pytest.approx(
        256**-0.5, rel=0.15
    )
    assert scale.flatten().unique().numel() == 10


CUTS = {
    "rows": (slice(5, 12), slice(None)),
    "columns": (slice(None), slice(3, 10)),
    "rows and columns": (slice(2, 13), slice(8, 9)),
    "one element": (slice(12, 13), slice(16, 17)),
    "every other row": (slice(1, None, 2), slice(None)),
    "every third column": (slice(None), slice(2, None, 3)),
    "no rows": (slice(4, 4), slice(None)),
    "no columns": (slice(None), slice(17, 17)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.1.mlp.down_proj.weight", None),
        ("lm_head.weight", "float32"),
        ("model.layers.1.mlp.down_proj.weight", "float8_e4m3fn"),
        ("model.layers.1.mlp.down_proj.weight_scale_inv", "float32"),
        ("model.layers.1.mlp.down_proj.weight", "int8"),
        ("model.layers.1.mlp.down_proj.weight_scale", "float32"),
        ("model.layers.1.mlp.down_proj.qweight", "int32"),
        ("model.layers.1.mlp.down_proj.qzeros", "int32"),
        ("model.layers.1.mlp.down_proj.scales", "float16"),
    ],
)
@pytest.mark.parametrize("piece", [40, 3])
def test_a_slice_is_that_of_the_whole_tensor(
    cut: str, name: str, dtype: str | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bits agree, for pieces of several rows, of a part of a row and of everything."""
    made = source(dtype="bfloat16", hidden_size=64)
    whole = made.read(target(name, 13, 17, dtype=dtype))
    monkeypatch.setitem(random_runtime.PIECE_NUMBERS, "cpu", piece)
    got = made.read(target(name, 13, 17, index=CUTS[cut], dtype=dtype))
    wanted = whole[CUTS[cut]]
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((9,), (slice(2, 7),)),
        ((4, 5, 6), (slice(1, 3), slice(None), slice(None))),
        ((4, 5, 6), (slice(1, 3), slice(2, 4), slice(None))),
        ((4, 5, 6), (slice(1, 3), slice(2, 4), slice(1, 6, 2))),
        ((4, 5, 6), (slice(None), slice(None), slice(2, 4))),
    ],
)
def test_tensors_of_any_dimension_are_cut(shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
    made, name = source(), "model.layers.0.x.weight"
    assert torch.equal(
        made.read(target(name, *shape, index=index)), made.read(target(name, *shape))[index]
    )


@pytest.mark.parametrize("cut", [(slice(1024), slice(None)), (slice(None), slice(128, 256))])
def test_only_the_numbers_of_a_slice_are_drawn(
    cut: tuple[slice, slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    bits = random_runtime._bits

    def counted(key: int, positions: Tensor) -> Tensor:
        drawn.append(len(positions))
        return bits(key, positions)

    monkeypatch.setattr(random_runtime, "_bits", counted)
    got = source().read(target("model.layers.0.mlp.down_proj.weight", 7168, 2048, index=cut))
    assert sum(drawn) == got.numel() < 7168 * 2048

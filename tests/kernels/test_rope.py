"""Rotary embedding: frequencies against transformers, rotations against complex arithmetic in
float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glowplug.kernels.elementwise import rope_reference as rope

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dim", [16, 64, 100])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_transformers(name: str, dim: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=dim * 2,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    got, ours = rope.inverse_frequencies(dim, theta, scaling, 4096, 4096)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-9)


def test_dynamic_beyond_the_trained_length() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **SCALINGS["dynamic"]},
    )
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=2048)
    got, _ = rope.inverse_frequencies(32, 10000.0, SCALINGS["dynamic"], 512, 2048)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def test_published_spelling_and_unknown_type() -> None:
    published = {**{k: v for k, v in SCALINGS["yarn"].items() if k != "rope_type"}, "type": "yarn"}
    assert torch.equal(
        rope.inverse_frequencies(32, 1e4, published, 4096)[0],
        rope.inverse_frequencies(32, 1e4, SCALINGS["yarn"], 4096)[0],
    )
    with pytest.raises(ValueError, match="longrope"):
        rope.inverse_frequencies(32, 1e4, {"rope_type": "longrope"}, 4096)


def test_mscale() -> None:
    assert rope.yarn_mscale(40.0, 1.0) == pytest.approx(0.1 * math.log(40) + 1)
    assert rope.yarn_mscale(1.0, 5.0) == 1.0


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (5, 3, 8), (33, 4, 64)])
def test_rotation(interleaved: bool, tokens: int, heads: int, dim: int) -> None:
    frequencies, _ = rope.inverse_frequencies(dim, 10000.0)
    table = rope.cos_sin_table(frequencies, 1.5, 1000)
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, heads, dim + 6, generator=generator)[
            ..., 6:
        ]  # a slice, as of a query with nope
        positions = torch.randint(0, 1000, (tokens,), generator=generator)
        angles = positions.double()[:, None, None] * frequencies.double()
        pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        turned = torch.complex(*(part.double() for part in pairs)) * torch.polar(
            torch.tensor(1.5).double(), angles
        )
        wanted = (
            torch.stack([turned.real, turned.imag], -1).flatten(-2)
            if interleaved
            else torch.cat([turned.real, turned.imag], -1)
        ).float()
        rows = table[positions]
        torch.testing.assert_close(
            rope.rotate_reference(x, rows, interleaved), wanted, atol=2e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            rope.rotate(x, rope.prepare(rows, interleaved)), wanted, atol=2e-4, rtol=1e-4
        )


def test_scores_depend_on_distance_alone() -> None:
    table = rope.cos_sin_table(rope.inverse_frequencies(16, 100.0)[0], 1.0, 64)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(3))
    for interleaved in (True, False):

        def score(i: int, j: int, interleaved: bool = interleaved) -> float:
            turned = [
                rope.rotate(t, rope.prepare(table[at : at + 1], interleaved))
                for t, at in ((q, i), (k, j))
            ]
            return float((turned[0] * turned[1]).sum())

        assert score(5, 2) == pytest.approx(score(43, 40), abs=1e-4)
        assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-3)

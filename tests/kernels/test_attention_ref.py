"""Attention kernels against their float64 definitions."""

from __future__ import annotations

import pytest
import torch

from glowplug.kernels.mha import reference as mha
from glowplug.kernels.mla import reference as mla
from glowplug.kernels.paged.merge_states_reference import merge_states, merge_states_reference


def make(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_equals_its_definition(parts: int) -> None:
    outs, lses = make(parts, 7, 3, 11, seed=parts), make(parts, 7, 3, seed=parts + 1, scale=20.0)
    state = outs[0], lses[0]
    for part in range(1, parts):
        state = merge_states(*state, outs[part], lses[part])
    out, lse = merge_states_reference(outs, lses)
    torch.testing.assert_close(state[0].double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state[1].double(), lse, rtol=1e-6, atol=1e-6)


def test_merge_with_an_empty_state_changes_nothing() -> None:
    out, lse = make(5, 4, seed=1), make(5, seed=2)
    empty = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for merged in (merge_states(out, lse, *empty), merge_states(*empty, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    both = merge_states(*empty, *empty)
    assert torch.equal(both[0], torch.zeros_like(out)) and torch.isneginf(both[1]).all()


def test_merge_keeps_extreme_scores() -> None:
    """Scores far beyond exp's range, on either side, do not overflow."""
    out_a, out_b = torch.ones(2, 3), torch.zeros(2, 3)
    merged, lse = merge_states(
        out_a, torch.tensor([500.0, -500.0]), out_b, torch.tensor([-500.0, 500.0])
    )
    assert torch.equal(merged, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert torch.equal(lse, torch.tensor([500.0, 500.0]))


@pytest.mark.parametrize(("count", "keys"), [(1, 1), (1, 33), (5, 5), (7, 40), (33, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_mha_forms_agree(
    count: int, keys: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (
        make(count, heads, 9, seed=1),
        make(keys, kv_heads, 9, seed=2),
        make(keys, kv_heads, 7, seed=3),
    )
    expected = mha.mha_reference(q, k, v, 0.4)
    hidden = torch.arange(keys) > (torch.arange(count) + keys - count).unsqueeze(1)
    bias = torch.zeros(1, count, keys).masked_fill_(hidden, float("-inf"))
    whole = mha.attend(q[None], k[None], v[None], 0.4, bias)[0]
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-6)
    if count == keys:
        causal = mha.attend_causal(q[None], k[None], v[None], 0.4)[0]
        torch.testing.assert_close(causal.double(), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(mha, "MAX_SCORES", heads * keys * 3)  # blocks of three queries
    state = mha.partial_attention(q, k[keys - count :], v[keys - count :], 0.4, causal=True)
    for start in range(0, keys - count, 10):
        part = slice(start, min(start + 10, keys - count))
        state = merge_states(*state, *mha.partial_attention(q, k[part], v[part], 0.4, causal=False))
    torch.testing.assert_close(state[0].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("count", "keys"), [(1, 1), (1, 37), (3, 17), (8, 8)])
def test_mla_absorbed_equals_its_definition(count: int, keys: int) -> None:
    q_nope, q_rope = make(count, 3, 8, seed=1), make(count, 3, 4, seed=2)
    latent, rope = make(keys, 16, seed=3), make(keys, 4, seed=4)
    w_uk, w_uv = make(3, 8, 16, seed=5, scale=0.3), make(3, 16, 6, seed=6, scale=0.3)
    expected = mla.mla_reference(q_nope, q_rope, latent, rope, w_uk, w_uv, 0.3).flatten(1)
    hidden = torch.arange(keys) > (torch.arange(count) + keys - count).unsqueeze(1)
    bias = torch.zeros(1, count, keys).masked_fill_(hidden, float("-inf"))
    q_latent = mla.absorb_query(q_nope, w_uk)
    out = mla.attend_latent(q_latent[None], q_rope[None], latent[None], rope[None], 0.3, bias)[0]
    torch.testing.assert_close(
        mla.project_output(out, w_uv).double(), expected, rtol=1e-5, atol=1e-6
    )

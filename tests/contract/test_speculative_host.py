"""NextN's steps over decoding rows on the host, against the same steps as a device runs them."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.batch import Batch
from glowplug.core.testing.speculative_suite import HIDDEN, Greedy, likely
from glowplug.plugins.speculative.drafting import extend
from glowplug.plugins.speculative.host_chain import extend_host, verify_chain_host
from glowplug.plugins.speculative.verify import chain_before, verify_chain
from tests.contract.test_speculative_nextn import LIMITS, PAGE, Draft, make, shifted


class Watching(Greedy):
    """Notes what it is asked about."""

    asked: list[list[int]]

    def sample(self, logits, rows, positions, ahead=None):  # type: ignore[no-untyped-def]
        self.asked = [rows.tolist(), positions.tolist(), ahead.tolist()]
        return super().sample(logits, rows, positions, ahead)


def decoding(rng: np.random.Generator, rows: int, width: int) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Decoding rows anywhere in their pages (the last ones of 8 included), their logits and hidden states."""
    lens = rng.integers(width, 8 * PAGE + 1, rows).tolist()
    batch = shifted(make(LIMITS, 1)[0], rng.permutation(8)[:rows].tolist(), [width] * rows, lens, [False] * rows,
                    decodes=rows)
    batch.input_ids = torch.from_numpy(rng.integers(0, 3, rows * width))
    logits = likely(rng.integers(0, 3, rows * width).tolist())
    logits[torch.from_numpy(rng.random(rows * width) < 0.1)] = float("nan")
    return batch, logits, torch.from_numpy(rng.standard_normal((rows * width, HIDDEN), np.float32))


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_acceptance_is_the_devices(rows: int, width: int) -> None:
    rng = np.random.default_rng(rows * width)
    for _ in range(20):
        batch, logits, _ = decoding(rng, rows, width)
        here, there = Watching(), Watching()
        made, wanted = verify_chain_host(logits, batch, width, here), verify_chain(logits, batch, width, None, there)
        for name in ("tokens", "counts", "bad"):
            assert torch.equal(getattr(made, name), getattr(wanted, name)), name
            assert getattr(made, name).dtype == getattr(wanted, name).dtype
        assert here.asked == there.asked and here.observed == there.observed
        assert here.asked[2] == chain_before(batch.input_ids.view(rows, width)).tolist()


@pytest.mark.parametrize("keep", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_pass_is_the_devices_without_what_is_left_out(rows: int, keep: int) -> None:
    rng = np.random.default_rng(rows + keep)
    for _ in range(20):
        batch, logits, _ = decoding(rng, rows, 4)
        accepted = verify_chain_host(logits, batch, 4, Greedy())
        wanted, made = extend(batch, accepted.tokens, PAGE), extend_host(batch, accepted, PAGE, keep)
        for name in ("positions", "slots"):
            whole = getattr(wanted.batch, name).view(rows, 4)
            assert torch.equal(getattr(made.batch, name).view(rows, keep), whole[:, :keep]), name
        assert torch.equal(made.batch.input_ids.view(rows, keep), wanted.input_ids.view(rows, 4)[:, :keep])
        assert made.batch.query_starts.tolist() == list(range(0, rows * keep + 1, keep))
        assert (made.batch.kv_lens_device - keep).tolist() == (wanted.batch.kv_lens_device - 4).tolist()
        assert made.batch.kv_lens.tolist() == made.batch.kv_lens_device.tolist()


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_left_for_the_next_step_is_the_devices(steps: int, mesh: dict[str, int]) -> None:
    """Drafts, lengths and page ends; among groups of ranks the pass keeps its width."""
    rng, width = np.random.default_rng(steps), steps + 1
    for rows in (1, 2, 4):
        (host, ours), (device, theirs) = make(LIMITS, steps, **mesh), make(LIMITS, steps, **mesh)
        device._on_host = False
        for _ in range(10):
            batch, logits, hidden = decoding(rng, rows, width)
            made = host.accept(logits, hidden, batch, Greedy())
            device.accept(logits, hidden, batch, Greedy())
            assert torch.equal(host._last, device._last) and torch.equal(host._computed, device._computed)
            assert torch.equal(host._page_ends[1:], device._page_ends[1:])
            kept = width if mesh else int(made.counts.max())
            assert _tokens(ours) == [rows * kept, *[rows] * (steps - 1)]
            assert _tokens(theirs) == [rows * width, *[rows] * (steps - 1)]


def _tokens(draft: Draft) -> list[int]:
    tokens = [one.num_tokens for one in draft.passes]
    draft.passes.clear()
    return tokens

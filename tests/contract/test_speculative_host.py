"""NextN's steps over decoding rows on the host equal the same steps on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.speculation.verify import chain_before, verify
from glowplug.core.speculation.verify_host import verify_chain_host
from glowplug.core.step.batch import Batch
from glowplug.core.testing.suites.speculative import HIDDEN, Greedy, likely
from glowplug.plugins.speculative.shared.drafting import (
    draft_positions,
    newest_tokens,
    next_draft_batch,
    uncached_tokens,
)
from glowplug.plugins.speculative.shared.host_chain import (
    newest_tokens_host,
    next_draft_batch_host,
    uncached_tokens_host,
)
from tests.contract.test_speculative_nextn import LIMITS, PAGE, Draft, make, shifted


class Watching(Greedy):
    """A sampler that records its calls."""

    asked: list[list[int]]

    def sample(self, logits, rows, positions, ahead=None):  # type: ignore[no-untyped-def]
        self.asked = [rows.tolist(), positions.tolist(), ahead.tolist()]
        return super().sample(logits, rows, positions, ahead)


def decoding(
    rng: np.random.Generator, rows: int, width: int
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Return decoding rows anywhere in their pages (the last positions of 8 included), their logits
    and hidden states.
    """
    lens = rng.integers(width, 8 * PAGE + 1, rows).tolist()
    batch = shifted(
        make(LIMITS, 1)[0],
        rng.permutation(8)[:rows].tolist(),
        [width] * rows,
        lens,
        [False] * rows,
        decodes=rows,
    )
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
        made, wanted = (
            verify_chain_host(logits, batch, width, here),
            verify(logits, batch, width, None, there),
        )
        for name in ("tokens", "counts", "bad"):
            assert torch.equal(getattr(made, name), getattr(wanted, name)), name
            assert getattr(made, name).dtype == getattr(wanted, name).dtype
        assert here.asked == there.asked and here.observed == there.observed
        assert here.asked[2] == chain_before(batch.input_ids.view(rows, width)).tolist()


@pytest.mark.parametrize("keep", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_accepted_tokens_are_stored_as_on_the_device(rows: int, keep: int) -> None:
    rng = np.random.default_rng(rows + keep)
    for _ in range(20):
        batch, logits, _ = decoding(rng, rows, 4)
        accepted = verify_chain_host(logits, batch, 4, Greedy())
        wanted, made = (
            uncached_tokens(batch, accepted, 3, PAGE),
            uncached_tokens_host(batch, accepted, PAGE, keep),
        )
        for name in ("input_ids", "positions", "kv_slots", "source"):
            whole = getattr(wanted, name).view(rows, 3)[:, : keep - 1]
            assert torch.equal(getattr(made, name).view(rows, keep - 1), whole), name
        there, here = newest_tokens(batch, accepted, None), newest_tokens_host(batch, accepted)
        for name in ("tokens", "source", "lengths"):
            assert torch.equal(getattr(here, name), getattr(there, name)), name


@pytest.mark.parametrize("number", [1, 3])
def test_a_pass_is_the_devices(number: int) -> None:
    rng = np.random.default_rng(number)
    for rows in (1, 3):
        batch, _, _ = decoding(rng, rows, 4)
        lengths = batch.kv_lens_device - 4
        made = next_draft_batch_host(batch, number, lengths, PAGE)
        wanted = next_draft_batch(batch, number, draft_positions(batch, number, lengths, PAGE), 4)
        for name in (
            "positions",
            "kv_slots",
            "kv_lens_device",
            "query_starts",
            "row_ids",
            "page_table",
        ):
            assert torch.equal(getattr(made, name), getattr(wanted, name)), name
            assert getattr(made, name).dtype == getattr(wanted, name).dtype, name
        assert made.kv_lens.tolist() == wanted.kv_lens.tolist() == made.kv_lens_device.tolist()


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_state_for_the_next_step_is_the_devices(steps: int, mesh: dict[str, int]) -> None:
    """Newest tokens and their states, lengths, page ends and drafts are equal; among groups of
    ranks everything is stored.
    """
    rng, width = np.random.default_rng(steps), steps + 1
    for rows in (1, 2, 4):
        (host, ours), (device, theirs) = make(LIMITS, steps, **mesh), make(LIMITS, steps, **mesh)
        device._on_host = False
        for _ in range(10):
            batch, logits, hidden = decoding(rng, rows, width)
            made = host.accept(logits, hidden, batch, Greedy())
            device.accept(logits, hidden, batch, Greedy())
            for name in ("_last", "_hidden", "_computed"):
                assert torch.equal(getattr(host, name), getattr(device, name)), name
            assert torch.equal(host._page_ends.states[1:], device._page_ends.states[1:])
            kept = width if mesh else int(made.counts.max())
            assert _stored(ours) == ([rows * (kept - 1)] if kept > 1 else [])
            assert _stored(theirs) == [rows * steps]
            assert torch.equal(host.draft(batch), device.draft(batch))


def _stored(draft: Draft) -> list[int]:
    counts = [len(fill["input_ids"]) for fill in draft.fills]
    draft.fills.clear()
    return counts

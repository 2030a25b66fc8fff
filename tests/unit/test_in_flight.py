"""The results of a step in one copy to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.engine.in_flight import InFlight, pack, unpack
from glowplug.core.step.batch import Accepted, idle_batch


def results(rows: int, width: int, decodes: int) -> Accepted:
    make = torch.Generator().manual_seed(rows * width)
    accepted = Accepted(
        torch.randint(0, 1 << 40, (rows, width), generator=make),
        torch.randint(0, width + 1, (rows,), dtype=torch.int32, generator=make),
        torch.randint(0, 2, (rows,), generator=make).bool(),
    )
    if decodes:
        accepted.drafts = torch.arange(decodes, dtype=torch.int32) % width
    return accepted


@pytest.mark.parametrize("foresees", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "decodes"), [(1, 1, 0), (5, 3, 0), (5, 3, 2), (3, 4, 3), (7, 2, 1)]
)
def test_packed_results_are_unpacked(rows: int, width: int, decodes: int, foresees: bool) -> None:
    accepted = results(rows, width, decodes)
    if foresees:
        accepted.next_drafts = torch.arange(rows, dtype=torch.int32) + 40
    packed = pack(accepted)
    counts = decodes + foresees * rows
    assert packed.dtype == torch.uint8 and len(packed) == rows * (8 * width + 5) + 4 * counts
    wanted = [accepted.tokens, accepted.counts, accepted.bad]
    wanted += [part for part in (accepted.drafts, accepted.next_drafts) if part is not None]
    found = unpack(packed.numpy(), accepted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other.numpy(), strict=True)


@pytest.mark.parametrize("packs", [False, True])
def test_padding_rows_are_left_out(packs: bool) -> None:
    accepted = results(6, 3, 4)
    accepted.next_drafts = torch.tensor([3, 0, 0, 2, 1, 9], dtype=torch.int32)
    if packs:
        accepted.packed = pack(accepted)
    batch = idle_batch(0)
    batch.rows = np.arange(5, dtype=np.int32)
    batch.num_decodes = 3
    inflight = InFlight(batch, accepted, [], None)
    inflight.forced = [0, 2]
    found = inflight.wait()
    assert found.tokens.shape == (5, 3) and found.counts.shape == found.bad.shape == (5,)
    assert found.drafts is not None and found.drafts.tolist() == [0, 1, 2]
    assert found.tokens.tolist() == accepted.tokens[:5].tolist()
    assert found.next_drafts is not None, "rows behind which tokens are forced have drafts"
    assert found.next_drafts.tolist() == [3, 0, 1, 2, 1]

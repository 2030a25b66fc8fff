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


@pytest.mark.parametrize(
    ("rows", "width", "decodes"), [(1, 1, 0), (5, 3, 0), (5, 3, 2), (3, 4, 3), (7, 2, 1)]
)
def test_packed_results_are_unpacked(rows: int, width: int, decodes: int) -> None:
    accepted = results(rows, width, decodes)
    packed = pack(accepted)
    assert packed.dtype == torch.uint8 and len(packed) == rows * (8 * width + 5) + 4 * decodes
    wanted = [accepted.tokens, accepted.counts, accepted.bad]
    if accepted.drafts is not None:
        wanted.append(accepted.drafts)
    found = unpack(packed.numpy(), rows, width, decodes)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other.numpy(), strict=True)


@pytest.mark.parametrize("packs", [False, True])
def test_padding_rows_are_left_out(packs: bool) -> None:
    accepted = results(6, 3, 4)
    if packs:
        accepted.packed = pack(accepted)
    batch = idle_batch(0)
    batch.rows = np.arange(5, dtype=np.int32)
    batch.num_decodes = 3
    found = InFlight(batch, accepted, [], None).wait()
    assert found.tokens.shape == (5, 3) and found.counts.shape == found.bad.shape == (5,)
    assert found.drafts is not None and found.drafts.tolist() == [0, 1, 2]
    assert found.tokens.tolist() == accepted.tokens[:5].tolist()

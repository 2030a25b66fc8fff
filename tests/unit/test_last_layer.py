"""The tokens of a step that are sampled from form a step of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glowplug.core.step.sampled_last_layer import HostEnds, filled


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (9, 16),
        (16, 16),
        (17, 32),
        (33, 48),
        (256, 256),
        (257, 272),
    ],
)
def test_row_counts_are_rounded_up(count: int, rows: int) -> None:
    assert filled(count) == rows


def test_a_mixed_step_keeps_the_tokens_sampled_from() -> None:
    """The step has two decoding rows, a chunk of 3 that ends its prompt, one of 2 that does not,
    and one of 4 that does.
    """
    token_row = np.array([0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4], np.int32)
    positions = np.array([7, 4, 0, 1, 2, 5, 6, 2, 3, 4, 5], np.int32)
    pages = np.arange(1, 11, dtype=np.int32).reshape(5, 2)
    kv_slots = pages[token_row, positions // 4] * 4 + positions % 4
    host = HostEnds.of(np.array([0, 1, 4, 10], np.int32), token_row, positions, kv_slots, pages)
    ends = host.on_device(3, tuple(torch.from_numpy(part) for part in host.parts()))
    assert ends.count == 4 and ends.tokens.tolist() == [0, 1, 4, 10] and ends.batch.num_decodes == 4
    assert ends.batch.positions.tolist() == [7, 4, 2, 5] and ends.batch.kv_lens_device.tolist() == [
        8,
        5,
        3,
        6,
    ]
    assert ends.batch.page_table.tolist() == pages[[0, 1, 2, 4]].tolist()
    assert ends.batch.kv_slots.tolist() == kv_slots[[0, 1, 4, 10]].tolist()
    assert ends.batch.query_starts.tolist() == [0, 1, 2, 3, 4] and ends.batch.kv_lens.tolist() == [
        8,
        5,
        3,
        6,
    ]


def test_padding_rows_use_the_scratch_page() -> None:
    rows = np.arange(5, dtype=np.int32)
    host = HostEnds.of(rows, rows, rows + 9, rows + 40, np.full((5, 3), 8, np.int32))
    assert (
        host.count == 5
        and host.tokens[5:].tolist() == [0, 0, 0]
        and host.kv_slots[5:].tolist() == [0, 0, 0]
    )
    assert host.positions.tolist() == [9, 10, 11, 12, 13, 0, 0, 0] and not host.pages[5:].any()


def test_a_step_that_samples_no_token_is_empty() -> None:
    none, rows = np.zeros(0, np.int32), np.arange(3, dtype=np.int32)
    assert HostEnds.of(none, rows, rows, rows, np.ones((3, 1), np.int32)).count == 0

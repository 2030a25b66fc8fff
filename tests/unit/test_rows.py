"""Rows of the sequence table pass from one sequence to another without remains."""

from __future__ import annotations

import numpy as np
import pytest

from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.testing.harness.drive import sequence


def test_join_copies_prompt_and_output() -> None:
    table = SequenceTable(2, 16, 4)
    one = sequence(7, [5, 6, 7], max_tokens=4)
    one.output = [8, 9]
    row = table.join(one)
    assert one.row == row and table.sequences[row] is one
    assert table.tokens[row, :5].tolist() == [5, 6, 7, 8, 9]
    assert (table.length[row], table.prompt_len[row], table.max_length[row]) == (5, 3, 7)
    assert (table.launched[row], table.num_pages[row], table.free_rows) == (0, 0, 1)


def test_pages_are_appended_and_given_back() -> None:
    table = SequenceTable(1, 16, 4)
    one = sequence(1, [1, 2, 3])
    row = table.join(one)
    table.add_pages(row, np.array([9], np.int32))
    table.add_pages(row, np.array([4, 2], np.int32))
    assert table.pages[row].tolist() == [9, 4, 2, 0]
    held = table.leave(row)
    assert held.tolist() == [9, 4, 2]
    assert table.pages[row].tolist() == [0, 0, 0, 0], "an empty row points at the scratch page"
    assert one.row == -1 and table.free_rows == 1


def test_every_change_of_hands_moves_the_epoch() -> None:
    table = SequenceTable(1, 16, 4)
    seen = [int(table.epoch[0])]
    for id in range(3):
        table.join(sequence(id, [1]))
        seen.append(int(table.epoch[0]))
        table.leave(0)
        seen.append(int(table.epoch[0]))
    assert len(set(seen)) == len(seen)


def test_a_full_table_has_no_row() -> None:
    table = SequenceTable(1, 16, 4)
    table.join(sequence(1, [1]))
    with pytest.raises(IndexError):
        table.join(sequence(2, [1]))

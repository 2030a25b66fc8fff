"""Conformance tests of attention over trees of drafts, and of moves of cache entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import MASK_BITS
from glowplug.core.testing.harness.paged_world import Row, World, make_world
from glowplug.core.testing.suites.parts.attention_base import AttentionSuite, MhaCase, MlaCase

MOVES = 5  #: entries of a row in a test of moves


class TreeSuite(AttentionSuite):
    """Tests of backends that offer ``tree``; those of other backends set ``tree`` to False."""

    tree = True  #: ``AttentionOffers.tree``

    def needs_trees(self) -> None:
        """Skip the test if the backend does not offer ``tree``."""
        if not self.tree:
            pytest.skip("this backend attends to causal chains only")

    # ---- driving ---------------------------------------------------------------------------------

    def check_trees(
        self, rows: list[Row], page_size: int, span: int = 0, first_key: int = 0
    ) -> None:
        """Compare a step whose decoding rows hold random trees with the definition.

        Args:
            rows: the rows; decoding rows have equal numbers of queries.
            page_size: tokens per page.
            span: ``Batch.tree_span``.
            first_key: ``Batch.first_key``.
        """
        seed = sum(row.length for row in rows)
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        world = make_world(rows, page_size, seed)
        world.batch.first_key = first_key
        world.batch.tree_span = span
        width = rows[0].queries
        masks = torch.stack(
            [random_masks(rng, span or width)[-width:] for row in rows if not row.prefill]
        )
        world.batch.tree_mask = masks.to(self.device)
        layer = self.layer(generator)
        args = self.arguments(world, generator)
        self.close(
            self.step(self.backend(page_size), world, layer, args),
            self.expected_of_trees(world, layer, args, masks),
        )

    def expected_of_trees(
        self, world: World, layer: MlaCase | MhaCase, args: list[Tensor], masks: Tensor
    ) -> Tensor:
        """Compute the definition for each token over the keys that it sees.

        Args:
            world: the step.
            layer: the layer.
            args: result of ``arguments``.
            masks: ``Batch.tree_mask`` on the host.
        """
        expected = self.expected(world, layer, args)
        width = masks.shape[1]
        for token, bits in enumerate(masks.flatten().tolist()):
            row = token // width
            seen = seen_positions(world, row, bits, world.batch.tree_span or width)
            queries = [x[token : token + 1] for x in args[: len(self.queries)]]
            history = [world.cached[name][row][seen] for name in self.entries]
            expected[token] = self.definition(queries, history, layer).flatten()
        return expected

    def random_pool(self, slots: int) -> tuple[dict[str, Tensor], ...]:
        """Return a KV pool of three layers with random entries."""
        generator = torch.Generator().manual_seed(slots)
        return tuple(
            {
                name: torch.randn(slots, *shape, generator=generator).to(self.device, self.cached)
                for name, shape in self.entries.items()
            }
            for _ in range(3)
        )

    # ---- tests -----------------------------------------------------------------------------------

    def test_trees(self) -> None:
        """Trees of several rows end around the edges of pages, beside a prompt."""
        self.needs_trees()
        for width in (3, 8):
            for page in self.page_sizes:
                lengths = (width, 2 * page + 1, 33 + width)
                rows = [Row(max(length, width), width) for length in lengths]
                self.check_trees([*rows, Row(9, 4, prefill=True)], page)

    def test_a_tree_of_one_row(self) -> None:
        self.needs_trees()
        for length in (5, 17, 48):
            self.check_trees([Row(length, 5)], self.page_size)
            self.check_trees([Row(length, 2)], self.page_size, span=4)

    def test_masks_of_earlier_passes(self) -> None:
        """A pass of a draft attends to its ancestors among the keys of earlier passes."""
        self.needs_trees()
        for width, span in ((1, 4), (3, 10)):
            rows = [Row(length, width) for length in (span, 31, 40)]
            self.check_trees(rows, self.page_sizes[-1], span)

    def test_the_last_bit_of_a_mask(self) -> None:
        """Bit 63, which makes a mask negative, names the last of 64 keys."""
        self.needs_trees()
        for rows in ([Row(MASK_BITS, 2), Row(70, 2)], [Row(71, 2)]):
            self.check_trees(rows, self.page_sizes[-1], MASK_BITS)

    def test_trees_behind_a_first_key(self) -> None:
        self.needs_trees()
        if not self.first_key:
            pytest.skip("this backend reads every position")
        for span in (0, 7):
            rows = [Row(length, 3) for length in (8, 18, 33)]
            self.check_trees(rows, self.page_sizes[-1], span, first_key=1)
            self.check_trees(rows[:1], self.page_sizes[-1], span, first_key=1)

    def test_entries_are_moved_together(self) -> None:
        """Accepted entries move to the front of their row's drafts, in the named layers only."""
        self.needs_trees()
        world = make_world([Row(MOVES, 1), Row(20, 1), Row(33, 1)], self.page_sizes[0], 1)
        sources, targets = accepted_moves(world)
        kv = self.random_pool(world.num_pages * world.page_size)
        expected = [{name: pool.clone() for name, pool in layer.items()} for layer in kv]
        for layer in expected[1:]:
            for pool in layer.values():
                move_one_by_one(pool, sources, targets)
        backend = self.backend(world.page_size)
        backend.reserve(world.limits(kv))
        backend.move_entries(sources.to(self.device), targets.to(self.device), range(1, 3))
        for layer, wanted in zip(kv, expected, strict=True):
            for name, pool in layer.items():
                assert torch.equal(pool.view(torch.uint8), wanted[name].view(torch.uint8))


def move_one_by_one(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Move entries of a cache tensor [slots, ...] by the definition."""
    for source, target in zip(sources.flatten(), targets.flatten(), strict=True):
        pool[target] = pool[source]


def seen_positions(world: World, row: int, bits: int, span: int) -> list[int]:
    """Return the positions of the keys that a token of row ``row`` sees.

    Args:
        world: the step.
        row: number of the row.
        bits: mask of the token.
        span: keys that the mask names.
    """
    length = world.rows[row].length
    begin = length - span
    return [
        at for at in range(world.batch.first_key, length) if at < begin or bits >> (at - begin) & 1
    ]


def accepted_moves(world: World) -> tuple[Tensor, Tensor]:
    """Return sources and targets of moves of the last MOVES entries of each row, int64 [D, MOVES].

    All entries of the first row stay; of the others, three and two entries are moved.
    """
    rng = np.random.default_rng(1)
    targets = torch.stack([world.kv_slots_of(row)[-MOVES:] for row in range(len(world.rows))])
    sources = targets.clone()
    for row, count in enumerate((MOVES, 3, 2)):
        path = torch.from_numpy(np.sort(rng.permutation(MOVES)[:count]))
        sources[row, :count] = targets[row, path]
    return sources, targets


def random_masks(rng: np.random.Generator, size: int) -> Tensor:
    """Return the masks of a random tree of ``size`` tokens, int64 [size]."""
    masks = [1]
    for token in range(1, size):
        masks.append(masks[int(rng.integers(token))] | 1 << token)
    return torch.from_numpy(np.array(masks, np.uint64).view(np.int64))

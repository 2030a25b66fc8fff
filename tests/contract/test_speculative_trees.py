"""Trees of drafts: growth, verification and the masks, beside plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.plugin.draft_shape import MASK_BITS, DraftShape
from glowplug.core.speculation.tree_growth import (
    Growth,
    ancestor_masks,
    first_growth,
    grown_tree,
    next_growth,
)
from glowplug.core.speculation.verify import (
    accept_tree,
    accepted_path,
    accepted_path_reference,
    tree_before,
    verify,
)
from glowplug.core.step.draft_tree import DraftTree
from glowplug.core.testing.suites.speculative import Greedy, likely, step


def random_tree(rng: np.random.Generator, rows: int, width: int) -> DraftTree:
    """Return trees in which every token's parent is a random earlier one."""
    parents = np.zeros((rows, width), np.int64)
    depths = np.zeros((rows, width), np.int64)
    for row in range(rows):
        for node in range(1, width):
            parents[row, node] = rng.integers(0, node)
            depths[row, node] = depths[row, parents[row, node]] + 1
    found = torch.from_numpy(parents)
    return DraftTree(found, torch.from_numpy(depths), ancestor_masks(found, width))


def ancestors(parents: list[int], node: int) -> list[int]:
    """Return the path from the root to ``node``."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def distinct_siblings(rng: np.random.Generator, tree: DraftTree) -> Tensor:
    """Return random tokens below 8 of which no two children of a token are equal, if possible."""
    rows, width = tree.parents.shape
    fed = np.zeros((rows, width), np.int64)
    for row, parents in enumerate(tree.parents.tolist()):
        taken: dict[int, list[int]] = {}
        for node in range(width):
            used = taken.setdefault(parents[node] if node else -1, [])
            free = [token for token in range(width + 3) if token not in used]
            fed[row, node] = free[int(rng.integers(0, min(3, len(free))))]
            used.append(int(fed[row, node]))
    return torch.from_numpy(fed)


@pytest.mark.parametrize("width", [2, 4, 9, MASK_BITS])
def test_the_accepted_path_is_that_of_a_walk(width: int) -> None:
    rng = np.random.default_rng(width)
    lengths = set()
    for _ in range(20):
        tree = random_tree(rng, 5, width)
        fed = distinct_siblings(rng, tree)
        drawn = torch.from_numpy(rng.integers(0, 3, (5, width)))
        kept = accept_tree(drawn, fed, tree)
        path = accepted_path(kept, tree.depths)
        for row in range(5):
            wanted = accepted_path_reference(
                drawn[row].tolist(), fed[row].tolist(), tree.parents[row].tolist()
            )
            count = int(kept[row].sum())
            assert path[row, :count].tolist() == wanted
            assert path[row, count:].tolist() == list(range(count, width))
            lengths.add(count)
    assert len(lengths) > 1, "the trials accept paths of one length only"


@pytest.mark.parametrize("width", [3, MASK_BITS])
def test_the_state_before_a_token_is_its_path(width: int) -> None:
    rng = np.random.default_rng(width)
    tree = random_tree(rng, 3, width)
    fed = torch.from_numpy(rng.integers(0, 99, (3, width)))
    before = tree_before(fed, tree).view(3, width, width - 1)
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(width):
            path = ancestors(parents, node)
            assert int(tree.depths[row, node]) == len(path) - 1
            wanted = [int(fed[row, j]) if j in path else -1 for j in range(1, width)]
            assert before[row, node].tolist() == wanted


def test_verification_returns_tokens_and_bad_rows_along_the_path() -> None:
    """NaN on a rejected branch has no effect; on the accepted path it ends the row."""
    parents = torch.tensor([[0, 0, 0, 2]]).repeat(2, 1)
    for place, bad in ((1, False), (2, True), (3, True)):
        batch = step([0, 1], 2, [4, 4], [9, 9])
        batch.tree = DraftTree(
            parents, torch.tensor([[0, 1, 1, 2]]).repeat(2, 1), ancestor_masks(parents, 2)
        )
        batch.input_ids = torch.tensor([1, 5, 6, 7] * 2)
        logits = likely([6, 3, 7, 8] * 2)
        logits[4 + place] = float("nan")
        if place == 2:
            batch.input_ids[7] = 0  # argmax of NaN: the first one
        made = verify(logits, batch, 4, None, Greedy())
        assert made.path is not None
        assert made.path.tolist() == [[0, 2, 3, 3], [0, 2, 3, 3]]
        assert made.counts.tolist() == [3, 3] and made.bad.tolist() == [False, bad]
        assert made.tokens[0, :3].tolist() == [6, 7, 8]


class Passes:
    """A draft with random logits for every path, and the growth that they lead to."""

    def __init__(self, shape: DraftShape, vocab: int, seed: int, coarse: bool) -> None:
        self.shape = shape
        self.vocab = vocab
        self.seed = seed
        self.coarse = coarse  # few different scores, so that many candidates are equal

    def scores(self, path: tuple[int, ...]) -> Tensor:
        """Return the log-probabilities after ``path``, float32 [V]."""
        key = hash((self.seed, *path)) % (1 << 31)
        logits = torch.randn(self.vocab, generator=torch.Generator().manual_seed(key))
        if self.coarse:
            return torch.full((self.vocab,), 0.0)
        return logits.log_softmax(0)

    def best(self, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        found = self.scores(path).topk(self.shape.topk)
        return found.indices.tolist(), found.values.tolist()

    def grown(self, root: int) -> Growth:
        tokens, scores = self.best((root,))
        growth = first_growth(torch.tensor([root]), torch.tensor([tokens]), torch.tensor([scores]))
        paths = [(root,)]
        for number in range(2, self.shape.steps + 1):
            paths = [
                (*paths[source], token)
                for source, token in zip(
                    growth.source[0].tolist(), growth.frontier_tokens[0].tolist(), strict=True
                )
            ]
            found = [self.best(path) for path in paths]
            growth = next_growth(
                growth,
                number,
                torch.tensor([tokens for tokens, _ in found]),
                torch.tensor([scores for _, scores in found]),
            )
        return growth

    def wanted(self, root: int) -> dict[tuple[int, ...], float]:
        """Return the score of each path that the passes consider, in plain Python."""
        frontier = {(root,): 0.0}
        found: dict[tuple[int, ...], float] = {}
        for _ in range(self.shape.steps):
            new = {}
            for path, score in frontier.items():
                for token, own in zip(*self.best(path), strict=True):
                    new[(*path, token)] = score + own
            found |= new
            best = sorted(new, key=lambda path: -new[path])[: self.shape.topk]
            frontier = {path: new[path] for path in best}
        return found


SHAPES = [DraftShape(1, 2, 3), DraftShape(2, 4, 4), DraftShape(5, 4, 8), DraftShape(3, 3, 22)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_tree_has_the_most_likely_paths(shape: DraftShape) -> None:
    for seed in range(10):
        passes = Passes(shape, 17, seed, coarse=False)
        tokens, tree = grown_tree(passes.grown(3), shape)
        found = passes.wanted(3)
        assert len(found) == shape.candidates
        best = sorted(found, key=lambda path: -found[path])[: shape.tokens - 1]
        parents = tree.parents[0].tolist()
        made = [
            tuple(int(tokens[0, at]) for at in ancestors(parents, node))
            for node in range(1, shape.tokens)
        ]
        assert sorted(made) == sorted(best)
        assert tree.depths[0, 1:].tolist() == [len(path) - 1 for path in made]
        for node in range(shape.tokens):
            bits = [j for j in range(shape.tokens) if int(tree.mask[0, node]) >> j & 1]
            assert bits == sorted(ancestors(parents, node))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_draft_is_taken_without_its_parent_even_if_scores_are_equal(shape: DraftShape) -> None:
    tokens, tree = grown_tree(Passes(shape, 17, 0, coarse=True).grown(3), shape)
    parents = tree.parents[0].tolist()
    assert all(parent < node for node, parent in enumerate(parents) if node)
    assert all(
        int(tree.depths[0, node]) == int(tree.depths[0, parent]) + 1
        for node, parent in enumerate(parents)
        if node
    )


def test_frontier_tokens_attend_to_their_path_through_the_draft_cache() -> None:
    """Entry j of a round belongs to the j-th token that its passes compute."""
    shape = DraftShape(4, 3, 8)
    for seed in range(5):
        passes = Passes(shape, 17, seed, coarse=False)
        tokens, scores = passes.best((3,))
        growth = first_growth(torch.tensor([3]), torch.tensor([tokens]), torch.tensor([scores]))
        paths = {0: [0]}
        previous = [0]
        last = [(3,)]
        for number in range(2, shape.steps + 1):
            first = 1 + (number - 2) * shape.topk
            sources = growth.source[0].tolist()
            entries = list(range(first, first + shape.topk))
            for place, entry in enumerate(entries):
                paths[entry] = [*paths[previous[sources[place]]], entry]
                bits = int(growth.seen[0, place])
                assert [j for j in range(MASK_BITS) if bits >> j & 1] == paths[entry]
            last = [
                (*last[source], token)
                for source, token in zip(sources, growth.frontier_tokens[0].tolist(), strict=True)
            ]
            previous = entries
            found = [passes.best(path) for path in last]
            growth = next_growth(
                growth,
                number,
                torch.tensor([tokens for tokens, _ in found]),
                torch.tensor([scores for _, scores in found]),
            )


def test_a_shape_counts_entries_and_candidates() -> None:
    assert (DraftShape(5, 4, 8).entries, DraftShape(5, 4, 8).candidates) == (17, 68)
    assert (DraftShape.chain(3).entries, DraftShape.chain(3).candidates) == (3, 3)
    assert DraftShape.chain(3).lookahead == 1 and DraftShape(5, 4, 8).lookahead == 9
    assert DraftShape().entries == 0 and not DraftShape().is_tree

"""The radix tree of the prefix cache.

Edges are runs of whole pages. Tokens themselves are compared, not hashes, so no two prompts can
collide.

A lock on a match is counted in every node from the end of the match to the root, so a node without
locks has no locked descendant: all unlocked pages can be evicted, leaves first. The time of use is
a counter of uses, not a clock, so that every rank evicts the same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import PrefixMatch, Worker
from glowplug.plugins.cache.radix import RadixOptions

Ints = NDArray[np.int32]
NO_ITEMS: Ints = np.zeros(0, np.int32)  #: no tokens, or no pages


@dataclass(eq=False, slots=True)
class Node:
    """A node of the radix tree: a run of whole pages.

    Attributes:
        tokens: The tokens of the pages.
        pages: The pages; empty at a root.
        parent: Parent node; None at a root.
        salt: Salt of the tree.
        children: Children by the bytes of their first page's tokens.
        locks: Number of locks on this node or below it.
        used: Value of the cache's use counter when the node was last used.
        alive: False once the node was removed from the tree.
    """

    tokens: Ints
    pages: Ints
    parent: Node | None
    salt: str
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    alive: bool = True


NODE_END = -1  #: value of ``Spot.pages`` for the end of the node, wherever later splits move it


@dataclass(eq=False, slots=True)
class Spot:
    """The place in the tree where a matched prefix ends: after ``pages`` pages of ``node``.

    Locking the match splits the node here, so that the prefix ends where its node ends.
    """

    node: Node
    pages: int


class RadixCache:
    """The :class:`~glowplug.core.protocols.PrefixCache` that stores prefixes in a radix tree.

    The result of ``match`` is valid until the next ``insert`` or ``evict``. A locked result stays
    valid until it is unlocked.
    """

    shares = True

    def __init__(self, options: RadixOptions, plan: EnginePlan, worker: Worker) -> None:
        self.page_size = plan.sizes.page_size
        self.max_pages = options.max_pages
        self._roots: dict[str, Node] = {}
        # heap of (used, tie, node); stale entries are skipped when popped
        self._leaves: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._ties = 0
        self._nodes = 0
        self._held = 0
        self._locked = 0

    # ---- PrefixCache -----------------------------------------------------------------------------

    def match(self, tokens: Ints, salt: str) -> PrefixMatch:
        """Return the longest cached prefix of ``tokens``, without marking it as used."""
        root = self._roots.get(salt)
        if root is None:
            return PrefixMatch(0, NO_ITEMS)
        spot, found = self._walk(root, tokens)
        count = sum(len(part) for part in found)
        return PrefixMatch(
            count * self.page_size, np.concatenate(found) if found else NO_ITEMS, spot
        )

    def insert(self, tokens: Ints, pages: Ints, salt: str) -> Ints:
        """Add the pages of ``tokens`` to the tree. Return the pages that the caller may reuse.

        Returns:
            Pages of the caller whose tokens the tree already holds in other pages; pages of the
            caller beyond ``max_pages``; and pages that were evicted to stay within
            ``max_pages``.
        """
        if not len(pages):
            return NO_ITEMS
        assert len(tokens) == len(pages) * self.page_size, "insert takes whole pages"
        root = self._root(salt)
        spot, found = self._walk(root, tokens)
        held = np.concatenate(found) if found else NO_ITEMS
        depth = len(held)
        unneeded = [pages[:depth][pages[:depth] != held]]
        node = self._split(spot)
        self._touch(node)
        if depth < len(pages):
            keep, evicted = self._make_room(node, len(pages) - depth)
            unneeded += [evicted, pages[depth + keep :]]
            if keep:
                start = depth * self.page_size
                end = (depth + keep) * self.page_size
                node = self._add(node, tokens[start:end], pages[depth : depth + keep])
        self._offer(node)
        self._prune(root)
        return np.concatenate(unneeded)

    def lock(self, match: PrefixMatch, delta: int) -> None:
        """Lock (``delta`` = 1) or unlock (-1) the nodes of a match against eviction.

        Both mark the nodes as used now, because their use begins or ends.
        """
        if match.handle is None:
            return
        assert isinstance(match.handle, Spot) and delta in (1, -1)
        spot = match.handle
        assert spot.node.alive, "the match was evicted before it was locked"
        leaf = self._split(spot)
        spot.pages = NODE_END
        self._touch(leaf)
        self._count_locks(leaf, delta)
        self._offer(leaf)
        self._prune(leaf)

    def evict(self, pages: int) -> Ints:
        """Evict up to ``pages`` unlocked pages, least recently used leaves first.

        The last leaf is shortened rather than evicted as a whole, so that no more pages than
        requested are returned.
        """
        given: list[Ints] = []
        missing = pages
        while missing > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if not self._evictable(node) or node.used != used:
                continue
            given.append(self._cut(node, missing))
            missing -= len(given[-1])
        return np.concatenate(given) if given else NO_ITEMS

    def size(self) -> tuple[int, int]:
        return self._held, self._held - self._locked

    def check_integrity(self) -> None:
        seen = self._check_tree()
        pages = np.concatenate([NO_ITEMS, *(node.pages for node in seen)])
        locked = sum(len(node.pages) for node in seen if node.locks)
        assert len(np.unique(pages)) == len(pages), "a page is held twice"
        assert not len(pages) or pages.min() > 0, "the scratch page is held"
        assert len(pages) == self._held, f"{self._held} pages counted, {len(pages)} held"
        assert locked == self._locked, f"{self._locked} locked pages counted, {locked} found"
        assert len(seen) == self._nodes, f"{self._nodes} nodes counted, {len(seen)} found"
        assert self.max_pages is None or self._held <= self.max_pages, "more pages than max_pages"

    def _check_tree(self) -> list[Node]:
        """Check the invariants of every node of the trees; return all nodes except the roots."""
        seen = []
        offered = {id(node) for used, _, node in self._leaves if node.used == used}
        for salt, root in self._roots.items():
            assert root.salt == salt and root.parent is None and not len(root.pages), (
                f"bad root for salt {salt!r}"
            )
            for node in self._below(root):
                self._check_node(node)
                assert not self._evictable(node) or id(node) in offered, (
                    "an evictable leaf is not queued for eviction"
                )
                seen.append(node)
        return seen

    # ---- the tree --------------------------------------------------------------------------------

    def _root(self, salt: str) -> Node:
        if salt not in self._roots:
            self._roots[salt] = Node(NO_ITEMS, NO_ITEMS, None, salt)
        return self._roots[salt]

    def _walk(self, root: Node, tokens: Ints) -> tuple[Spot, list[Ints]]:
        """Return the spot where the longest cached prefix of ``tokens`` ends, and its pages."""
        size = self.page_size
        node = root
        at = 0
        found = []
        spot = Spot(root, 0)
        whole = len(tokens) // size * size
        tokens = np.ascontiguousarray(tokens[:whole], np.int32)
        while at < whole:
            child = node.children.get(tokens[at : at + size].tobytes())
            if child is None:
                break
            common = self._common_pages(child.tokens, tokens[at:])
            found.append(child.pages[:common])
            spot = Spot(child, common)
            if common < len(child.pages):
                break
            at += common * size
            node = child
        return spot, found

    def _common_pages(self, left: Ints, right: Ints) -> int:
        count = min(len(left), len(right))
        differs = left[:count] != right[:count]
        first = int(differs.argmax()) if differs.any() else count
        return first // self.page_size

    def _split(self, spot: Spot) -> Node:
        """Return the node that ends exactly at ``spot``, splitting the spot's node if necessary.

        After a split, the old node object is the lower half; the upper half is new.
        """
        node = spot.node
        at = spot.pages
        if at in (NODE_END, len(node.pages)):
            return node
        assert 0 < at < len(node.pages) and node.parent is not None
        cut = at * self.page_size
        upper = Node(
            node.tokens[:cut].copy(),
            node.pages[:at].copy(),
            node.parent,
            node.salt,
            locks=node.locks,
            used=node.used,
        )
        node.parent.children[self._key(upper)] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[at:].copy()
        node.parent = upper
        upper.children[self._key(node)] = node
        self._nodes += 1
        spot.node = upper
        return upper

    def _add(self, parent: Node, tokens: Ints, pages: Ints) -> Node:
        node = Node(
            np.array(tokens, np.int32),
            np.array(pages, np.int32),
            parent,
            parent.salt,
            used=self._clock,
        )
        parent.children[self._key(node)] = node
        self._nodes += 1
        self._held += len(pages)
        return node

    def _cut(self, node: Node, most: int) -> Ints:
        """Remove at most ``most`` pages from the end of an evictable leaf and return them."""
        keep = max(0, len(node.pages) - most)
        given = node.pages[keep:]
        self._held -= len(given)
        if keep:
            node.tokens = node.tokens[: keep * self.page_size].copy()
            node.pages = node.pages[:keep].copy()
            self._offer(node)
            return given
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node)]
        node.alive = False
        self._nodes -= 1
        self._offer(parent)
        self._prune(parent)
        return given

    def _prune(self, node: Node) -> None:
        """Remove ``node`` if it is the root of a salt's tree and has no children and no locks."""
        if (
            node.parent is None
            and not node.children
            and not node.locks
            and self._roots.get(node.salt) is node
        ):
            del self._roots[node.salt]
            node.alive = False

    def _make_room(self, node: Node, wanted: int) -> tuple[int, Ints]:
        """Evict pages to make room within ``max_pages`` for ``wanted`` new pages below ``node``.

        Returns:
            The number of new pages that may be kept, and the pages evicted for them.
        """
        if self.max_pages is None or self._held + wanted <= self.max_pages:
            return wanted, NO_ITEMS
        self._count_locks(node, 1)
        evicted = self.evict(self._held + wanted - self.max_pages)
        self._count_locks(node, -1)
        return min(wanted, self.max_pages - self._held), evicted

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self.page_size].tobytes()

    # ---- age and locks ---------------------------------------------------------------------------

    def _touch(self, node: Node) -> None:
        """Mark ``node`` and all its ancestors as used now."""
        self._clock += 1
        at: Node | None = node
        while at is not None:
            at.used = self._clock
            at = at.parent

    def _count_locks(self, leaf: Node, delta: int) -> None:
        """Add ``delta`` locks to the path from ``leaf`` to its root."""
        node: Node | None = leaf
        while node is not None:
            before = node.locks
            node.locks = node.locks + delta
            assert node.locks >= 0, "a node is unlocked more often than it was locked"
            if before == 0:
                self._locked += len(node.pages)
            elif node.locks == 0:
                self._locked -= len(node.pages)
            node = node.parent

    @staticmethod
    def _evictable(node: Node) -> bool:
        return node.alive and not node.locks and not node.children and len(node.pages) > 0

    def _offer(self, node: Node) -> None:
        """Add ``node`` to the candidates for eviction if it has become an unlocked leaf."""
        if not self._evictable(node):
            return
        if len(self._leaves) > 4 * self._nodes + 64:
            self._leaves = [
                entry
                for entry in self._leaves
                if self._evictable(entry[2]) and entry[2].used == entry[0]
            ]
            heapq.heapify(self._leaves)
        self._ties += 1
        heapq.heappush(self._leaves, (node.used, self._ties, node))

    # ---- inspection ------------------------------------------------------------------------------

    def _below(self, node: Node) -> Iterator[Node]:
        """Yield every node below ``node``."""
        stack = list(node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_node(self, node: Node) -> None:
        """Check the invariants of one node."""
        assert node.alive and len(node.pages) > 0, "an empty node is in the tree"
        assert len(node.tokens) == len(node.pages) * self.page_size, (
            "tokens and pages of a node disagree"
        )
        assert node.parent is not None and node.parent.children.get(self._key(node)) is node, (
            "a link is broken"
        )
        assert node.locks >= sum(child.locks for child in node.children.values()), (
            "a lock is lost on the way up"
        )

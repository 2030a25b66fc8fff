"""Routing of requests to dp groups, by the tokens to compute and by shared prefixes.

A request goes to the group with the least cost in tokens: the group's load, and the prompt tokens
that the group has still to compute for the request. Prompt tokens that the group's prefix cache
probably has cost nothing. Therefore requests with a common prefix meet in one group until its load
exceeds that of another group by more than the prefix is worth.

Every rank routes every request, in the same order, from loads on which all ranks have agreed, so
all of them choose the same group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from glowplug.core.plan.plan import Sizes
from glowplug.core.step.request import Sequence

#: tokens that a sequence costs beside its prompt: those of an answer of usual length
ANSWER_TOKENS = 256
#: cached tokens that cost as much as one token to compute. Attention over 4,400 tokens takes as
#: many operations as the rest of a token's pass through DeepSeek-V3, in each of ANSWER_TOKENS steps
CONTEXT_TOKENS = 16
#: weight of the prompt tokens to compute: they delay the request itself and all that follow it
COMPUTED_WEIGHT = 2
KEY_BYTES = 8  #: bytes of a block's key
BLOCKS_MAX = 1 << 17  #: most blocks that are recorded, in 20 MB of each rank's host memory


@dataclass
class GroupLoad:
    """The load of one group.

    Attributes:
        sequences: sequences that run or wait.
        pending: prompt tokens that are not computed yet.
        context: tokens in the KV cache that running sequences use.
        free: tokens for which pages of the KV cache are free or can be evicted.
    """

    sequences: int = 0
    pending: int = 0
    context: int = 0
    free: int = 0

    @property
    def cost(self) -> int:
        """The load in tokens."""
        return self.pending + self.sequences * ANSWER_TOKENS + self.context // CONTEXT_TOKENS


class PrefixRecord:
    """A record of the prompt prefixes that were routed to each group, in blocks of tokens.

    The key of a block is a hash of the salt and of all tokens up to the block's end. The least
    recently used blocks are forgotten first; a block is never forgotten before those that follow
    it.

    Args:
        block: tokens of a block.
        most: most blocks in the record.
    """

    def __init__(self, block: int, most: int) -> None:
        self._block = block
        self._most = most
        # key -> set of groups, bit g for group g; least recently used first
        self._groups: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def keys(self, prompt: NDArray[np.int32], salt: str) -> list[bytes]:
        """Return the keys of the whole blocks of ``prompt`` without its last token.

        The last token is always computed.
        """
        namespace = salt.encode("utf-8", "surrogatepass")
        state = blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=KEY_BYTES)
        found = []
        for end in range(self._block, len(prompt), self._block):
            state.update(prompt[end - self._block : end].tobytes())
            found.append(state.copy().digest())
        return found

    def matched(self, keys: Seq[bytes], groups: int) -> list[int]:
        """Return the number of leading tokens of a prompt that each group has, by group."""
        found = [len(keys)] * groups  # in blocks
        having = (1 << groups) - 1
        for blocks, key in enumerate(keys):
            still = having & self._groups.get(key, 0)
            if still == having:
                continue
            for group in range(groups):
                if (having & ~still) >> group & 1:
                    found[group] = blocks
            having = still
            if not having:
                break
        return [blocks * self._block for blocks in found]

    def add(self, keys: Seq[bytes], group: int) -> None:
        """Record that ``group`` gets a prompt with these keys."""
        for key in reversed(keys):
            self._groups[key] = self._groups.get(key, 0) | 1 << group
            self._groups.move_to_end(key)
        while len(self._groups) > self._most:
            self._groups.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks."""
        self._groups.clear()


class TokenRouter:
    """The ``RequestRouter`` that sends each request to the group with the least cost in tokens.

    A group in which the request would wait for a row or for pages is chosen only if it would wait
    in every group, and a group that would refuse it only if all would. Ties go to the lowest group
    number.

    Args:
        group: number of this rank's group.
        groups: number of groups.
        leads: this rank reports its group's outputs.
        sizes: rows, queue and pages of each group.

    Attributes:
        loads: load of each group when the groups last agreed on a step, with the requests routed
            since.
        shares: the groups' caches share prefixes.
    """

    def __init__(self, group: int, groups: int, leads: bool, sizes: Sizes) -> None:
        self.group = group
        self.leads = leads
        pool = (sizes.num_pages - 1) * sizes.page_size
        self.loads = [GroupLoad(free=pool) for _ in range(groups)]
        self.shares = False
        self._rows = sizes.max_running
        self._admitted = sizes.max_running + sizes.max_queued
        self._prefixes = PrefixRecord(sizes.page_size, min(groups * sizes.num_pages, BLOCKS_MAX))

    def owns(self, sequence: Sequence) -> bool:
        """Choose the group of a request, and return whether this rank belongs to the group."""
        prompt = sequence.prompt
        keys = self._prefixes.keys(prompt, sequence.admission.salt) if self.shares else []
        # NOTE: a cached prefix has no log-probabilities, so such a prompt is computed anew
        scored = sequence.params.prompt_logprobs is not None
        matched = self._prefixes.matched([] if scored else keys, len(self.loads))
        missing = [len(prompt) - tokens for tokens in matched]
        chosen = min(range(len(matched)), key=lambda group: self._rank(group, missing[group]))
        self._prefixes.add(keys, chosen)
        sequence.expected_cached = matched[chosen]
        self.loads[chosen].sequences += 1
        self.loads[chosen].pending += missing[chosen]
        return chosen == self.group

    def _rank(self, group: int, missing: int) -> tuple[bool, bool, int, int]:
        """Return the place of a group in the order of choice, as a key to sort by.

        ``missing``: prompt tokens of the request that the group would have to compute.
        """
        load = self.loads[group]
        full = load.sequences >= self._admitted
        waits = load.sequences >= self._rows or load.pending + missing > load.free
        return full, waits, load.cost + COMPUTED_WEIGHT * missing, group

    def forget_prefixes(self) -> None:
        """Forget which prefixes the groups have, because their caches were emptied."""
        self._prefixes.clear()

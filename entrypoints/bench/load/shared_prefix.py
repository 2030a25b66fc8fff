"""Prompts in groups that share a prefix: SGLang's generated-shared-prefix and vLLM's
prefix_repetition.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from glowplug.entrypoints.bench.load.datasets import BenchPrompt, Decode


@dataclass(frozen=True)
class PrefixGroups:
    """Sizes of the groups.

    Attributes:
        groups: number of prefixes.
        prompts_per_group: prompts that begin with the same prefix.
        prefix_len: tokens of a prefix.
        suffix_len: tokens of a prompt behind its prefix.
        output_len: tokens to generate.
    """

    groups: int
    prompts_per_group: int
    prefix_len: int
    suffix_len: int
    output_len: int

    @property
    def total(self) -> int:
        """Number of prompts of all groups."""
        return self.groups * self.prompts_per_group


def prompts(
    rng: random.Random, count: int, sizes: PrefixGroups, vocab: int, decode: Decode | None = None
) -> list[BenchPrompt]:
    """Return ``count`` of the groups' prompts in random order.

    Args:
        rng: source of the token ids and of the order.
        count: number of prompts.
        sizes: sizes of the groups.
        vocab: token ids are below this.
        decode: makes texts of the ids; None: the prompts are ids.

    Raises:
        ValueError: a size is not positive, or the groups have fewer prompts.
    """
    if min(sizes.groups, sizes.prompts_per_group, sizes.suffix_len, sizes.output_len) < 1:
        raise ValueError("groups, prompts of a group and lengths must be at least 1")
    if count > sizes.total:
        raise ValueError(
            f"--num-prompts is {count}, and {sizes.groups} groups of {sizes.prompts_per_group} "
            f"prompts are {sizes.total}"
        )
    made = []
    for _ in range(sizes.groups):
        prefix = [rng.randrange(vocab) for _ in range(sizes.prefix_len)]
        for _ in range(sizes.prompts_per_group):
            made.append([*prefix, *(rng.randrange(vocab) for _ in range(sizes.suffix_len))])
    rng.shuffle(made)
    length = sizes.prefix_len + sizes.suffix_len
    return [
        BenchPrompt(length, sizes.output_len, ids=ids)
        if decode is None
        else BenchPrompt(length, sizes.output_len, text=decode(ids))
        for ids in made[:count]
    ]

"""The tokens that drafts choose from: all, or the frequent ones. Plan zone: no torch.

Most text consists of few tokens of a large vocabulary, and a draft of any other token would rarely
be accepted. A head over the frequent tokens takes a fraction of the time of the whole head, which
still verifies every draft. Source: FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext

FIELD = "speculative.draft_vocabulary"
FORMATS = ".json (a list of ids), .txt (ids separated by white space) or .npy"


def read_ids(path: str) -> list[int]:
    """Return the token ids in a file: .json, .txt or .npy.

    Raises:
        ValueError, OSError: the file is not readable as a list of ids.
    """
    return list(_read(path, Path(path).stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> tuple[int, ...]:
    """Return the ids in a file, cached until its modification time (in ns) changes."""
    del changed
    kind = Path(path).suffix
    if kind == ".npy":
        return tuple(int(id) for id in np.load(path, allow_pickle=False).ravel())
    text = Path(path).read_text(encoding="utf-8")
    if kind == ".json":
        found = json.loads(text)
        if not isinstance(found, list) or not all(type(id) is int for id in found):
            raise ValueError("it is not a list of token ids")
        return tuple(found)
    if kind == ".txt":
        return tuple(int(word) for word in text.split())
    raise ValueError(f"its format is not known; known are {FORMATS}")


def head_rows(choice: int | str | None) -> int:
    """Return the number of tokens that drafts choose from; 0 for the whole vocabulary."""
    if choice is None:
        return 0
    if isinstance(choice, int):
        return choice
    try:
        return len(read_ids(choice))
    except (OSError, ValueError):
        return 0  # refused by ``check_vocabulary``


def check_vocabulary(
    by: str, choice: int | str | None, branches: int, context: CheckContext
) -> Iterator[Refusal]:
    """Refuse a draft vocabulary that cannot be read or has other ids than the model.

    Args:
        by: name of the speculative algorithm.
        choice: number of tokens that are counted at run time, or a file of ids.
        branches: tokens that a draft chooses at once.
        context: the plan so far.
    """
    if isinstance(choice, int):
        vocab = context.facts.model.vocab_size
        if not branches <= choice <= vocab:
            reason = f"{choice} tokens; the model has {vocab}, and drafts choose {branches} at once"
            yield Refusal(by, FIELD, reason, f"a number from {branches} to {vocab}")
    elif choice is not None:
        yield from _check_file(by, choice, branches, context.facts.model.vocab_size)


def _check_file(by: str, path: str, branches: int, vocab: int) -> Iterator[Refusal]:
    """Refuse a file of ids that cannot be read, or whose ids are not the model's.

    Arguments as in ``check_vocabulary``; ``vocab``: size of the model's vocabulary.
    """
    try:
        ids = read_ids(path)
    except (OSError, ValueError) as error:
        yield Refusal(by, FIELD, f"{path} cannot be read: {error}", f"a file of ids: {FORMATS}")
        return
    wrong = [id for id in ids if not 0 <= id < vocab]
    if wrong:
        reason = f"{path} has the id {wrong[0]}; the model's ids end at {vocab - 1}"
        yield Refusal(by, FIELD, reason, "a file of this model's token ids")
    elif len(set(ids)) < len(ids):
        yield Refusal(by, FIELD, f"{path} has an id twice", "a file that has each id once")
    elif len(ids) < branches:
        reason = f"{path} has {len(ids)} ids; drafts choose {branches} at once"
        yield Refusal(by, FIELD, reason, f"a file of at least {branches} ids")

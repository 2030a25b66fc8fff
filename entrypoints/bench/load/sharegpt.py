"""Prompts of the ShareGPT file, with the filters of the published serving benchmarks.

The file is a JSON list of ``{"conversations": [{"from": .., "value": text}, ...]}``. The first turn
is the prompt; the length of the second is the number of tokens to generate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.datasets import BenchPrompt, Encode

# the published filters: shorter or longer conversations are left out
TOKENS_MIN = 4  #: fewest tokens of a prompt, and of an answer whose length counts
PROMPT_MAX = 1024  #: most tokens of a prompt
TOTAL_MAX = 2048  #: most tokens of a prompt and its answer


@dataclass(frozen=True)
class Sampling:
    """The choice of conversations.

    Attributes:
        output_len: tokens to generate for each prompt; None: the length of its answer.
        context_len: most tokens of a prompt and its answer, in place of ``PROMPT_MAX`` and
            ``TOTAL_MAX``; None: those.
        seed: seed of the order; None: the order of the file.
        no_oversample: return fewer prompts rather than one prompt several times.
    """

    output_len: int | None = None
    context_len: int | None = None
    seed: int | None = None
    no_oversample: bool = False

    def admits(self, prompt: int, answer: int) -> bool:
        """Return whether a conversation is used. ``prompt``, ``answer``: its lengths in tokens."""
        if prompt < TOKENS_MIN or (self.output_len is None and answer < TOKENS_MIN):
            return False
        if self.context_len is not None:
            return prompt + answer <= self.context_len
        return prompt <= PROMPT_MAX and prompt + answer <= TOTAL_MAX


def prompts(
    path: Path,
    count: int,
    encode: Encode | None,
    sampling: Sampling,
    edit: Callable[[str], str] = str,
) -> list[BenchPrompt]:
    """Return ``count`` prompts of the ShareGPT file at ``path``.

    If fewer conversations pass the filters, prompts are drawn again at random.

    Args:
        path: the JSON file.
        count: number of prompts.
        encode: tokenizer; the filters count tokens.
        sampling: the choice of conversations.
        edit: changes the text of each prompt, before its tokens are counted.

    Raises:
        ValueError: there is no tokenizer, the file has another format, or no conversation passes.
    """
    if encode is None:
        raise ValueError(
            "--dataset-name sharegpt counts tokens: give the model's tokenizer with --tokenizer"
        )
    turns = _turns(path)
    rng = random.Random(sampling.seed)
    if sampling.seed is not None:
        rng.shuffle(turns)
    found: list[BenchPrompt] = []
    for question, answer in turns:
        if len(found) == count:
            break
        prompt = edit(question)
        length = len(encode(prompt))
        budget = len(encode(answer)) if sampling.output_len is None else sampling.output_len
        if sampling.admits(length, budget):
            found.append(BenchPrompt(length, budget, text=prompt))
    if not found:
        raise ValueError(f"no conversation of {path} passes the filters of lengths")
    missing = 0 if sampling.no_oversample else count - len(found)
    return found + rng.choices(found, k=missing)


def _turns(path: Path) -> list[tuple[str, str]]:
    """Return (first turn, second turn) of each conversation that has both.

    Raises:
        ValueError: the file is not in the published format.
    """
    try:
        entries = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f'{path} is not the published JSON list with "conversations"')
    return [
        (talk[0]["value"], talk[1]["value"]) for entry in entries if len(talk := _talk(entry)) >= 2
    ]


def _talk(entry: Any) -> list[dict[str, str]]:
    """Return the turns of one entry of the file; [] if it is no conversation of texts."""
    talk = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(talk, list):
        return []
    texts = [isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in talk[:2]]
    return talk if all(texts) else []

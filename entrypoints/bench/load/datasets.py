"""What is asked: random token ids of given lengths, or prompts from a JSON-lines file."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

Decode = Callable[[list[int]], str]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One prompt: ``text``, or ``ids`` when the server takes token ids. Lengths in tokens."""

    input_len: int
    output_len: int
    text: str = ""
    ids: list[int] | None = None


def random_lengths(rng: random.Random, length: int, ratio: float, count: int) -> list[int]:
    """Uniform over ``[length * ratio, length]``, at least 1: ratio 1 gives equal lengths (as
    SGLang's option does).
    """
    lowest = max(1, int(length * ratio))
    return [rng.randint(lowest, max(lowest, length)) for _ in range(count)]


def random_prompts(
    rng: random.Random,
    count: int,
    input_len: int,
    output_len: int,
    ratio: float,
    vocab: int,
    decode: Decode | None = None,
) -> list[Prompt]:
    """``count`` prompts of random ids below ``vocab``. With ``decode`` they are sent as text, whose
    length in tokens
    can then differ a little: the server's own count is what gets reported."""
    inputs = random_lengths(rng, input_len, ratio, count)
    outputs = random_lengths(rng, output_len, ratio, count)
    prompts = []
    for length, budget in zip(inputs, outputs):
        ids = [rng.randrange(vocab) for _ in range(length)]
        prompts.append(
            Prompt(length, budget, ids=ids)
            if decode is None
            else Prompt(length, budget, text=decode(ids))
        )
    return prompts


def custom_prompts(
    path: Path, count: int, output_len: int, encode: Encode | None = None
) -> list[Prompt]:
    """Prompts of a JSON-lines file: ``{"prompt": text}`` or ShareGPT's ``{"conversations":
    [{"value": text}, ...]}``, each with an optional ``"output_tokens"``. Fewer lines than ``count``
    are used again from the start.
    """
    records = [
        _record(line, number, path)
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if line
    ]
    if not records:
        raise ValueError(f"{path} holds no prompt")
    prompts = []
    for index in range(count):
        text, budget = records[index % len(records)]
        length = len(encode(text)) if encode else max(1, len(text) // 4)
        prompts.append(Prompt(length, budget or output_len, text=text))
    return prompts


def _record(line: bytes, number: int, path: Path) -> tuple[str, int]:
    value: Any = orjson.loads(line)
    text = value.get("prompt") if isinstance(value, dict) else None
    if text is None and isinstance(value, dict) and value.get("conversations"):
        text = value["conversations"][0].get("value")
    if not isinstance(text, str) or not text:
        raise ValueError(f'{path}:{number}: no "prompt"')
    return text, int(value.get("output_tokens", 0))


def word_decoder(seed: int) -> Decode:
    """Text of about as many tokens, for servers whose tokenizer is not to be had: short common
    words.
    """
    words = (
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "you",
        "that",
        "it",
        "was",
        "for",
        "on",
        "are",
        "as",
        "with",
        "his",
        "they",
        "at",
        "be",
        "this",
        "have",
        "from",
        "or",
        "one",
        "had",
        "by",
        "word",
        "but",
        "not",
        "what",
    )
    return lambda ids: " ".join(words[(seed + token) % len(words)] for token in ids)


def file_tokenizer(path: str) -> tuple[Encode, Decode, int]:
    """(encode, decode, vocabulary) of a tokenizer.json, given as the file or its folder."""
    from tokenizers import Tokenizer

    place = Path(path)
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json" if place.is_dir() else place))
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        tokenizer.get_vocab_size(),
    )

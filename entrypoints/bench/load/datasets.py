"""Prompts of a load: random token ids of given lengths, or texts from a JSON-lines file."""

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
class BenchPrompt:
    """One prompt: ``text``, or ``ids`` if the server takes token ids. Lengths are in tokens."""

    input_len: int
    output_len: int
    text: str = ""
    ids: list[int] | None = None


def random_lengths(rng: random.Random, length: int, ratio: float, count: int) -> list[int]:
    """Return ``count`` random lengths, uniform in ``[length * ratio, length]`` and at least 1.

    A ratio of 1 gives equal lengths, as with SGLang's option.
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
    prefix_len: int = 0,
) -> list[BenchPrompt]:
    """Return ``count`` prompts of random ids below ``vocab``.

    With ``decode`` the prompts are sent as text. The server may then count a slightly different
    number of tokens; the record has the server's count. The first ``prefix_len`` tokens are the
    same in all prompts; they are not among ``input_len``.
    """
    prefix = [rng.randrange(vocab) for _ in range(prefix_len)]
    inputs = random_lengths(rng, input_len, ratio, count)
    outputs = random_lengths(rng, output_len, ratio, count)
    prompts = []
    for length, budget in zip(inputs, outputs):
        ids = [*prefix, *(rng.randrange(vocab) for _ in range(length))]
        prompts.append(
            BenchPrompt(len(ids), budget, ids=ids)
            if decode is None
            else BenchPrompt(len(ids), budget, text=decode(ids))
        )
    return prompts


def custom_prompts(
    path: Path,
    count: int,
    output_len: int,
    encode: Encode | None = None,
    edit: Callable[[str], str] = str,
) -> list[BenchPrompt]:
    """Read prompts from a JSON-lines file and change each text by ``edit``.

    A line is ``{"prompt": text}`` or ShareGPT's ``{"conversations": [{"value": text}, ...]}``, with
    an optional ``"output_tokens"``. If the file has fewer than ``count`` lines, they are used again
    from the start.

    Raises:
        ValueError: the file has no prompt, or a line has none.
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
        plain, budget = records[index % len(records)]
        text = edit(plain)
        length = len(encode(text)) if encode else max(1, len(text) // 4)
        prompts.append(BenchPrompt(length, budget or output_len, text=text))
    return prompts


def _record(line: bytes, number: int, path: Path) -> tuple[str, int]:
    """Return (prompt, number of output tokens) of one line; 0 tokens: the line does not say.

    ``number``: number of the line, for errors.
    """
    value: Any = orjson.loads(line)
    text = value.get("prompt") if isinstance(value, dict) else None
    if text is None and isinstance(value, dict) and value.get("conversations"):
        text = value["conversations"][0].get("value")
    if not isinstance(text, str) or not text:
        raise ValueError(f'{path}:{number}: no "prompt"')
    return text, int(value.get("output_tokens", 0))


def word_decoder(seed: int) -> Decode:
    """Return a decoder that writes one short common word for each id.

    The text has about as many tokens as there were ids. The decoder is used when the server's
    tokenizer is not available.
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
    """Return (encode, decode, vocabulary size) of a tokenizer.json, given as file or folder."""
    from tokenizers import Tokenizer

    location = Path(path)
    tokenizer = Tokenizer.from_file(
        str(location / "tokenizer.json" if location.is_dir() else location)
    )
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        tokenizer.get_vocab_size(),
    )

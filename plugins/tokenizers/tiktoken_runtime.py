"""Tokenizers of tiktoken's format, as tokenizers of the ``tokenizers`` library.

A rank file has a line for each token, with its bytes in base64 and its rank, which is also its id.
Text is split by a pattern, then pairs of neighbouring tokens are merged in the order of the merged
token's rank. The library's BPE does the same with the merges sorted by that rank, so the package
``tiktoken`` is not needed.

The pattern is not in the file: published folders have it in Python code, which is never run.
``PATTERNS`` has those of known classes, and ``pat_str`` in tokenizer_config.json states another.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers

from glowplug.core.errors import FactsError
from glowplug.core.text.detokenize import BYTE_OF
from glowplug.core.text.tokenizer import Tokenizer, read_added_tokens, read_settings

MAX_BYTES = 64 << 20  #: size limit of a rank file
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}

_LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SMALL_LETTERS = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Moonlight and Kimi: runs of Han characters, words with their case, numbers of three digits
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_LETTERS}]*[{_SMALL_LETTERS}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_LETTERS}]+[{_SMALL_LETTERS}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
#: ``tokenizer_class`` of tokenizer_config.json -> pattern
PATTERNS = {"TikTokenTokenizer": KIMI}


def read_tokenizer(folder: Path, file: str, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a folder.

    Args:
        folder: the model's folder.
        file: name of the rank file.
        vocab_size: ids of the model; those without a token become reserved special tokens.

    Raises:
        FactsError: the pattern that splits text is not known.
        ValueError: a file is damaged; the message names it.
    """
    settings = read_settings(folder)
    pattern = _pattern(settings, file)
    ranks = read_ranks(folder / file)
    names = {"".join(_CHARACTER_OF[byte] for byte in token): rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocab=names, merges=_merges(names), ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # NOTE: the library raises bare Exception
        raise ValueError(f"{folder / 'tokenizer_config.json'}: pat_str: {error}") from None
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(folder, len(ranks), vocab_size))
    return Tokenizer.of_folder(backend, folder)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token in a rank file.

    Raises:
        ValueError: a line is not a token and its rank, a token or rank appears twice, a rank is
            missing, or one of the 256 bytes has no token.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: larger than {MAX_BYTES >> 20} MiB")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            decoded = base64.b64decode(token, validate=True)
            if not decoded or decoded in ranks:
                raise ValueError("an empty token, or one that appears twice")
            ranks[decoded] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    _check_ranks(ranks, path)
    return ranks


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
    """Raise ValueError if a rank is missing or one of the 256 bytes has no token."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise ValueError(f"{path}: no token for the byte {lacking[0]}")


def _merges(names: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, in the order of the token's rank."""
    found = []
    for name, rank in names.items():
        for at in range(1, len(name)):
            left, right = name[:at], name[at:]
            if left in names and right in names:
                found.append((rank, names[left], names[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added_tokens(folder: Path, first: int, vocab_size: int) -> list[AddedToken]:
    """Return the added tokens from id ``first`` on, in the order of their ids.

    An id that the folder does not name is a reserved token.

    Raises:
        ValueError: a named token has the id of a rank.
    """
    named = read_added_tokens(folder)
    if any(token < first for token in named):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: an added token has the id of a rank")
    end = max(vocab_size, max(named, default=first - 1) + 1)
    return [
        named.get(token)
        or AddedToken(f"<|reserved_token_{token}|>", special=True, normalized=False)
        for token in range(first, end)
    ]


def _pattern(settings: dict[str, Any], file: str) -> str:
    """Return the pattern that splits text.

    Raises:
        FactsError: neither the settings state it, nor is their class known.
    """
    stated = settings.get("pat_str")
    known = settings.get("tokenizer_class")
    if isinstance(stated, str) and stated:
        return stated
    if isinstance(known, str) and known in PATTERNS:
        return PATTERNS[known]
    raise FactsError(
        f"{file} needs the pattern that splits text; that of the class {str(known)[:100]!r} is in "
        "the folder's own Python code, which is never run",
        'state it as "pat_str" in tokenizer_config.json, or set tokenizer = a folder with a '
        "tokenizer.json",
    )

"""Token ids to text, piece by piece: the pieces joined are the text decoded at once.

Byte-level vocabularies (GPT-2, DeepSeek, Llama 3, Qwen) take :class:`ByteStream`: a table of bytes
and Python's incremental UTF-8 decoder, constant work a token. All others take
:class:`PrefixStream`, which decodes a short window through the tokenizer's own decoder.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
WINDOW = (
    48  #: undecodable tokens after which PrefixStream stops waiting for the rest of a character
)

_utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder(Protocol):
    """One sequence's ids to text. A character is given out when its last byte has come."""

    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What is left: incomplete bytes as U+FFFD."""
        ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted (``bytes_to_unicode`` in openai/gpt-2,
    encoder.py).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Bytes of one piece of a byte-level vocabulary; a piece with any other character stands for
    itself.
    """
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def is_byte_level(decoder: Any) -> bool:
    """Is this ``tokenizers`` decoder nothing but ByteLevel?"""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [part.get("type") for part in parts] == ["ByteLevel"]


class Pieces(dict[int, bytes]):
    """Bytes by token id, filled on first use. Ids in ``silent`` and unknown ids have none. Safe to
    share by threads.
    """

    def __init__(self, name_of: Callable[[int], str | None], silent: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(silent, b""))
        self._name_of = name_of

    def __missing__(self, token: int) -> bytes:
        name = self._name_of(token) if 0 <= token < 1 << 32 else None
        return self.setdefault(token, b"" if name is None else byte_level(name))


class ByteStream:
    """Stream decoder of a byte-level vocabulary."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decode = _utf8("replace").decode

    def feed(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(
            pieces[ids[0]] if len(ids) == 1 else b"".join([pieces[token] for token in ids])
        )

    def finish(self) -> str:
        return self._decode(b"", True)


class PrefixStream:
    """Stream decoder through any ``decode``: the text of a window less the text of the window's
    known part.

    The known part stays in the window because decoders look at neighbours (leading spaces, runs of
    byte tokens).
    """

    __slots__ = ("_decode", "_known", "_window")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._known = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._decode(self._window)
        # NOTE: a run of invalid byte tokens never ends; waiting for ever would hide all later text.
        if text.endswith(REPLACEMENT) and len(self._window) - self._known < WINDOW:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window)) if self._known < len(self._window) else ""

    def _advance(self, text: str) -> str:
        fresh = text[len(self._decode(self._window[: self._known])) :]
        if fresh or self._known > WINDOW:
            self._window = self._window[self._known :]
        self._known = len(self._window)
        return fresh

"""Incremental decoding of token ids: the joined pieces equal the text decoded at once.

Byte-level vocabularies (of most published models) use :class:`ByteStream`: a table of bytes
and Python's incremental UTF-8 decoder, with constant work per token. All others use
:class:`PrefixStream`, which decodes a short window with the tokenizer's own decoder.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  #: character for bytes that cannot be decoded
#: undecodable tokens after which PrefixStream stops waiting for the rest of a character
WINDOW = 48

_utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder(Protocol):
    """A decoder of one sequence's token ids; text is returned once its last byte has arrived."""

    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """Return the rest of the text; incomplete bytes become U+FFFD."""
        ...


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character of GPT-2's alphabet.

    The mapping is the inverse of ``bytes_to_unicode`` in openai/gpt-2, encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = byte_alphabet()  #: byte by character


def byte_level(piece: str) -> bytes:
    """Return the bytes of one piece of a byte-level vocabulary.

    A piece with a character outside the alphabet is returned as its own UTF-8 bytes.
    """
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def is_byte_level(decoder: Any) -> bool:
    """Return whether a decoder of the ``tokenizers`` library is a single ByteLevel decoder."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [part.get("type") for part in parts] == ["ByteLevel"]


class Pieces(dict[int, bytes]):
    """The bytes of each token id, computed on first use. Threads may share the object.

    Args:
        name_of: returns the piece of a token id, or None.
        without_bytes: ids without bytes; unknown ids have none either.
    """

    def __init__(self, name_of: Callable[[int], str | None], without_bytes: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(without_bytes, b""))
        self._name_of = name_of

    def __missing__(self, token: int) -> bytes:
        name = self._name_of(token) if 0 <= token < 1 << 32 else None
        return self.setdefault(token, b"" if name is None else byte_level(name))


class ByteStream:
    """A stream decoder of a byte-level vocabulary."""

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
    """A stream decoder over any ``decode`` function.

    New text is the text of a window of ids minus the text of the window's known part. The known
    part stays in the window, because decoders depend on neighbours (leading spaces, runs of byte
    tokens).
    """

    __slots__ = ("_decode", "_known", "_window")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._known = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._decode(self._window)
        # NOTE: invalid byte tokens never become a character; waiting for ever would hide all later
        # text.
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

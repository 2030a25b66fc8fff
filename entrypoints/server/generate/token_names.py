"""Names of tokens in log-probabilities: their text, or their bytes if they are not valid UTF-8."""

from __future__ import annotations

from glowplug.core.text.tokenizer import Tokenizer


class TokenNames:
    """Cached bytes and names of token ids. Without a tokenizer a token's name is ``token_id:N``."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes; b"" without a tokenizer."""
        known = self._bytes.get(token)
        if known is None:
            known = self._tokenizer.token_bytes(token) if self._tokenizer is not None else b""
            self._bytes[token] = known
        return known

    def name(self, token: int, as_id: bool = False) -> str:
        """Return the token's name for log-probabilities, its text where possible.

        The name is ``bytes:\\xe2\\x82`` for a part of a character, and ``token_id:N`` if ``as_id``.
        """
        if as_id or self._tokenizer is None:
            return f"token_id:{token}"
        raw = self.bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, token: int) -> str:
        """Return the token's text, with replacement characters for invalid UTF-8."""
        return self.bytes_of(token).decode("utf-8", "replace")

"""Tokenising and template rendering: never on the event loop, capped in bytes before and in seconds
during.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from glowplug.core.errors import RequestError, context_exceeded
from glowplug.core.text.tokenizer import Tokenizer

T = TypeVar("T")
TEXT_SECONDS = 20.0  #: most time one text may take


class TextWorkers:
    """A small thread pool around the tokenizer.

    ``max_bytes``: most UTF-8 bytes of one request's prompts; ``context``: tokens, which the error
    for more names.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, threads: int, max_bytes: int, context: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._context = context
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="glowplug-text")

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: send input_ids", code="no_tokenizer"
            )
        return self._tokenizer

    async def run(self, work: Callable[[], T]) -> T:
        """``work()`` in the pool. RequestError when it takes longer than TEXT_SECONDS."""
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._pool, work), TEXT_SECONDS
            )
        except TimeoutError:
            # NOTE: a Python thread cannot be killed; the byte cap and the sandbox's limits bound
            # what it still does.
            raise RequestError(
                "the prompt took too long to prepare", code="prompt_timeout"
            ) from None

    def check_bytes(self, texts: list[str]) -> None:
        """RequestError when the texts together are past the cap; looks at lengths only."""
        size = sum(len(text) for text in texts)
        if size > self._max_bytes or (
            4 * size > self._max_bytes
            and sum(len(text.encode()) for text in texts) > self._max_bytes
        ):
            raise context_exceeded(
                self._context,
                f"the prompt is too long: it is larger than {self._max_bytes} bytes, "
                "the most that this server takes",
            )

    async def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        tokenizer = self.tokenizer
        self.check_bytes(texts)
        return await self.run(
            lambda: [
                tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        )

    async def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        tokenizer = self.tokenizer
        return await self.run(
            lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

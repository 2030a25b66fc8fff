"""Tokenising and template rendering in threads, limited in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from glowplug.core.errors import RequestError, context_exceeded
from glowplug.core.text.tokenizer import Tokenizer

T = TypeVar("T")
TEXT_SECONDS = 20.0  #: time limit of one call


class TextWorkers:
    """A small thread pool that runs the tokenizer, so that the event loop is not blocked.

    Args:
        tokenizer: None if the engine runs without one.
        threads: number of threads.
        max_bytes: largest UTF-8 size of one request's prompts.
        context: context length in tokens, for the error of a larger prompt.
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
        """The tokenizer; raises RequestError if the engine runs without one."""
        if self._tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: send input_ids", code="no_tokenizer"
            )
        return self._tokenizer

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the pool and return its result.

        Raises:
            RequestError: ``work`` takes longer than TEXT_SECONDS.
        """
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._pool, work), TEXT_SECONDS
            )
        except TimeoutError:
            # NOTE: a Python thread cannot be killed. The byte limit and the template sandbox bound
            # its remaining work.
            raise RequestError(
                "the prompt took too long to prepare", code="prompt_timeout"
            ) from None

    def check_bytes(self, texts: list[str]) -> None:
        """Check that the texts have at most ``max_bytes`` bytes of UTF-8 in total.

        Bytes are counted only if the number of characters leaves the answer open.

        Raises:
            RequestError: the texts are larger than ``max_bytes``.
        """
        size = sum(len(text) for text in texts)
        if size > self._max_bytes or (
            4 * size > self._max_bytes
            and sum(len(text.encode()) for text in texts) > self._max_bytes
        ):
            raise context_exceeded(
                self._context,
                f"the prompt is too long: it is larger than {self._max_bytes} bytes, "
                "the limit of this server",
            )

    async def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text, computed in the pool."""
        tokenizer = self.tokenizer
        self.check_bytes(texts)
        return await self.run(
            lambda: [
                tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts
            ]
        )

    async def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids, computed in the pool."""
        tokenizer = self.tokenizer
        return await self.run(
            lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def close(self) -> None:
        """Stop the pool without waiting for calls that still run."""
        self._pool.shutdown(wait=False, cancel_futures=True)

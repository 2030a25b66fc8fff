"""The checks of requests' grammars on the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front.grammar_checks import GrammarChecks
from glowplug.entrypoints.server.generate.params import field_errors_at


class GrammarGate:
    """The checks of requests' grammars, in threads, so that the event loop is not blocked."""

    def __init__(self, plan: EnginePlan, plugins: PluginSet | None) -> None:
        self._checks = GrammarChecks(plan, plugins)
        self._pool = ThreadPoolExecutor(
            self._checks.options.workers, thread_name_prefix="glowplug-grammar-check"
        )

    async def check(self, params: Sequence[SamplingParams], places: Sequence[str] = ("",)) -> None:
        """Check the grammars of a request, and wait for the compilation of new ones.

        Args:
            params: sampling parameters, one for each prompt.
            places: their paths in the body, one for all or one for each.

        Raises:
            RequestError: a grammar is refused.
        """
        for number, one in enumerate(params):
            with field_errors_at(places[min(number, len(places) - 1)]):
                if not self._checks.known(one):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._pool, self._checks.check, one)

    def close(self) -> None:
        """Stop the threads and the processes that compile."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._checks.close()

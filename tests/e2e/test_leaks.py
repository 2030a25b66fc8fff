"""Thousands of mixed requests leave nothing behind: good, bad, failing, abandoned, several choices,
both forms.
"""

from __future__ import annotations

import asyncio
import gc
import random

import httpx
import psutil
import pytest

from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import served

ROUND = 1500


async def mixed(url: str, rng: random.Random) -> None:
    """Send a round of requests, sixteen at a time; one in ten is given up after a few
    milliseconds.
    """
    gate = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, i: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"say:{i}"}],
            "stream": rng.random() < 0.5,
            "n": rng.choice([1, 1, 3]),
            "rid": f"r{i}",
        }
        kind = rng.choice(["good"] * 7 + ["bad", "failing", "abandoned"])
        if kind == "bad":
            body["temperature"] = -1
        if kind == "failing":
            body["messages"] = [{"role": "user", "content": "fail:nan"}]
        async with gate:
            try:
                await client.post(
                    "/v1/chat/completions", json=body, timeout=0.004 if kind == "abandoned" else 20
                )
            except httpx.TimeoutException:
                pass

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=16)) as client:
        await asyncio.gather(*(one(client, i) for i in range(ROUND)))


@pytest.mark.slow
def test_memory_and_handles_stay_level() -> None:
    rng, process = random.Random(1), psutil.Process()
    with served(FakeExecutor()) as one:
        sizes = []
        for _ in range(5):
            asyncio.run(mixed(one.url, rng))
            one.wait_idle()
            for kept in (one.executor.params, one.executor.admissions):
                kept.clear()
            gc.collect()
            sizes.append((process.memory_info().rss, process.num_fds()))
            client = one.context.client
            assert not client._mail and not client._requests and not client._front.streams
            assert one.context.jobs.running == 0
    grown = sizes[-1][0] - sizes[1][0]
    assert grown / (3 * ROUND) < 1024, sizes
    assert sizes[-1][1] <= sizes[1][1] + 4, sizes

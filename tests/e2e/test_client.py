"""The asyncio client on a real engine: streams, aborts that free memory, bad requests that fail
alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from glowplug import SamplingParams
from glowplug.core.errors import EngineDead, RequestError
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.front.open_engine import start_executor
from tests.support.tiny import write_config
from tests.support.waiting import LIMIT

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("client"), "v3")


@asynccontextmanager
async def client_for(folder: Path, **config: Any) -> AsyncIterator[EngineClient]:
    plugins = load_plugins()
    plan = make_plan(
        {
            "model": str(folder),
            "weights": {"use": "random"},
            "skip_tokenizer": True,
            "device": "cpu",
            **config,
        },
        plugins=plugins,
    )
    client = EngineClient(plan, None, ())
    try:
        await client.start(lambda: start_executor(plan, plugins))
        yield client
    finally:
        await client.close()


async def tokens(
    client: EngineClient, ids: list[int], params: SamplingParams, name: str = "r"
) -> list[int]:
    got: list[int] = []
    async for delta in client.generate(client.check(ids, params), request_id=name):
        got.extend(delta.token_ids)
    return got


async def until_idle(client: EngineClient) -> None:
    async with asyncio.timeout(LIMIT):
        while True:
            stats = client.stats()
            idle = stats.running == stats.waiting == 0
            if idle and stats.pages_free + stats.pages_evictable == stats.pages_total:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("executor", ["inline", "multiprocess"])
def test_two_hundred_streams_finish(folder: Path, executor: str) -> None:
    async def run() -> None:
        async with client_for(folder, executor={"use": executor}) as client:
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            alone = await tokens(client, [9, 8, 7], params)
            many = await asyncio.gather(
                *(tokens(client, [9, 8, 7], params, f"r{i}") for i in range(200))
            )
            assert all(one == alone for one in many)
            await until_idle(client)

    asyncio.run(run())


def test_dropped_clients_free_their_pages(folder: Path) -> None:
    async def run() -> None:
        few = {"max_running_requests": 4}
        async with client_for(folder, executor={"use": "multiprocess"}, scheduler=few) as client:
            tasks = [
                asyncio.create_task(tokens(client, [3 + i, 4, 5], LONG, f"r{i}")) for i in range(12)
            ]
            async with asyncio.timeout(LIMIT):
                while not client.stats().running:
                    await asyncio.sleep(0.02)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(client)
            assert client.stats().aborted == 12, "none ran to its end"

    asyncio.run(run())


def test_abort_by_request_id(folder: Path) -> None:
    async def run() -> None:
        async with client_for(folder) as client:
            task = asyncio.create_task(_last(client, "mine"))
            await asyncio.sleep(0.2)
            await client.abort("unknown")
            await client.abort("mine")
            await client.abort("mine")
            assert (await task).finish_reason == "abort"
            await until_idle(client)

    async def _last(client: EngineClient, name: str) -> Any:
        return [
            delta async for delta in client.generate(client.check([5, 6], LONG), request_id=name)
        ][-1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ids", "params", "code"),
    [
        ([], LONG, None),
        ([5, 100_000], LONG, "invalid_token_id"),
        ([-1], LONG, "invalid_token_id"),
        ([5] * 600, LONG, "context_length_exceeded"),
        ([5] * 200, LONG, "context_length_exceeded"),
        ([5], SamplingParams(logit_bias={100_000: 1.0}), None),
        ([5], SamplingParams(stop=["x"]), None),
    ],
)
def test_a_bad_request_costs_only_itself(
    folder: Path, ids: list[int], params: SamplingParams, code: str | None
) -> None:
    async def run() -> None:
        async with client_for(folder) as client:
            with pytest.raises(RequestError) as caught:
                await tokens(client, ids, params)
            assert caught.value.code == code
            assert await tokens(client, [5], SamplingParams(max_tokens=3, ignore_eos=True))

    asyncio.run(run())


def test_controls(folder: Path) -> None:
    async def run() -> None:
        async with client_for(folder) as client:
            assert (await client.control("info"))["kv_bytes"] > 0
            assert await client.control("flush") == {}
            with pytest.raises(RequestError, match="unknown action"):
                await client.control("nonsense")

    asyncio.run(run())


def test_after_close_everything_is_refused(folder: Path) -> None:
    async def run() -> None:
        async with client_for(folder) as client:
            running = asyncio.create_task(tokens(client, [5], LONG))
            await asyncio.sleep(0.1)
            await client.close()
            with pytest.raises(EngineDead):
                await running
            with pytest.raises(EngineDead):
                await tokens(client, [5], LONG)

    asyncio.run(run())

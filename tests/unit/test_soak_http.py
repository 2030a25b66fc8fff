"""``glowplug bench soak --requests``: its figures, its failures, and its requests."""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from typing import Any

import orjson
import pytest

from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.load.soak_http import (
    HttpSoak,
    ServerSample,
    growth_per_request,
    held_by,
)
from glowplug.entrypoints.bench.load.soak_http_requests import KINDS, ExchangeMix, WantedExchange
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import served


def sample(requests: int, size: int, files: int = 9, threads: int = 5) -> ServerSample:
    return ServerSample(requests, size, files, threads, [size], {"free": 4, "total": 4})


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(["soak", "--model", "x", *words])


def soak(url: str = "http://127.0.0.1:1", **changes: Any) -> HttpSoak:
    args = options("--requests", "60", "--pauses", "2", "--in-flight", "4")
    for name, value in changes.items():
        setattr(args, name, value)
    return HttpSoak(url, os.getpid(), args, 4096)


def test_growth_is_the_slope_after_warm_up() -> None:
    rising = [sample(100 * i, 5000 + 700 * 100 * i) for i in range(9)]
    assert growth_per_request(rising) == pytest.approx(700)
    warm = [sample(0, 0), *(sample(100 * i, 9_000_000) for i in range(1, 9))]
    assert growth_per_request(warm) == 0


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ({"size": 9 << 20}, "memory grew by"),
        ({"files": 10}, "files grew from 9 to 10"),
        ({"threads": 6}, "threads grew from 5 to 6"),
    ],
)
def test_each_leak_is_named(late: dict[str, int], said: str) -> None:
    one = soak()
    one.samples = [sample(100 * i, 1 << 20) for i in range(8)]
    assert one.write(finished=True)["failures"] == []
    one.samples.append(sample(800, **{"size": 1 << 20, **late}))
    (failure,) = one.write(finished=True)["failures"]
    assert said in failure


def test_open_files_and_memory_of_this_process_are_counted() -> None:
    before = held_by({os.getpid()})
    with open(os.devnull):
        assert held_by({os.getpid()})[1] == before[1] + 1
    assert before[0] > 1 << 20 and before[2] >= 1
    assert held_by({2**22 + 1}) == (0, 0, 0)


def test_every_kind_and_route_is_drawn() -> None:
    mix = ExchangeMix(random.Random(0), 512)
    drawn = [mix.next() for _ in range(600)]
    assert set(Counter(one.kind for one in drawn)) == set(KINDS)
    assert len({one.path for one in drawn if one.status == 200}) == 5
    for one in drawn:
        if one.kind != "bad JSON":
            assert isinstance(orjson.loads(one.body), dict)


def test_grammars_of_new_requests_differ() -> None:
    """Caches of grammars cannot have them, whether they can be compiled or not."""
    mix = ExchangeMix(random.Random(1), 512)
    drawn = [mix.next() for _ in range(900)]
    for kind, status in (("new schema", 200), ("bad grammar", 400)):
        bodies = [orjson.loads(one.body) for one in drawn if one.kind == kind]
        assert {one.status for one in drawn if one.kind == kind} == {status}
        grammars = [
            orjson.dumps(body.get("response_format") or body["structured_outputs"])
            for body in bodies
        ]
        assert len(grammars) > 15 and len(set(grammars)) == len(grammars)
    choices = [orjson.loads(one.body)["n"] for one in drawn if one.kind == "choices"]
    assert set(choices) == {2, 3, 4}


def test_answers_are_checked() -> None:
    with served(FakeExecutor()) as one:
        runs = soak(one.url)
        good = orjson.dumps({"prompt": "say:x", "stream": True})
        wanted = [
            WantedExchange("streamed", "/v1/completions", good, ends=b"[DONE]"),
            WantedExchange("left in the stream", "/v1/completions", good, read=5),
            WantedExchange("wrong", "/v1/completions", good, 400),
            WantedExchange("cut", "/v1/completions", good, ends=b"[END]"),
        ]
        runs._mix.next = wanted[::-1].pop  # type: ignore[method-assign]
        runs.args.requests, runs.args.pauses = 4, 1
        runs.run()
        assert runs.samples[-1].requests == 4
        assert [text.split(",")[0] for text in runs.failures] == ["wrong", "cut"]
        assert "status 200 instead of 400" in runs.failures[0]

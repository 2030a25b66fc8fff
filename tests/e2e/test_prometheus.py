"""Prometheus, with the configuration of docs/deploy, scrapes a server and answers each query of
the dashboard with series. Skipped where no program ``prometheus`` is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from glowplug.core.step.draft_counts import DraftCounts
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.server.serve import bind
from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, served
from tests.e2e.test_deploy import DEPLOY, queries
from tests.support.waiting import LIMIT, until

PROGRAM = shutil.which("prometheus")
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
#: variables of Grafana -> the values that it would set; "All" is a regular expression
VARIABLES = {"__rate_interval": "1m", "__range": "5m", "model": ".*"}


class TwoGroups(FakeExecutor):
    """An engine that reports drafts, and two data-parallel groups in turn."""

    def _load(self) -> Stats:
        stats = super()._load()
        stats.group = stats.steps % 2
        stats.drafts = [DraftCounts(1, 1, 2, stats.steps, [stats.steps, 2 * stats.steps])]
        return stats


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Yield the address of a Prometheus that scrapes ``target`` every second."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    assert PROGRAM is not None
    command = [PROGRAM, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(LIMIT)


def ask(url: str, path: str, **given: str) -> Any:
    """Return the data of an answer of Prometheus' API, which has to succeed."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=given, timeout=LIMIT).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def with_values(query: str) -> str:
    """Return a query of the dashboard with the values of Grafana's variables."""
    for name, value in VARIABLES.items():
        query = query.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in query, query
    return query


@pytest.mark.skipif(PROGRAM is None, reason="Prometheus is not installed")
def test_every_query_of_the_dashboard_finds_series(tmp_path: Path) -> None:
    with served(TwoGroups()) as one, prometheus(tmp_path, f"{one.host}:{one.port}") as url:

        def scraped() -> bool:
            for tokens in (3, -1):
                body = {"prompt": "say:abc", "max_tokens": tokens}
                HTTP.post(one.url + "/v1/completions", json=body)
            try:
                found = ask(url, "query", query="count_over_time(glowplug:engine_steps_total[1m])")
            except httpx.TransportError:
                return False
            return any(int(each["value"][1]) > 2 for each in found["result"])

        until(scraped, "three samples are scraped")
        for title, query in queries():
            values = LABEL_VALUES.fullmatch(query)
            if values:
                found = ask(url, "series", **{"match[]": values.group(1)})
                assert all(values.group(2) in each for each in found), title
            else:
                found = ask(url, "query", query=with_values(query))["result"]
            assert found, f"{title}: no series for {query}"

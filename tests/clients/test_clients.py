"""Clients of others, unchanged, against a server with the embedded model; those that are not
installed are skipped. ``docs/clients.md`` shows the record of a run with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from glowplug.entrypoints.bench.load.local_server import LocalServer
from tests.clients.programs_table import CLIENTS, CONFIG, PROGRAMS, Client, missing, run
from tests.support.source_tree import ROOT

RECORD = ROOT / "docs" / "benchmarks" / "clients.json"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONFIG, threads=1) as one:
        yield one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_runs_unchanged(client: Client, server: LocalServer) -> None:
    reason = missing(client)
    if reason:
        pytest.skip(reason)
    found = run(client, server.base_url)
    assert found and not any(found.values()), found


def test_every_client_has_a_program_and_a_row() -> None:
    names = [client.name for client in CLIENTS]
    rows = {row["client"]: row for row in json.loads(RECORD.read_text())["clients"]}
    assert list(rows) == names
    assert {client.program for client in CLIENTS} == {
        path.name for path in PROGRAMS.glob("use_*") if path.is_file()
    }
    for row in rows.values():
        assert row["missing"] or (row["version"] != "?" and len(row["checks"]) > 0), row


def test_the_recorded_checks_hold_or_are_explained() -> None:
    """A check that fails has a remark in the table: it is the client's fault, or known."""
    for row in json.loads(RECORD.read_text())["clients"]:
        failed = [name for name, error in row["checks"].items() if error]
        assert not failed or row["note"], (row["client"], failed)
        if not row["missing"]:
            assert any("stream" in name.lower() or "users" in name for name in row["checks"]) or (
                row["client"] == "lm_eval"
            ), row["client"]

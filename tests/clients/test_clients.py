"""Clients of others, unchanged, against servers with the embedded model.

Those that are neither installed nor in a folder of ``--client-sites`` are skipped. A record of a
run with all of them is in ``docs/clients.md``.
"""

from __future__ import annotations

import json
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.entrypoints.bench.load.local_server import MODEL
from tests.clients import programs_table
from tests.clients.programs_table import CLIENTS, PROGRAMS, Client, missing, run
from tests.support.source_tree import ROOT

RECORD = ROOT / "docs" / "benchmarks" / "clients.json"
CHATS = ("openai", "anthropic", "@anthropic", "ai,", "langchain", "llama", "litellm", "instructor")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with programs_table.servers() as urls:
        yield urls


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_runs_unchanged(
    client: Client, servers: list[str], pytestconfig: pytest.Config
) -> None:
    sites = pytestconfig.getoption("client_sites")
    reason = missing(client, sites)
    if reason:
        pytest.skip(reason)
    found = run(client, servers, sites)
    assert found and not any(found.values()), found


def site_of(folder: Path, name: str, version: str) -> None:
    """Write the metadata of an installed package into ``folder``."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)


def test_clients_are_found_in_folders_of_packages_and_in_environments(tmp_path: Path) -> None:
    named = {client.name: client for client in CLIENTS}
    sites = str(tmp_path / "{name}")
    for client in (named["locust"], named["vllm"], named["openai (Node)"]):
        assert client.folder in missing(client, sites) or "install" in missing(client, sites)
    site_of(tmp_path / "locust", "locust", "9.8.7")
    assert programs_table.version(named["locust"], sites) == "9.8.7"
    assert programs_table.command(named["locust"], sites) == [sys.executable]
    venv.create(tmp_path / "vllm", with_pip=False)
    (packages,) = (tmp_path / "vllm").glob("lib/python*/site-packages")
    site_of(packages, "vllm", "6.5.4")
    assert programs_table.version(named["vllm"], sites) == "6.5.4"
    assert programs_table.command(named["vllm"], sites) == [str(tmp_path / "vllm/bin/python")]
    manifest = tmp_path / "node" / "node_modules" / "openai" / "package.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"version": "3.2.1"}')
    assert programs_table.version(named["openai (Node)"], sites) == "3.2.1"
    assert programs_table.version(named["ai, @ai-sdk/openai-compatible (Node)"], sites) == ""


def test_a_program_of_an_environment_is_run_by_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments are the model and both servers; packages of other environments are not visible."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "use_own.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps({'prefix': sys.prefix, 'path': os.environ['PYTHONPATH'],\n"
        "                  'given': ' '.join(sys.argv[1:])}))\n"
    )
    monkeypatch.setattr(programs_table, "PROGRAMS", programs)
    venv.create(tmp_path / "own", with_pip=False)
    found = run(
        Client("own", "use_own.py", "own"), ["http://a", "http://b"], f"{tmp_path}/{{name}}"
    )
    assert found == {
        "prefix": str(tmp_path / "own"),
        "path": "",
        "given": f"{MODEL} http://a http://b",
    }


def test_every_client_has_a_program_and_a_row() -> None:
    names = [client.name for client in CLIENTS]
    rows = {row["client"]: row for row in json.loads(RECORD.read_text())["clients"]}
    assert list(rows) == names
    assert {client.program for client in CLIENTS} == {
        path.name for path in PROGRAMS.glob("use_*") if path.is_file()
    }
    for row in rows.values():
        assert row["missing"] or (row["version"] and len(row["checks"]) > 0), row


def test_the_recorded_checks_hold_or_are_explained() -> None:
    """A check that fails has a remark in the table: it is the client's fault, or known."""
    for row in json.loads(RECORD.read_text())["clients"]:
        failed = [name for name, error in row["checks"].items() if error]
        assert not failed or row["note"], (row["client"], failed)
        if not row["missing"]:
            assert any("stream" in name.lower() or "users" in name for name in row["checks"]) or (
                row["client"] == "lm_eval"
            ), row["client"]


@pytest.mark.parametrize("name", CHATS)
def test_clients_of_chats_show_reasoning(name: str) -> None:
    rows = json.loads(RECORD.read_text())["clients"]
    found = [row["checks"] for row in rows if row["client"].startswith(name)]
    assert found and all(one.get("reasoning") == "" for one in found)

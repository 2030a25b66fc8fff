"""Two hosts whose weights or plans differ end with status 2 before anything is loaded.

The hosts are two processes that meet at a local address; tests/e2e/test_two_hosts.py has them in
networks of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from glowplug.entrypoints.cli.main import main
from tests.e2e.served_faults import Server, free_port
from tests.support.waiting import LIMIT

REFUSED = 2
COMMON = ("--tp", "2", "--device", "cpu", "--nnodes", "2", "--max-total-tokens", "512")


def checkpoint(folder: Path, seed: int) -> str:
    """Write a model with random weights, and return its folder."""
    assert (
        main(["checkpoint", "random", str(folder), "--shape", "tiny-v3", "--seed", f"{seed}"]) == 0
    )
    return str(folder)


@pytest.mark.parametrize(
    ("fact", "fix"),
    [
        ("checkpoint", "use the same files on every host"),
        ("sizes", "use equal hosts, or set memory.kv_tokens"),
    ],
)
def test_hosts_that_differ_are_refused_on_both(fact: str, fix: str, tmp_path: Path) -> None:
    """Their weights have the same names and shapes, or their caches different sizes."""
    models = [checkpoint(tmp_path / "model0", 0)] * 2
    more: tuple[str, ...] = ()
    if fact == "checkpoint":
        models[1] = checkpoint(tmp_path / "model1", 1)
    else:
        more = ("--context-length", "256")
    meeting = f"127.0.0.1:{free_port()}"
    servers = []
    try:
        for host, model in enumerate(models):
            (tmp_path / f"host{host}").mkdir()
            words = (*COMMON, "--node-rank", str(host), "--dist-init-addr", meeting)
            words += ("--model-path", model, *(more if host else ()))
            servers.append(Server(tmp_path / f"host{host}", *words))
        assert [server.end(LIMIT) for server in servers] == [REFUSED, REFUSED]
        for server in servers:
            assert f"different {fact}: host 0 (rank 0) has" in server.text()
            assert fix in server.text() and "nothing was loaded" in server.text()
            assert "weights:" not in server.text()
    finally:
        for server in servers:
            server.kill()

"""One engine across two hosts (network namespaces): it answers, and when a host or the link fails,
both sides end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.two_hosts import STARTS, WITNESS, Hosts, cannot, run, start_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def namespaces() -> None:
    reason = cannot()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("fault", WITNESS)
@pytest.mark.parametrize("way", STARTS)
def test_an_engine_across_two_hosts_answers_and_ends(way: str, fault: str, tmp_path: Path) -> None:
    if way == "ray":
        pytest.importorskip("ray")
    assert run(way, fault, tmp_path).wrong(fault, way) == []


def test_hosts_that_differ_end_before_loading(tmp_path: Path) -> None:
    """Host 1 has another seed and a plugin of its own."""
    with Hosts(tmp_path) as hosts:
        pair = start_flags(hosts, "--seed", "7", "--plugin", "tests.e2e.fault_plugin")
        codes = [one.process.wait(120) for one in pair]
        assert codes == [2, 2]
        for one in pair:
            text = one.text()
            assert "nothing was loaded" in text and "different plugins: host 0 (rank 0) has" in text
            assert '"seed":0' in text and '"seed":7' in text and "--plugin" in text
        assert not hosts.engine_pids(0) and not hosts.engine_pids(1)

"""``glowplug bench soak --requests`` against a server with drafts and a small cache of grammars."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.load.soak_http_requests import KINDS

OPTIONS = (
    "soak --model embedded --device cpu --context-length 512 --max-total-tokens 8192 "
    "--max-running-requests 8 --speculative-algorithm NEXTN --set grammar.cache_bytes=100000 "
    "--requests 240 --pauses 2 --growth-per-request 1e9 --output-file"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_is_answered_as_expected(tmp_path: Path) -> None:
    """Memory is not judged after so few requests; pages, files and threads are."""
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    args = parser.parse_args([*OPTIONS.split(), str(tmp_path / "soak.json")])
    status = bench.run(args)
    found = json.loads((tmp_path / "soak.json").read_text())
    assert (found["failures"], status) == ([], 0)
    assert set(found["kinds"]) == set(KINDS)
    assert all(one["pages"]["free"] == one["pages"]["total"] for one in found["samples"])

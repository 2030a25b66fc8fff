"""``bench kernels --collectives --peer``: rows of SGLang's script, or the reason for none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.bench.ranks import peer, tables

LINES = """
print('a line of a library')
for size in sys.argv[sys.argv.index("--bytes") + 1:]:
    print('{"bytes": %s, "us": 2.5, "error": 0.001}' % size)
"""


def interpreter(folder: Path, body: str) -> str:
    """Write a stand-in for SGLang's interpreter, which runs ``body``."""
    tool = folder / "python"
    tool.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    tool.chmod(0o755)
    return str(tool)


def test_rows_of_the_peer_stand_in_the_table_beside_ours(tmp_path: Path) -> None:
    rows = list(peer.all_reduce_rows(interpreter(tmp_path, LINES), 4, [2, 4096, 8192]))
    assert [(row["bytes"], row["gb_s"]) for row in rows] == [
        (4096, pytest.approx(4096 * 1.5 / 2500)),
        (8192, pytest.approx(8192 * 1.5 / 2500)),
    ]
    ours = [{**rows[0], "provider": "peer_memory", "us": 1.5}]
    assert "| 4096 | 1.5 | 2.5 |" in " ".join(tables.show(ours + rows).split())


@pytest.mark.parametrize(
    ("body", "reason"),
    [("sys.exit('no GPU here')", "exit status 1: no GPU here"), ("import nothing_here", "nothing")],
)
def test_a_failure_names_the_last_lines(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(GlowplugError, match=reason):
        list(peer.all_reduce_rows(interpreter(tmp_path, body), 2, [4096]))


def test_an_interpreter_without_end_reaches_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "LIMIT", 0.2)
    with pytest.raises(GlowplugError, match="timed out"):
        list(peer.all_reduce_rows(interpreter(tmp_path, "import time; time.sleep(60)"), 2, [4096]))


def test_the_options_name_sglang_only(tmp_path: Path) -> None:
    assert peer.given([]) == (None, {})
    python = interpreter(tmp_path, "print('version 0.5.17')")
    assert peer.given([f"sglang={python}"]) == (python, {"sglang": "0.5.17"})
    for wrong in (f"vllm={python}", "sglang", f"other={python}"):
        with pytest.raises(ValueError, match="--peer"):
            peer.given([wrong])
    with pytest.raises(ValueError, match="not installed"):
        peer.given([f"sglang={interpreter(tmp_path, 'sys.exit(3)')}"])

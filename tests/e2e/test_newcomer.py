"""The newcomer's path of docs/ablation.md: its five commands run as they are written."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import demo_environment
from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "ablation.md"
#: files by which make takes an environment for a finished one
STAMPS = (".constraints", ".demo")
SCRIPT = "#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
MARK = "== "


def commands() -> list[str]:
    """Return the commands of the page's first block."""
    block = re.search(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return block.group(1).splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the environment that ``make demo`` makes, from packages installed here, and
    with matplotlib and pip.
    """
    folder = tmp_path / "glowplug"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name != ".venv":
            (folder / path.name).symlink_to(path)
    python = demo_environment.make(folder / ".venv", "plots")
    site = next((folder / ".venv" / "lib").glob("python*/site-packages"))
    demo_environment.link(importlib.metadata.distribution("pip"), site)
    scripts = {"glowplug": "glowplug.entrypoints.cli.main", "pip": "pip._internal.cli.main"}
    for name, module in scripts.items():
        script = python.parent / name
        script.write_text(SCRIPT.format(python=python, module=module))
        script.chmod(0o755)
    for name in STAMPS:
        (folder / ".venv" / name).touch()
    return folder


def test_five_commands_lead_to_an_own_table_and_charts(checkout: Path) -> None:
    lines = commands()
    assert len(lines) == 5 and lines[0] == "make demo"
    script = "\n".join(f"echo '{MARK}{number}'\n{line}" for number, line in enumerate(lines, 1))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=checkout,
        check=False,
        env=demo_environment.variables(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.split(rf"^{MARK}\d\n", done.stdout, flags=re.MULTILINE)[1:]
    demo, _, pip, table, charts = said
    assert "42" in demo and "already satisfied: matplotlib" in pip
    document = json.loads((checkout / "ablation.json").read_text())
    assert [(row["row"], row["status"]) for row in document["rows"]] == [
        ("base", "measured"),
        ("radix=off", "measured"),
        ("nextn=1", "measured"),
    ]
    assert (checkout / "ablation.md").read_text() in table and "nextn=1" in table
    written = [checkout / name for name in charts.split()]
    assert (checkout / "ablation.svg").exists()
    assert [path.name for path in written] == ["ablation-ablation.svg", "ablation-startup.svg"]
    assert all(">2. radix=off<" in path.read_text() for path in written[:1])
    assert "radix=off" in written[1].read_text()

"""Generate the page of clients from the record of running them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parent / "benchmarks" / "clients.json"
HEAD = """\
# Clients

Programs of others that run unchanged against `glowplug serve`. Each row is a run with the embedded
model on a CPU: `python -m tests.clients.programs_table --sites '/folder/{name}' --output x.json`.
The folder of a client is a virtual environment, the target of `pip install --target`, or a folder
with `node_modules`. [The record](benchmarks/clients.json) has the conditions.

The programs are in `tests/clients/programs`. `tests/clients/test_clients.py` runs those whose
client is installed or in a folder of `pytest --client-sites '/folder/{name}'`. Checks of reasoning
use a second server with the parser `deepseek_r1`. That of langchain uses the Responses API, because
its class leaves `reasoning_content` of chat completions out.

| client | version | works | fails |
|---|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [_row(row) for row in record["clients"]]
    notes = [f"- {row['client']}: {row['note']}" for row in record["clients"] if row["note"]]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def _row(row: dict[str, Any]) -> str:
    """Return the table row of one client."""
    good = ", ".join(name for name, error in row["checks"].items() if not error)
    bad = ", ".join(name for name, error in row["checks"].items() if error)
    if row["missing"]:
        bad = f"not run: {row['missing']}".strip().replace("|", "/")
    return f"| {row['client']} | {row.get('version', '')} | {good} | {bad} |"

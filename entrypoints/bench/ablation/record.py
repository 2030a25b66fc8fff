"""The result file of an ablation, to which each row is added as soon as it was measured.

A row whose plan, versions and load match a result in the file is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from glowplug.entrypoints.bench.ablation.load import AblationLoad
from glowplug.entrypoints.bench.ablation.planning import PlannedRow, technique_cells
from glowplug.entrypoints.bench.ablation.rows import label
from glowplug.entrypoints.bench.ablation.techniques import columns
from glowplug.entrypoints.bench.others import report

Record = dict[str, Any]
FORMAT = "glowplug ablate"  #: value of ``kind``, by which a result file is recognised
MEASURED, FAILED, REFUSED, SAME, LEFT_OUT = (
    "measured",
    "failed",
    "refused",
    "same plan",
    "left out",
)
VERSIONS = ("glowplug", "commit", "python", "packages", "card")
#: keys of a row's measured results
RESULTS = (
    "single",
    "offline",
    "memory",
    "seconds",
    "load_average",
    "start_seconds",
    "startup_seconds",
    "kv_tokens",
    "chosen",
    "dtype",
    "failure",
    "date",
)


def read(path: Path) -> Record | None:
    """Return the document of a result file; None if there is no file.

    Raises:
        ValueError: the file is something else.
    """
    if not path.exists():
        return None
    try:
        found = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or found.get("kind") != FORMAT:
        raise ValueError(f"{path} is not a result of `glowplug ablate`: give another --output-file")
    return found


class AblationFile:
    """The result file of one table.

    Args:
        path: the file.
        rows: the table's rows with their plans.
        load: the requests.
        conditions: command, date, versions and card of this call.
        retry: measure failed rows again.

    Raises:
        ValueError: there is a file that is no result of an ablation.
    """

    def __init__(
        self,
        path: Path,
        rows: Sequence[PlannedRow],
        load: AblationLoad,
        conditions: Mapping[str, Any],
        retry: bool = False,
    ) -> None:
        self.path = path
        self.rows = rows
        self._conditions = dict(conditions)
        self._key = {
            "versions": {name: conditions.get(name) for name in VERSIONS},
            # JSON's values, as they come back from the file
            "load": orjson.loads(orjson.dumps(asdict(load))),
        }
        before = (read(path) or {"rows": []})["rows"]
        labels = {label(row.settings) for row in rows}
        kept = (MEASURED, FAILED, REFUSED)
        self._others = [one for one in before if one["row"] not in labels and one["status"] in kept]
        usable = (MEASURED,) if retry else (MEASURED, FAILED)
        self._known = {
            one["fingerprint"]: one
            for one in before
            if one["status"] in usable and self._key.items() <= one.items()
        }
        self._found: dict[int, Record] = {}

    def known(self, row: PlannedRow) -> Record | None:
        """Return the results in the file that match a row; None if it is to be measured."""
        return self._known.get(row.fingerprint) if row.plan else None

    def add(self, row: PlannedRow, status: str, results: Mapping[str, Any]) -> Record:
        """Add the results of a row, write the file, and return the row's record."""
        self._found[row.number] = self._record(row, status, results)
        report.write_json(self.path, self.document())
        return self._found[row.number]

    def document(self) -> Record:
        """Return the whole document: rows of this table in order, then those of earlier calls.

        Rows of the table without a result are left out of the measurement, and say so.
        """
        every = [
            self._found.get(row.number) or self._record(row, LEFT_OUT, {}) for row in self.rows
        ]
        fields = {name for one in (*every, *self._others) for name in one["settings"]}
        return {
            "kind": FORMAT,
            **self._conditions,
            "load": self._key["load"],
            "columns": [[one.name, one.title] for one in columns(fields)],
            "rows": [*every, *self._others],
        }

    def _record(self, row: PlannedRow, status: str, results: Mapping[str, Any]) -> Record:
        """Return the record of a row: settings, plan, versions and load, then the results."""
        held = {name: results[name] for name in RESULTS if name in results}
        return {
            "row": label(row.settings),
            "settings": row.settings,
            "status": status,
            "fingerprint": row.fingerprint,
            "cells": technique_cells(row, self.rows[0]),
            "model": row.config["model"],
            "config": {key: value for key, value in row.config.items() if key != "model"},
            **self._key,
            **({"same_as": label(self.rows[row.same_as - 1].settings)} if row.same_as else {}),
            **({"refusals": [asdict(one) for one in row.refusals]} if row.refusals else {}),
            **held,
        }


def today() -> str:
    """Return the present time for a row's record."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")

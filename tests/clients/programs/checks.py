"""How a client program reports: each function given to ``run`` is one check.

This file imports nothing of the project, so that the programs run with any client's packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable

#: name of the served model, and the addresses of a server without reasoning and of one with it,
#: without a path
MODEL, URL, REASONING_URL = sys.argv[1:] or ("", "", "")
QUESTION = "What is 17 + 25?"
ANSWER = "42"
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Forecast.", "parameters": WEATHER},
}


def run(*checks: Callable[[], object]) -> None:
    """Run the checks in order and print {name: error, or ""} as the last line.

    A check is named after its function; underscores become spaces.
    """
    found = {}
    for check in checks:
        try:
            check()
            error = ""
        except Exception as failure:
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"[:300]
        found[check.__name__.replace("_", " ")] = error
    print(json.dumps(found), flush=True)


def require(module: str) -> None:
    """End the program if ``module``, or one that it imports, is not installed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{module} cannot be imported: {done.stderr.splitlines()[-1]}")


def is_forecast(value: dict[str, object]) -> None:
    """Check the arguments of a call of the tool ``weather``."""
    assert value["city"] in ("Bern", "Oslo") and isinstance(value["days"], int), value

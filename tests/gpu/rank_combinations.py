"""Every admitted combination of two ranks on two GPUs, each started on a small random model and
compared with plain torch on one of them.

The ranks are a pair of processes that stays: each combination builds its engine in them. The first
cells of a run cover every pair of values, so that a run that is cut short has tried each of them.

``python -m tests.gpu.rank_combinations --seconds 480 --output ranks.json`` runs as many as fit into
8 minutes, and ``--left-by ranks.json --output rest.json`` the remaining ones. ``--device cpu`` runs
what can run over gloo.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from pathlib import Path
from typing import Any

from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from tests.gpu.cells import Cell
from tests.gpu.combinations import TOKENS, Reference, judge, prompts
from tests.gpu.matrix_run import Done, Matrix, Outcome, arguments, run_matrix
from tests.gpu.rank_cells import PLUGINS, rank_matrix, write_rank_models
from tests.gpu.rank_pair import RankPair


def run(
    cell: Cell, pair: RankPair, plugins: PluginSet, reference: Reference, folder: Path, device: str
) -> Outcome:
    """Serve two waves of prompts on the ranks and compare. Raise AssertionError, or any error of
    the ranks.
    """
    plan = make_plan(cell.config(folder, device), plugins=plugins)
    answers = pair.answers(plan, prompts(), TOKENS)
    return judge(cell, answers, reference, device)


_state: dict[str, Any] = {}


def _prepare(device: str) -> None:
    folder = write_rank_models(Path(tempfile.mkdtemp(prefix="glowplug-ranks-")), device == "cpu")
    plugins = load_plugins(PLUGINS)
    pair = RankPair(plugins)
    atexit.register(pair.close)
    _state.update(
        pair=pair,
        plugins=plugins,
        reference=Reference(folder, device),
        folder=folder,
        device=device,
    )


def attempt(cell: Cell) -> Done:
    try:
        return cell, run(cell, **_state), ""
    except Exception as error:
        return cell, None, f"{type(error).__name__}: {error}"[:400]


MATRIX = Matrix(
    "tests.gpu.rank_combinations",
    PLUGINS,
    rank_matrix,
    _prepare,
    attempt,
    ("layout", "exchange", "model", "kv_dtype", "dtype", "graphs", "steps", "ops", "attention"),
    models=write_rank_models,
    pairs_first=True,
)


def main() -> int:
    parser = arguments(__doc__)
    parser.set_defaults(jobs=1)
    return run_matrix(MATRIX, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

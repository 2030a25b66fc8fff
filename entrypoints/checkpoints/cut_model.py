"""Models cut to one layer of each kind, in published shapes, to measure and tune kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.core.plugin.registry import PluginSet

SHAPES = Path(__file__).resolve().parents[2] / "models" / "shapes"
ALIASES = {"v2lite": "deepseek-v2-lite", "v3": "deepseek-v3", "v3slice": "deepseek-v3-slice"}


def model_config(name: str, plugins: PluginSet) -> dict[str, Any]:
    """Return config.json of a shipped shape ("v2lite", "v3", "tiny-v3") or of a model.

    Raises:
        FactsError: there is no such model.
    """
    path = SHAPES / f"{ALIASES.get(name, name)}.json"
    if path.is_file():
        shipped: dict[str, Any] = json.loads(path.read_text())
        return shipped
    return dict(plugins.read_model(name).facts.config)


def cut_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
    """Cut a model to one layer of each kind.

    Returns:
        The configuration, and for each layer the number of layers of the whole model it represents.
    """
    layers = int(config["num_hidden_layers"])
    dense = int(config.get("first_k_dense_replace") or 0)
    if not config.get("n_routed_experts"):
        return {**config, "num_hidden_layers": 1}, {0: layers}
    cut = {**config, "first_k_dense_replace": min(dense, 1), "num_nextn_predict_layers": 0}
    if not dense or dense >= layers:
        return {**cut, "num_hidden_layers": 1}, {0: layers}
    return {**cut, "num_hidden_layers": 2}, {0: dense, 1: layers - dense}


def write_cut(config: Mapping[str, Any], folder: Path) -> dict[int, int]:
    """Write config.json of a model cut to one layer of each kind to ``folder``.

    Returns:
        For each layer the number of layers of the whole model that it represents.
    """
    cut, times = cut_config(config)
    (folder / "config.json").write_text(json.dumps(cut))
    return times

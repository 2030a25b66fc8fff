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
    """Return the config.json of a model, or of a shape shipped here ("v2lite", "v3", "tiny-v3").

    Raises:
        FactsError: there is no such model.
    """
    path = SHAPES / f"{ALIASES.get(name, name)}.json"
    if path.is_file():
        shipped: dict[str, Any] = json.loads(path.read_text())
        return shipped
    return dict(plugins.read_model(name).facts.config)


def cut_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
    """Cut a model's configuration to one layer of each kind.

    Returns:
        The configuration of the cut model; and, for each layer index of the cut model, the number
        of layers of this kind in the whole model.
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
    """Write a config.json to ``folder`` in which the model is cut to one layer of each kind.

    Returns:
        For each layer index of the cut model, the number of layers of this kind in the whole model.
    """
    cut, times = cut_config(config)
    (folder / "config.json").write_text(json.dumps(cut))
    return times
